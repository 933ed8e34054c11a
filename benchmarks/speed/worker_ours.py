"""Worker of this package and of the host's plain pooling, on the model that :mod:`peers` wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from serving import measured, serve
from torch import nn

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, load_backbone
from llm2vec_gen_st.checkpoints import export_official
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.products import multiply_onednn, onednn_formats, packed

STUDENT = "llm2vec-gen-smollm2-135m"
_state: dict[str, Any] = {}


def export(base: str, checkpoint: str) -> dict[str, Any]:
    """Write the built-in model's LLM as a directory for transformers 4 and 5, and the student that refers to it."""
    loaded = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": "float32"})
    loaded.llm.save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    config_file = Path(base) / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    # transformers 4 looks for it here, and would otherwise take another value.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    export_official(LLM2VecGen(STUDENT, backbone=load_backbone(base), device="cpu"), checkpoint)
    return {}


def load(dtype: str = "float32") -> dict[str, Any]:
    """Load the built-in student."""
    model = _state["model"] = LLM2VecGen(STUDENT, device="cpu", model_kwargs={"dtype": dtype})
    return {"attention": model.llm.config._attn_implementation}


def load_pooling(base: str) -> dict[str, Any]:
    """Load the host's own pipeline: the same LLM, and the mean over a text's tokens."""
    # Without this the host writes each text into the chat template.
    text_only = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    transformer = Transformer(
        base, modality_config=text_only, module_output_name="token_embeddings", max_seq_length=512
    )
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])
    _state["model"] = model.to("cpu")
    return {}


def encode(texts: list[str], batch_size: int, vectors: str) -> dict[str, Any]:
    """Embed texts."""
    found, result = measured(lambda: _state["model"].encode(texts, batch_size=batch_size))
    np.save(vectors, result)
    return found


def token_counts(texts: list[str]) -> dict[str, Any]:
    """Tokens of each text as the loaded model reads it, without a suffix."""
    model = _state["model"]
    return {"counts": [int(model.preprocess([text])["attention_mask"].sum()) for text in texts]}


def matmul_peak(dtype: str, sizes: list[int], seconds: float) -> dict[str, Any]:
    """The rate of products of square matrices, in GFLOP/s: the best of torch's and oneDNN's at some sizes.

    Each is kept up for a while.
    """
    number_format = getattr(torch, dtype)
    best = 0.0
    for size in sizes:
        rows, weight = (torch.randn(size, size).to(number_format) for _ in range(2))
        ways: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]]
        ways = [(nn.functional.linear, weight)]
        if number_format in onednn_formats():
            ways += [(multiply_onednn, weight), (multiply_onednn, packed(weight, size))]
        for multiply, held in ways:
            done, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                multiply(rows, held)
                done += 1
            best = max(best, 2 * size**3 * done / (time.perf_counter() - start) / 1e9)
    return {"gflops": best}


def prepare_step(
    query: list[list[int]], response: list[list[int]], teacher: list[list[float]], checkpointing: bool, rate: float
) -> dict[str, Any]:
    """Take a batch, given as token ids, and make loss and optimizer."""
    model = _state["model"]
    # The authors' format ends at the heads: without this, two alignment losses would be of different vectors.
    if isinstance(model[-1], Normalize):
        del model[-1]
    _state["batch"] = [pad_right(query), pad_right(response)]
    _state["teacher"] = torch.tensor(teacher)
    if checkpointing:
        model.llm.activation_checkpointing_enable()
    model.train()
    _state["loss"] = LLM2VecGenLoss(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _state["optimizer"] = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    return {"trainable": sum(parameter.numel() for parameter in trained)}


def step() -> dict[str, Any]:
    """One training step with both losses."""
    loss, optimizer = _state["loss"], _state["optimizer"]

    def run() -> dict[str, float]:
        optimizer.zero_grad()
        # The loss adds to the features that it is given.
        losses = loss([dict(features) for features in _state["batch"]], _state["teacher"])
        sum(losses.values()).backward()
        optimizer.step()
        return {name: float(value.detach()) for name, value in losses.items()}

    found, losses = measured(run)
    return {**found, **losses}


def prompts(texts: list[str]) -> dict[str, Any]:
    """Compute the soft prompts that :func:`decode` starts from."""
    _state["prompts"] = _state["model"].encode_soft_prompts(texts)
    return {}


def decode(tokens: int, first: int) -> dict[str, Any]:
    """Decode the first soft prompts together."""
    model = _state["model"]
    found, texts = measured(lambda: model.decode(_state["prompts"][:first], max_new_tokens=tokens))
    return {**found, "texts": texts}


if __name__ == "__main__":
    serve(
        {
            "export": export,
            "load": load,
            "load_pooling": load_pooling,
            "encode": encode,
            "token_counts": token_counts,
            "matmul_peak": matmul_peak,
            "prepare_step": prepare_step,
            "step": step,
            "prompts": prompts,
            "decode": decode,
        }
    )
