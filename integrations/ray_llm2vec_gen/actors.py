"""Parts dealt to a pool of Ray actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from tqdm.auto import tqdm

from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.extras import MissingExtraError, require

# Several blocks of parts for each actor, so that none is idle for long while another has the last one.
_BLOCKS_PER_ACTOR = 16


class PartWorker(Protocol):
    """What an actor holds: it finishes parts, and may be called again for a part that is there."""

    def finish(self, part: Any) -> int:
        """Finish one part; returns its number of rows."""
        ...


class _Actor:
    """One worker, made at the first part: an actor that fails while it is made would be started again and again."""

    def __init__(self, make: type[PartWorker], options: Mapping[str, Any]) -> None:
        self._make = make
        self._options = options
        self._worker: PartWorker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows, wrong = 0, ""
        try:
            if self._worker is None:
                self._worker = self._make(**self._options)
            rows = sum(self._worker.finish(part) for part in batch["item"])
        except (ValueError, OSError, FloatingPointError, BaseModelError, MissingExtraError) as error:
            # Sent as it is: on its way through Ray an error would be buried under those of Ray.
            wrong = f"{type(error).__name__}: {error}"
        return {"rows": np.array([rows]), "wrong": np.array([wrong])}


def run_parts(
    worker: type[PartWorker],
    options: Mapping[str, Any],
    parts: Sequence[Any],
    *,
    actors: int,
    num_cpus: float,
    num_gpus: float,
    total: int,
    unit: str,
    progress: bool,
) -> None:
    """Let actors finish parts; one that dies is started again, and its parts are given out again.

    Args:
        worker: Made once in each actor.
        options: What it is made with.
        parts: What it is given, one at a time.
        actors: Number of actors.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        total: Number of rows in all parts.
        unit: What a row is, for the progress bar.
        progress: Whether a progress bar is shown.

    Raises:
        MissingExtraError: If Ray Data is not installed.
        RuntimeError: If a worker says that something is wrong with its input, its files or its model.
    """
    data = require("ray.data", extra="ray", why="running on Ray")
    finished = data.from_items(
        list(parts), override_num_blocks=min(len(parts), _BLOCKS_PER_ACTOR * actors)
    ).map_batches(
        _Actor,
        fn_constructor_kwargs={"make": worker, "options": dict(options)},
        compute=data.ActorPoolStrategy(size=actors),
        batch_size=1,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    finished.context.enable_progress_bars = False
    with tqdm(total=total, desc="on Ray", unit=unit, disable=not progress) as bar:
        for row in finished.iter_rows():
            if row["wrong"]:
                raise RuntimeError(f"An actor could not go on. {row['wrong']}")
            bar.update(int(row["rows"]))
