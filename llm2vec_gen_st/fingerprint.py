"""What tells one student's vectors from another's."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from sentence_transformers.base.modules import Module

from llm2vec_gen_st.modules.lora import lora_parameters

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen


def student_fingerprint(model: LLM2VecGen, instructions: tuple[str, str]) -> str:
    """16 hexadecimal digits that stay the same as long as a student's vectors do.

    They cover the base model's fingerprint, suffix, heads, LoRA layers, lengths, both instructions, and what is done to
    a vector behind the heads; not the dtype and the device, which round vectors a little differently.

    Args:
        model: The student.
        instructions: What is put before queries, and before documents.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> len(student_fingerprint(tiny_model(), ("", "")))
        16
    """
    transformer, head = model.suffix_transformer, model.response_head
    base, behind = transformer.base, list(model)[2:]
    settings = {
        # Quantized weights have no fingerprint; their place of origin then tells the most.
        "base": base.fingerprint or [base.id, base.revision, base.embedding_sample],
        "tokens": [transformer.thought_tokens, transformer.compression_tokens, transformer.max_seq_length],
        "lora": transformer.lora,
        "behind": [
            [type(module).__name__, module.get_config_dict() if isinstance(module, Module) else {}] for module in behind
        ],
        "truncate_dim": model.truncate_dim,
        "instructions": instructions,
    }
    tensors: dict[str, torch.Tensor] = {"suffix": transformer.suffix}
    for name, layer in (("recon", head.mlp_recon), ("align", head.mlp_align)):
        if layer is not None:
            tensors |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    for number, module in enumerate(behind):
        tensors |= {f"behind.{number}.{name}": tensor for name, tensor in module.state_dict().items()}
    if transformer.lora is not None:
        tensors |= lora_parameters(transformer.llm)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
