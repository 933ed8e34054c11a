"""Files of passages, streamed: from the start, or from a place in the middle."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm2vec_gen_st.files import TEXT_COLUMNS, parquet_errors, pyarrow_parquet
from llm2vec_gen_st.text import without_lone_surrogates

_JSONL = (".jsonl", ".jsonl.gz")
_ENDINGS = (*_JSONL, ".parquet")
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Columns:
    """Which columns of a corpus are read.

    Args:
        id: Column of the ids.
        text: Column of the texts; the first of ``text``, ``query`` and ``passage`` if None.
        keep: Columns that are written beside the vectors; ``text`` stands for the text, whatever its column.
    """

    id: str = "id"
    text: str | None = None
    keep: tuple[str, ...] = ()

    def text_in(self, known: Iterable[str]) -> str | None:
        """The column of the text among known ones, None if there is none."""
        names = set(known)
        return next((name for name in ((self.text,) if self.text else TEXT_COLUMNS) if name in names), None)


@dataclass(frozen=True)
class Passage:
    """One row of a corpus.

    Args:
        id: Its identifier.
        text: What is embedded.
        metadata: The other columns that are kept.
    """

    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row as it stands in a file.

    Args:
        start: Where reading can begin to find it: its first byte, or its number in a Parquet file.
        place: Its line (from 1), or its row (from 0) in a Parquet file; counted from where reading began.
        values: Its columns.
    """

    start: int
    place: int
    values: dict[str, Any]


def corpus_files(corpus: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files of a corpus: ``.jsonl``, ``.jsonl.gz`` and ``.parquet``.

    Args:
        corpus: A file, a folder (its files in the order of their names), or several of them.

    Raises:
        FileNotFoundError: If a file is not there, or a folder holds none.
        ValueError: If a file is of another kind, or two have the same name.
    """
    given = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS) and file.name[0] != ".")
            if not inside:
                raise FileNotFoundError(f"{path}: the folder holds no {', '.join(_ENDINGS)} file.")
            found += inside
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file of passages.")
        elif not path.name.endswith(_ENDINGS):
            raise ValueError(f"{path}: unknown kind of corpus; use {', '.join(_ENDINGS)}, with a column of ids.")
        else:
            found.append(path)
    names = [path.name for path in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Two files of the corpus are called {sorted(repeated)[0]!r}; rename one of them.")
    return found


def read_file(path: Path, columns: Columns, start: int = 0) -> Iterator[Row]:
    """Stream the rows of one file.

    Args:
        path: The file.
        columns: What is read.
        start: :attr:`Row.start` of the first row wanted.

    Raises:
        ValueError: If the file is damaged, or a line is not a JSON object; names file and line.
    """
    return _read_parquet(path, columns, start) if path.suffix == ".parquet" else _read_jsonl(path, start)


def _read_jsonl(path: Path, start: int) -> Iterator[Row]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    with opener(path, "rb") as handle:
        try:
            handle.seek(start)
            for number, line in enumerate(handle, 1):
                begin, start = start, start + len(line)
                if line.strip():
                    yield Row(begin, number, _object(path, number, line))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, after line {number}: the file cannot be read on ({error}).") from error


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}).") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, found {type(values).__name__}.")
    return values


def _read_parquet(path: Path, columns: Columns, start: int) -> Iterator[Row]:
    with parquet_errors(path), pyarrow_parquet().ParquetFile(path, page_checksum_verification=True) as file:
        known = file.schema_arrow.names
        wanted = {columns.id, columns.text_in(known), *columns.keep} & set(known)
        group, first = 0, 0
        while group < file.num_row_groups and first + file.metadata.row_group(group).num_rows <= start:
            first += file.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, file.num_row_groups))
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=[n for n in known if n in wanted]):
            skipped = min(max(start - first, 0), batch.num_rows)
            for place, values in enumerate(batch.slice(skipped).to_pylist(), first + skipped):
                yield Row(place, place, values)
            first += batch.num_rows


def as_passage(path: Path, row: Row, columns: Columns) -> Passage:
    """Check one row.

    Raises:
        ValueError: If it has no id or no text, or lacks a column to keep; names file and row.
    """
    values = row.values
    where = f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {row.place}"
    name = columns.text_in(values)
    if name is None or not isinstance(values[name], str):
        asked = f"the column {columns.text!r}" if columns.text else f"any of the columns {', '.join(TEXT_COLUMNS)}"
        raise ValueError(f"{where}: there is no text in {asked}; name the column of the texts.")
    found = values.get(columns.id)
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise ValueError(
            f"{where}: there is no id in the column {columns.id!r} ({found!r}); every row needs a text or a whole "
            "number there. Name the column of the ids if it is another."
        )
    row_id = str(found)
    if "\0" in row_id or row_id != without_lone_surrogates(row_id):
        raise ValueError(f"{where}: the id {row_id!r} has a NUL or a lone surrogate, which cannot be stored.")
    others = [key for key in columns.keep if key != "text"]
    if missing := [key for key in others if key not in values]:
        raise ValueError(f"{where}: there is no column {missing[0]!r} to keep.")
    return Passage(row_id, without_lone_surrogates(values[name]), {key: values[key] for key in others})


class Passages:
    """Runs of neighbouring passages; one that begins where the last one ended is read on from there.

    Args:
        files: The corpus.
        columns: What is read.
    """

    def __init__(self, files: Sequence[Path], columns: Columns) -> None:
        self._files = files
        self._columns = columns
        self._rows: Iterator[Row] = iter(())
        self._next: Row | None = None
        self._file = -1

    def read(self, file: int, start: int, count: int) -> list[Passage]:
        """Passages of one file.

        Args:
            file: Number of the file.
            start: :attr:`Row.start` of the first one.
            count: How many; fewer are returned if the file ends before.
        """
        path = self._files[file]
        if self._file != file or self._next is None or self._next.start != start:
            self._file, self._rows = file, read_file(path, self._columns, start)
            self._next = next(self._rows, None)
        found: list[Passage] = []
        while self._next is not None and len(found) < count:
            found.append(as_passage(path, self._next, self._columns))
            self._next = next(self._rows, None)
        return found
