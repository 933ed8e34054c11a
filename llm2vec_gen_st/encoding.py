"""What encoding promises beyond the host's: checked texts in, checked vectors out, in the container asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sentence_transformers import quantize_embeddings

# Positional options of the host's encode after its inputs, in its order.
_ENCODE_OPTIONS = (
    "prompt_name",
    "prompt",
    "batch_size",
    "show_progress_bar",
    "output_value",
    "precision",
    "convert_to_numpy",
    "convert_to_tensor",
    "device",
    "normalize_embeddings",
    "truncate_dim",
    "pool",
    "chunk_size",
)


def as_texts(inputs: Any) -> str | list[str]:
    """Check that the inputs are texts.

    Args:
        inputs: A string or any iterable of strings.

    Returns:
        The string, or the strings as a list.

    Raises:
        TypeError: If they are anything else; names the first wrong position.

    Example:
        >>> as_texts(text for text in ("a", "b"))
        ['a', 'b']
    """
    if isinstance(inputs, str):
        return str(inputs)
    try:
        items = list(inputs)
    except TypeError:
        raise TypeError(f"Inputs must be a string or an iterable of strings, got {type(inputs).__name__}.") from None
    if isinstance(inputs, dict | bytes):
        raise TypeError(f"Inputs must be a string or an iterable of strings, got {type(inputs).__name__}.")
    for position, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(f"Input {position} is not a string but {type(item).__name__}: {str(item)[:80]!r}.")
    return [str(item) for item in items]


def as_rows(inputs: Any) -> list[str]:
    """As :func:`as_texts`, with a single string as a list of one.

    Args:
        inputs: A string or any iterable of strings.

    Raises:
        TypeError: If they are anything else; names the first wrong position.

    Example:
        >>> as_rows("a"), as_rows(("a", "b"))
        (['a'], ['a', 'b'])
    """
    texts = as_texts(inputs)
    return [texts] if isinstance(texts, str) else texts


def instruction_options(prompt_name: str | None, prompt: str | None) -> dict[str, Any]:
    """The one of two ways to say an instruction that counts: itself if it is given, or else its name.

    Args:
        prompt_name: Name of the instruction.
        prompt: The instruction itself.

    Example:
        >>> instruction_options("query", None), instruction_options("query", "")
        ({'prompt_name': 'query'}, {'prompt': ''})
    """
    return {"prompt_name": prompt_name} if prompt is None else {"prompt": prompt}


def named_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options of the host's ``encode`` by name.

    Args:
        args: Positional arguments after the inputs.
        kwargs: Keyword arguments.

    Returns:
        Name to value.

    Raises:
        TypeError: If there are more positional arguments than options.

    Example:
        >>> named_options(("query",), {"batch_size": 8})
        {'prompt_name': 'query', 'batch_size': 8}
    """
    if len(args) > len(_ENCODE_OPTIONS):
        raise TypeError(f"encode takes at most {len(_ENCODE_OPTIONS) + 1} positional arguments, got {len(args) + 1}.")
    return {**dict(zip(_ENCODE_OPTIONS, args, strict=False)), **kwargs}


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch size at which nothing would be encoded.

    Args:
        batch_size: Texts run at once.

    Raises:
        ValueError: If it is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")


def check_finite(found: Any) -> None:
    """Refuse vectors that hold infinities or NaNs.

    Args:
        found: (N, D) or (D) array or tensor, or a list of N tensors (D).

    Raises:
        FloatingPointError: If a value is not finite; names the input's position.
    """
    rows = found if isinstance(found, torch.Tensor | np.ndarray) else list(found)
    if not len(rows):
        return
    values = torch.stack(list(rows)) if isinstance(rows, list) else torch.as_tensor(rows)
    values = values[None] if values.ndim == 1 else values
    bad = (~torch.isfinite(values).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"The embeddings of {len(bad)} inputs are not finite; the first is input {bad[0]}. "
            "Check the checkpoint's weights and the dtype (float16 overflows where bfloat16 does not)."
        )


def empty_like(found: Any, width: int) -> Any:
    """The embeddings of no inputs, (0, D), in the container in which the host gives them without their width."""
    if isinstance(found, np.ndarray):
        return np.zeros((0, width), np.float32)
    return found.reshape(0, width) if isinstance(found, torch.Tensor) else found


def in_precision(found: Any, precision: Any, *, single: bool) -> Any:
    """Embeddings in another precision, in the container they came in.

    Args:
        found: (N, D) array or tensor or a list of N tensors; (D) for a single input.
        precision: As in the host's ``quantize_embeddings``.
        single: Whether they are of a single input.

    Returns:
        The same container.
    """
    values = quantize_embeddings(found[None] if single else found, precision=precision)
    values = values[0] if single else values
    if isinstance(found, torch.Tensor):
        return torch.as_tensor(values)
    return [torch.as_tensor(value) for value in values] if isinstance(found, list) else values
