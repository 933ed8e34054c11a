"""The processes of one run, as ``torchrun`` or ``accelerate launch`` started them, and what they do together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers.util import get_device_name
from torch import distributed

from llm2vec_gen_st.extras import require

# Shares of one job end at about the same time, but a teacher may still be loading, or being downloaded, on one node.
_PATIENCE = timedelta(hours=2)
_SHARDING = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}


def on_cpu() -> bool:
    """Whether this machine trains on its CPU; the host has to be told, or its processes train apart."""
    return bool(get_device_name() == "cpu")


def join_processes() -> None:
    """Meet the other processes of this run; alone, this does nothing.

    Raises:
        ValueError: If accelerate is told to use an engine that shards the model.
        RuntimeError: If a process group cannot be had any more, because something else came first.
    """
    for engine, variable in _SHARDING.items():
        if os.environ.get(variable, "").lower() == "true":
            # The reconstruction runs the LLM and a head outside the wrapped model's forward pass, where their weights
            # would be sharded or freed; and how often a process runs the LLM depends on its rows.
            raise ValueError(
                f"Students cannot be trained with {engine}. Use plain data parallelism (torchrun, or distributed_type "
                "MULTI_GPU in accelerate's config): the LLM is frozen, so each device holds its weights once, and no "
                "gradients or optimizer states of it."
            )
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted == 1:
        return
    state = require("accelerate", extra="train", why="training").PartialState(cpu=on_cpu(), timeout=_PATIENCE)
    if state.num_processes != wanted:
        raise RuntimeError(
            f"This is one of {wanted} processes, but accelerate was set up for {state.num_processes} of them before "
            "train() was called; call train() first."
        )


def rank_and_size() -> tuple[int, int]:
    """Number of this process, and how many there are.

    Example:
        >>> rank_and_size()
        (0, 1)
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_main() -> bool:
    """Whether this is the process that writes files and messages."""
    return rank_and_size()[0] == 0


def wait_for_all() -> None:
    """Go on when every process is here."""
    if rank_and_size()[1] > 1:
        _accelerate().utils.wait_for_everyone()


def spread(texts: Sequence[str], embed: Callable[[list[str]], np.ndarray]) -> np.ndarray:
    """Let each process embed its share of some texts; all of them get all vectors, the same to the last bit.

    Args:
        texts: N texts, the same in every process.
        embed: Maps texts to vectors (k, D).

    Returns:
        (N, D) float32, in the order of the texts.

    Example:
        >>> spread(["a", "bb"], lambda share: np.array([[len(text)] for text in share], np.float32)).tolist()
        [[1.0], [2.0]]
    """
    rank, size = rank_and_size()
    if size == 1 or not texts:
        return embed(list(texts))
    # Every process gets long and short texts, so that all end at the same time.
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    # One with nothing to do embeds a text too: collectives need its width.
    own = embed([texts[row] for row in order[rank::size] or order[:1]])
    most = -(-len(texts) // size)
    padded = torch.zeros(most, own.shape[1])
    padded[: len(own)] = torch.from_numpy(own.astype(np.float32))
    everything: torch.Tensor = _accelerate().utils.gather(padded.to(_accelerate().PartialState().device)).cpu()
    found = np.zeros((len(texts), own.shape[1]), np.float32)
    for number in range(size):
        rows = order[number::size]
        found[rows] = everything[number * most : number * most + len(rows)].numpy()
    return found


@torch.no_grad()
def share_parameters(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give every process the main process's values of some parameters."""
    if rank_and_size()[1] > 1:
        for parameter in parameters:
            parameter.data.copy_(_accelerate().utils.broadcast(parameter.data.clone()))


def agreed_folder(folder: Path | None) -> Path | None:
    """The main process's choice of a folder, which every process must be able to read.

    Raises:
        FileNotFoundError: If it is not there for this process.
    """
    rank, size = rank_and_size()
    if size == 1:
        return folder
    (chosen,) = _accelerate().utils.broadcast_object_list([None if folder is None else str(folder)])
    if chosen is None:
        return None
    if not Path(chosen).is_dir():
        raise FileNotFoundError(
            f"{chosen}, from which process 0 goes on, is not there for process {rank}: the output folder must be on a "
            "file system that all processes share."
        )
    return Path(chosen)


def _accelerate() -> Any:
    accelerate = require("accelerate", extra="train", why="training")
    require("accelerate.utils", extra="train", why="training")
    return accelerate
