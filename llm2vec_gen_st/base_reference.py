"""How a base model is recognised again: what a checkpoint records of it, and the comparison with what was loaded."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_SAMPLES_PER_TENSOR = 64
_EMBEDDING_SAMPLES = 32
_EXACT_DTYPES = (torch.float32, torch.bfloat16)


class BaseModelError(RuntimeError):
    """The base model could not be loaded, or is not the one a checkpoint was made for."""


@dataclass(frozen=True)
class BaseReference:
    """What a checkpoint stores about its base model.

    Args:
        id: Hub id or local directory of the base model.
        revision: Commit of the hub repository, if known.
        fingerprint: Digest of all base weights (see :func:`fingerprint`), or ``None`` if it was never taken.
        embedding_sample: A few values of the input embedding (see :func:`embedding_sample`), by which a quantized or
            float16 copy of the base model is recognised; ``None`` if they were never taken.

    Example:
        >>> BaseReference("Qwen/Qwen3-0.6B").id
        'Qwen/Qwen3-0.6B'
    """

    id: str
    revision: str | None = None
    fingerprint: str | None = None
    embedding_sample: str | None = None

    @classmethod
    def of(cls, llm: PreTrainedModel, base_id: str, revision: str | None = None) -> BaseReference:
        """The reference of a loaded LLM, before any adapter is added to it.

        Args:
            llm: The causal LM.
            base_id: Hub id or local directory it was loaded from.
            revision: Hub revision, if known.
        """
        return cls(base_id, revision, fingerprint(llm), embedding_sample(llm))

    def __str__(self) -> str:
        return f"{self.id} (revision {self.revision or 'not recorded'}, fingerprint {self.fingerprint or 'none'})"


def fingerprint(llm: nn.Module) -> str | None:
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
    # Some kinds of quantization keep their weights outside the parameters, or in tensors that say they are float32.
    if getattr(llm, "is_quantized", False):
        return None
    digest = hashlib.sha256()
    for name, parameter in sorted(llm.named_parameters()):
        if parameter.dtype not in _EXACT_DTYPES or not _is_plain(parameter):
            return None
        values = parameter.detach().flatten()
        step = max(1, values.numel() // _SAMPLES_PER_TENSOR)
        sample = values[::step].to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def embedding_sample(llm: PreTrainedModel) -> str | None:
    """A few values of the input embedding, which quantization of the linear layers leaves as it is.

    Args:
        llm: The causal LM.

    Returns:
        32 evenly spaced values in bfloat16, as hexadecimal digits; ``None`` if the embedding itself is quantized or
        offloaded.
    """
    weight = cast(torch.Tensor, llm.get_input_embeddings().weight)
    if not _is_plain(weight):
        return None
    values = weight.detach().flatten()
    # No round step, which could stay in one column of the embedding.
    places = torch.arange(_EMBEDDING_SAMPLES, device=values.device) * (values.numel() - 1) // (_EMBEDDING_SAMPLES - 1)
    return values[places].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes().hex()


def compare_bases(expected: BaseReference, found: BaseReference) -> tuple[bool, str] | None:
    """Whether two references stand for the same weights, by what both know of them.

    Args:
        expected: One reference.
        found: The other.

    Returns:
        Whether they agree, and what was compared (``"weights"`` or ``"input embeddings"``); ``None`` if nothing could
        be.

    Example:
        >>> compare_bases(BaseReference("a", fingerprint="0" * 16), BaseReference("b", fingerprint="1" * 16))
        (False, 'weights')
    """
    if expected.fingerprint is not None and found.fingerprint is not None:
        return expected.fingerprint == found.fingerprint, "weights"
    if expected.embedding_sample is not None and found.embedding_sample is not None:
        return _samples_agree(expected.embedding_sample, found.embedding_sample), "input embeddings"
    return None


def check_base(expected: BaseReference, found: BaseReference, *, strict: bool = True) -> None:
    """Refuse a base model whose weights are not those a checkpoint was trained on.

    Fingerprints are compared where both are known. A quantized or float16 LLM has none; its input embedding, which is
    not quantized with the rest, is then compared instead, so a quantized copy of the right base model is accepted and
    another base model is not. Where the embedding is quantized too, a warning says that nothing was compared.

    Args:
        expected: What the checkpoint recorded.
        found: What was loaded.
        strict: If ``False``, a difference is only warned about.

    Raises:
        BaseModelError: If the weights differ; names both.
    """
    compared = compare_bases(expected, found)
    if compared is None:
        if expected.fingerprint is not None:
            logger.warning(
                "The weights of %s are quantized, offloaded or in float16, so they could not be compared with the "
                "fingerprint %s that this checkpoint was trained on.",
                found.id,
                expected.fingerprint,
            )
        return
    same, what = compared
    if same:
        return
    message = (
        f"This checkpoint was trained on the base model {expected}, but the one loaded is {found}. "
        f"Its {what} differ, so embeddings would be wrong. Load the recorded base model instead"
    )
    if strict:
        raise BaseModelError(message + ", or pass verify_base=False if you know that they fit.")
    logger.warning("%s.", message)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's own values are the weights: quantized ones are integers, or of a class of their own."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.dtype.is_floating_point
        and tensor.element_size() > 1
        and tensor.device.type != "meta"
    )


def _samples_agree(one: str, other: str) -> bool:
    try:
        first, second = (
            torch.frombuffer(bytearray.fromhex(sample), dtype=torch.bfloat16).float() for sample in (one, other)
        )
    except ValueError:
        return False
    # Either side may have been rounded to float16 first, so values may differ by one step of bfloat16.
    return first.shape == second.shape and torch.allclose(first, second, rtol=2**-7, atol=1e-6)
