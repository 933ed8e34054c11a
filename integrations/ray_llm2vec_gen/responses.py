"""Writing responses on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.parts import PartFolder
from llm2vec_gen_st.responses.backends import BackendName, as_backend
from llm2vec_gen_st.responses.generation import GenerationSettings
from llm2vec_gen_st.responses.store import ResponseWriter, plan_responses
from ray_llm2vec_gen.actors import run_parts


class ResponseWorker:
    """One LLM, and the batches of queries that it answers.

    Args:
        folder: Folder of the parts.
        manifest: What is recorded beside them.
        settings: How responses are written.
        writer: Hub id or directory of the LLM.
        backend: What runs it.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        settings: GenerationSettings,
        writer: str,
        backend: BackendName,
    ) -> None:
        self._writer = ResponseWriter(folder, manifest, settings, as_backend(writer, backend))

    def finish(self, part: Any) -> int:
        """Answer one batch, unless its part is there."""
        number, batch = int(part["number"]), list(part["batch"])
        if not self._writer.parts.is_finished(number, len(batch)):
            self._writer.write(number, batch)
        return len(batch)


def write_responses(
    queries: str | Path | Iterable[str | Mapping[str, Any]],
    output_dir: str | Path,
    writer: str,
    *,
    backend: BackendName = "transformers",
    actors: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    batch_size: int = 64,
    part_format: Literal["parquet", "jsonl"] = "parquet",
    progress: bool = True,
    **settings: Any,
) -> Path:
    """Let an LLM respond on a Ray cluster: :func:`llm2vec_gen_st.responses.write_responses` with actors for shards.

    The folder must be on a file system that all machines see under the same path. An actor that dies is started again.
    The machine that calls this loads no LLM.

    Args:
        queries: See :func:`llm2vec_gen_st.responses.write_responses`, as all that is not told here.
        output_dir: Folder of the parts.
        writer: Hub id or directory of the LLM, the same on all machines.
        backend: What runs it.
        actors: Number of actors; each holds one LLM.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        batch_size: Queries of one part.
        part_format: File format of the parts.
        progress: Whether a progress bar is shown.
        **settings: Fields of :class:`~llm2vec_gen_st.responses.GenerationSettings`.

    Returns:
        The folder, complete: every part is there and has its rows.

    Raises:
        ValueError: If a row has no query, or ids repeat.
        RuntimeError: If an actor finds that the folder holds responses made differently, or cannot write a file.
        MissingExtraError: If Ray Data is not installed.
    """
    require("ray.data", extra="ray", why="writing responses on Ray")
    plan = plan_responses(queries, batch_size=batch_size, part_format=part_format, **settings)
    folder = Path(output_dir).resolve()
    options = {
        "folder": folder,
        "manifest": plan.manifest(),
        "settings": plan.settings,
        "writer": str(Path(writer).resolve()) if Path(writer).is_dir() else writer,
        "backend": backend,
    }
    run_parts(
        ResponseWorker,
        options,
        [{"item": {"number": number, "batch": plan.batches[number]}} for number in plan.order()],
        actors=actors,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        total=sum(map(len, plan.batches)),
        unit="query",
        progress=progress,
    )
    PartFolder(folder, "responses", part_format).finished([len(batch) for batch in plan.batches])
    return folder
