"""Result files: one a model and task, with everything the scores depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llm2vec_gen_st.files import write_json

RESULTS = "results"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Result:
    """One model's result on one task.

    Args:
        key: Digest of everything that the scores depend on; another key means that the task has to be run again.
        name: What the model is called.
        task: Name, type, metric, data (path and revision), splits and subsets.
        instructions: Side (``query``, ``document``, ``text``) to the instruction put before its texts.
        model: Base model, digest of the adapter, modules, dtype, length limit and more.
        versions: Library to version.
        batch_size: Texts run at once.
        device: Where.
        score: The task's main score, mean over splits and subsets, between 0 and 1.
        scores: All of mteb's scores, by split.
        texts: Texts embedded.
        seconds: Time taken.
    """

    key: str
    name: str
    task: Mapping[str, Any]
    instructions: Mapping[str, str]
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    batch_size: int
    device: str
    score: float
    scores: Mapping[str, Any]
    texts: int
    seconds: float

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return str(self.task["name"])


def result_path(output: Path, model: str, task: str) -> Path:
    """The file of a model's result on a task.

    Example:
        >>> result_path(Path("out"), "org/model", "STS12").as_posix()
        'out/results/org%2Fmodel/STS12.json'
    """
    return output / RESULTS / _file_name(model) / f"{_file_name(task)}.json"


def write_result(output: Path, result: Result) -> Path:
    """Write a result to its file, atomically."""
    path = result_path(output, result.name, result.task_name)
    write_json(path, {"format_version": FORMAT_VERSION, **asdict(result)})
    return path


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: If it is not one; names it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"its format has the version {found['format_version']}, this package reads {FORMAT_VERSION}"
            )
        return Result(**{field.name: found[field.name] for field in fields(Result)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a result file of this package ({type(error).__name__}: {error}). Move it away to run the "
            "task again."
        ) from error


def read_results(output: str | Path) -> list[Result]:
    """All results in an output folder, by model and task.

    Args:
        output: The folder given to ``evaluate``.

    Returns:
        The results.

    Raises:
        ValueError: If a file there is not a result.
    """
    return [read_result(path) for path in sorted((Path(output) / RESULTS).glob("*/*.json"))]


def _file_name(name: str) -> str:
    """A name as a file's, another one for every name; none leads out of the folder."""
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted
