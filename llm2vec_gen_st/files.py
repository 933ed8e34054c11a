"""Reading rows and writing files so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llm2vec_gen_st.extras import require


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, flush it to disk, then move it there in one step.

    Args:
        path: Final place of the file.
        write: Called with the temporary path; must create that file.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_atomically(target, lambda path: path.write_text("done") and None)
        >>> target.read_text()
        'done'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        # Some writers create files that only their owner may read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, indented, in UTF-8."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON lines file, gzip-compressed if its name ends in ``.gz``.

    Raises:
        ValueError: If a line is not a JSON object; names file and line.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as handle:
        for number, line in _numbered(path, handle):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}.")
            yield row


def _numbered(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            yield number, line
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: the file cannot be read on ({error}).") from error


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a ``.jsonl``, ``.jsonl.gz``, ``.parquet`` or ``.txt`` file (one query a line).

    Args:
        path: The file.

    Returns:
        One dictionary a row; for text files the key is ``query``.

    Raises:
        ValueError: If the file's kind is not known or a row cannot be read.
    """
    path = Path(path)
    name = path.name
    if name.endswith((".jsonl", ".jsonl.gz")):
        return list(read_jsonl(path))
    if name.endswith(".parquet"):
        pyarrow, parquet = _parquet()
        try:
            rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: not a readable parquet file ({error}).") from error
        return rows
    if name.endswith(".txt"):
        with open(path, encoding="utf-8") as handle:
            lines = [line.rstrip("\n") for _, line in _numbered(path, handle)]
        return [{"query": line} for line in lines if line.strip()]
    raise ValueError(f"{path}: unknown kind of file; use .jsonl, .jsonl.gz, .parquet or .txt.")


def _parquet() -> tuple[Any, Any]:
    why = "a .parquet file"
    return require("pyarrow", extra="train", why=why), require("pyarrow.parquet", extra="train", why=why)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a ``.parquet`` or ``.jsonl`` file, atomically.

    Raises:
        ValueError: If the file's ending is another one.
    """
    rows = list(rows)
    if path.suffix == ".parquet":
        pyarrow, parquet = _parquet()
        table = pyarrow.Table.from_pylist(rows)
        write_atomically(path, lambda temporary: parquet.write_table(table, temporary))
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)
    else:
        raise ValueError(f"{path}: rows are written as .parquet or .jsonl.")
