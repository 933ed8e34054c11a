"""Encoding a corpus on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llm2vec_gen_st.corpus import finished_parts
from llm2vec_gen_st.corpus.encoder import CorpusEncoder
from llm2vec_gen_st.corpus.plan import CorpusPlan, plan_corpus
from llm2vec_gen_st.extras import require
from ray_llm2vec_gen.actors import run_parts


class CorpusWorker:
    """One student, and the parts of a corpus that it encodes.

    Args:
        plan: The corpus.
        folder: Folder of the parts.
        model: Name or directory of the student.
        model_kwargs: How its base model is loaded.
        prompt_name: Name of the instruction.
        batch_size: Passages run at once.
    """

    def __init__(
        self,
        plan: CorpusPlan,
        folder: Path,
        model: str,
        model_kwargs: dict[str, Any] | None,
        prompt_name: str | None,
        batch_size: int,
    ) -> None:
        from llm2vec_gen_st.model import LLM2VecGen

        self._plan = plan
        self._encoder = CorpusEncoder(
            plan,
            folder,
            LLM2VecGen(model, model_kwargs=model_kwargs),
            prompt_name=prompt_name,
            batch_size=batch_size,
        )

    def finish(self, part: Any) -> int:
        """Encode one part, unless it is there."""
        self._encoder.finish(int(part))
        return self._plan.slices[int(part)].rows


def encode_corpus(
    model: str,
    corpus: str | Path | Iterable[str | Path],
    output_dir: str | Path,
    *,
    actors: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    model_kwargs: Mapping[str, Any] | None = None,
    prompt_name: str | None = "document",
    rows_per_part: int = 8192,
    batch_size: int = 32,
    id_column: str = "id",
    text_column: str | None = None,
    keep: Iterable[str] = (),
    progress: bool = True,
) -> Path:
    """Encode a corpus on a Ray cluster: :func:`llm2vec_gen_st.corpus.encode_corpus` with actors instead of shards.

    Corpus and folder must be on a file system that all machines see under the same path. Each actor reads the passages
    of one part at a time, encodes them, and writes the part in one step; an actor that dies is started again. The
    machine that calls this loads no model.

    Args:
        model: Name, directory or hub id of the student, the same on all machines.
        corpus: See :func:`llm2vec_gen_st.corpus.encode_corpus`, as all that is not told here.
        output_dir: Folder of the parts.
        actors: Number of actors; each holds one model.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        model_kwargs: How the base model is loaded (``dtype``, ...).
        prompt_name: Name of the instruction.
        rows_per_part: Passages of one part.
        batch_size: Passages run at once.
        id_column: Column of the ids.
        text_column: Column of the texts.
        keep: Columns to write beside the vectors.
        progress: Whether progress bars are shown.

    Returns:
        The folder, complete: every part is there and has its rows.

    Raises:
        ValueError: If a row has no id or text, an id comes twice, or the folder was begun with another corpus or other
            settings.
        RuntimeError: If an actor finds that the folder was begun with another model, or cannot read or write a file.
        MissingExtraError: If Ray Data is not installed.
    """
    require("ray.data", extra="ray", why="encoding on Ray")
    folder = Path(output_dir).resolve()
    files = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    plan = plan_corpus(
        [Path(path).resolve() for path in files],
        folder,
        rows_per_part=rows_per_part,
        id_column=id_column,
        text_column=text_column,
        keep=keep,
        progress=progress,
    )
    options = {
        "plan": plan,
        "folder": folder,
        "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
        "model_kwargs": dict(model_kwargs or {}),
        "prompt_name": prompt_name,
        "batch_size": batch_size,
    }
    run_parts(
        CorpusWorker,
        options,
        range(len(plan.slices)),
        actors=actors,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        total=plan.rows,
        unit="passage",
        progress=progress,
    )
    finished_parts(folder)
    return folder
