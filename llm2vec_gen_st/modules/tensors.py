"""Safetensors files that hold exactly the tensors they should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llm2vec_gen_st.files import write_atomically


class CheckpointError(ValueError):
    """A checkpoint's files do not hold what they should; the message names file and tensor."""


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, atomically.

    Args:
        path: The file.
        tensors: Name to tensor; each is copied to the CPU.
    """
    ready = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(ready, temporary))


def load_tensors(path: str | Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read a safetensors file and check it against what is expected.

    Args:
        path: The file.
        expected: Name to shape of every tensor that must be there, and no other.

    Returns:
        Name to tensor.

    Raises:
        CheckpointError: If the file is broken, or a tensor is missing, unknown or misshapen; names it.
    """
    try:
        found = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} could not be read as a safetensors file: {error}") from error
    problems = [f"tensor {name!r} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"tensor {name!r} is not known" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"tensor {name!r} has shape {tuple(found[name].shape)}, expected {tuple(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name].shape) != tuple(expected[name])
    ]
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems) + ".")
    return found
