"""Reading rows and writing files so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm2vec_gen_st.extras import require

# Columns that may hold the text of a row, the first that is there.
TEXT_COLUMNS = ("text", "query", "passage")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def write_atomically(path: Path, write: Callable[[Path], object], *, replace: bool = True) -> None:
    """Write a file beside its place, flush it to disk, then move it there in one step.

    Args:
        path: Final place of the file.
        write: Called with the temporary path; must create that file.
        replace: Whether a file that is there already is replaced.

    Raises:
        FileExistsError: If a file is there already and is not to be replaced.
        OSError: If the disk is full, or what else the system says; the half file is gone then.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_atomically(target, lambda path: path.write_text("done") and None)
        >>> target.read_text()
        'done'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The number of a process alone is not enough where several machines share a folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        mode = _usual_mode(temporary)
        write(temporary)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        # Some writers create files that only their owner may read.
        os.chmod(temporary, mode)
        if replace:
            os.replace(temporary, path)
        else:
            _move_if_free(temporary, path)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"{path} could not be written: there is no room for it ({os.strerror(error.errno)}). What was there before "
            "is as it was; make room and run the same command again",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _move_if_free(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links: two processes that come here at the same instant both succeed.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def _usual_mode(path: Path) -> int:
    """Permissions of a new file at a free place; asking for the umask would change it for other threads."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode


def write_json(path: Path, value: Any, *, replace: bool = True) -> None:
    """Write a JSON file atomically, indented, in UTF-8.

    Args:
        path: The file.
        value: What JSON can hold.
        replace: As in :func:`write_atomically`.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None, replace=replace)


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
            except (ValueError, RecursionError) as error:
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
        with parquet_errors(path):
            rows: list[dict[str, Any]] = pyarrow_parquet().read_table(path, page_checksum_verification=True).to_pylist()
        return rows
    if name.endswith(".txt"):
        with open(path, encoding="utf-8") as handle:
            lines = [line.rstrip("\n") for _, line in _numbered(path, handle)]
        return [{"query": line} for line in lines if line.strip()]
    raise ValueError(f"{path}: unknown kind of file; use .jsonl, .jsonl.gz, .parquet or .txt.")


def with_all_columns(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that all have the columns of any of them, null where a row lacks one: tables take the first row's alone.

    Example:
        >>> with_all_columns([{"a": 1}, {"b": 2}])
        [{'a': 1, 'b': None}, {'a': None, 'b': 2}]
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def count_rows(path: Path) -> int:
    """Number of rows of a ``.parquet`` file by its footer, or of another file that :func:`read_rows` reads.

    Raises:
        ValueError: If the file is damaged.
    """
    if path.suffix != ".parquet":
        return len(read_rows(path))
    with parquet_errors(path):
        return int(pyarrow_parquet().read_metadata(path).num_rows)


def pyarrow_parquet() -> Any:
    """The module ``pyarrow.parquet``.

    Raises:
        MissingExtraError: If pyarrow is not installed.
    """
    return require("pyarrow.parquet", extra="train", why="a .parquet file")


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """What pyarrow says of a damaged file, as a ``ValueError`` that names it."""
    pyarrow = require("pyarrow", extra="train", why="a .parquet file")
    try:
        yield
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error
    except OSError as error:
        # A wrong checksum of a page has no number; what the system says has one.
        if error.errno is not None:
            raise
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error


def write_table(path: Path, table: Any) -> None:
    """Write a ``pyarrow.Table`` to a ``.parquet`` file atomically, with a checksum of each page."""
    parquet = pyarrow_parquet()
    write_atomically(path, lambda temporary: parquet.write_table(table, temporary, write_page_checksum=True))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a ``.parquet`` or ``.jsonl`` file, atomically.

    Raises:
        ValueError: If the file's ending is another one.
    """
    rows = list(rows)
    if path.suffix == ".parquet":
        pyarrow = require("pyarrow", extra="train", why="a .parquet file")
        write_table(path, pyarrow.Table.from_pylist(with_all_columns(rows)))
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)
    else:
        raise ValueError(f"{path}: rows are written as .parquet or .jsonl.")
