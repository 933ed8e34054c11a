"""The record of a training run, which stays inside the student's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llm2vec_gen_st import manifests
from llm2vec_gen_st.modules.config import read_json_object
from llm2vec_gen_st.training.data import LABEL, NEGATIVES
from llm2vec_gen_st.training.processes import rank_and_size
from llm2vec_gen_st.training.recipes import Recipe

if TYPE_CHECKING:
    from datasets import Dataset

RUN_FOLDER = "training"
RECORD_FILE = "recipe.json"


@contextmanager
def claimed(run: Path, recipe: Recipe, teacher: str | None, rows: Dataset, start: str | Path | None) -> Iterator[None]:
    """A block that makes a run; records what the run is, and refuses a folder that holds another one.

    If the block fails before anything has come of it, such as by a name that is not known, so does the record go: the
    same folder takes the corrected call.

    Args:
        run: The run's folder.
        recipe: Its recipe, complete.
        teacher: What the teacher is called.
        rows: Its rows.
        start: The student that it goes on from.

    Raises:
        ValueError: If the folder holds another run; names what differs.
    """
    record = run / RECORD_FILE
    new = not record.exists()
    # A run that was recorded before a field existed is one with that field's default.
    unsaid = {"recipe": _defaults(), "processes": 1}
    manifests.claim(record, describe(recipe, teacher, rows, start), holds="a training run", unsaid=unsaid)
    try:
        yield
    except BaseException:
        if new and list(run.iterdir()) == [record]:
            record.unlink(missing_ok=True)
        raise


def describe(recipe: Recipe, teacher: str | None, rows: Dataset, start: str | Path | None) -> dict[str, Any]:
    """The record of a run, see :func:`read_record`; arguments as in :func:`claimed`."""
    columns = ["query", "response", *(column for column in NEGATIVES if column in rows.column_names)]
    texts = json.dumps([list(rows[column]) for column in columns]).encode("utf-8", "backslashreplace")
    if LABEL in rows.column_names:
        texts += np.asarray(rows[LABEL], dtype=np.float32).tobytes()
    fields = asdict(recipe)
    base = fields.pop("base")
    del fields["teacher"]
    return {
        "base": base,
        "start": None if start is None else Path(start).name,
        "teacher": teacher,
        "rows": len(rows),
        "data_sha256": hashlib.sha256(texts).hexdigest(),
        "processes": rank_and_size()[1],
        "recipe": json.loads(json.dumps(fields)),
    }


def read_record(student: str | Path) -> dict[str, Any] | None:
    """The record inside a student's folder.

    Args:
        student: Directory, or name of a student.

    Returns:
        ``base``, ``teacher``, ``start``, ``rows``, ``data_sha256``, ``processes`` (which trained together; older
        records lack it) and ``recipe``; ``None`` if there is no record.

    Raises:
        CheckpointError: If there is one that cannot be read.
    """
    path = Path(student) / RUN_FOLDER / RECORD_FILE
    return read_json_object(path) if path.is_file() else None


def changed_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of a record's recipe that are not the defaults.

    Args:
        record: As :func:`read_record` gives it.

    Example:
        >>> changed_fields({"recipe": {"batch_size": 8, "epochs": 1.0}})
        {'batch_size': 8}
    """
    defaults = _defaults()
    return {name: value for name, value in record["recipe"].items() if defaults.get(name) != value}


def _defaults() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(Recipe())))
    return {name: value for name, value in fields.items() if name not in ("base", "teacher")}
