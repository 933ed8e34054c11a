"""Reading one file as texts with metadata, a row at a time, so that a file of any length fits into memory."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import math
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_llm2vec_gen.ingest.files import TEXT_ENDINGS, ending
from llm2vec_gen_st.extras import require

TEXT_COLUMNS = ("text", "passage", "content", "document", "body")
OWN_KEYS = ("source", "row", "chunk", "start")
"""Metadata keys that indexing writes itself."""

_LEFT_OUT = "embedding"  # vectors that `llm2vec-gen encode` wrote beside the rows
_LONGEST_CSV_FIELD = 1 << 24
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """A text of a file.

    Args:
        text: The text.
        row: Number of its row, from 1; None where the file is one text.
        metadata: The row's other columns.
        position: Bytes of the file that are read by now.
    """

    text: str
    row: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    position: int = 0


def read_records(path: Path, column: str | None = None) -> Iterator[Record]:
    """Texts of a file: one of a ``.txt`` or ``.md`` file, one a row of the others.

    Args:
        path: The file.
        column: Column of the text in files of rows; the first of :data:`TEXT_COLUMNS` that a row has if None.

    Yields:
        The texts in the file's order. Columns named like the metadata that indexing writes (:data:`OWN_KEYS`) are kept
        as ``column_source`` and so on; a column ``embedding`` is left out. Dates, decimals and UUIDs become strings;
        numbers that are not finite become None.

    Raises:
        ValueError: If the file or a row of it cannot be read; names file and line.
    """
    kind = ending(path)
    if kind in TEXT_ENDINGS:
        yield _whole(path)
        return
    rows = {".csv": _csv_rows, ".parquet": _parquet_rows}.get(str(kind), _jsonl_rows)
    for number, (place, row, position) in enumerate(rows(path), 1):
        where = f"{path}, {place}"
        yield Record(*_text_and_metadata(row, column, where, number), position=position)


def _text_and_metadata(
    row: Mapping[str, Any], column: str | None, where: str, number: int
) -> tuple[str, int, dict[str, Any]]:
    name = column or next((known for known in TEXT_COLUMNS if known in row), None)
    if name is None:
        raise ValueError(
            f"{where}: none of the columns {', '.join(TEXT_COLUMNS)}; the row has {', '.join(map(repr, row))}. "
            "Name the text's column (--column)."
        )
    if name not in row:
        raise ValueError(f"{where}: there is no column {name!r}; the row has {', '.join(map(repr, row))}.")
    text = row[name]
    if not isinstance(text, str):
        raise ValueError(f"{where}: the column {name!r} holds {type(text).__name__}, not text.")
    metadata: dict[str, Any] = {}
    for key, value in row.items():
        if key not in (name, _LEFT_OUT):
            while key in OWN_KEYS or key in metadata:
                key = f"column_{key}"
            metadata[key] = _plain(value, f"{where}, column {key!r}")
    _check_storable(text, f"{where}, column {name!r}")
    return text, number, metadata


def _plain(value: Any, where: str) -> Any:
    """A value as JSON has it."""
    if isinstance(value, str):
        return _check_storable(value, where)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, Mapping):
        return {_check_storable(str(key), where): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    raise ValueError(f"{where}: a value of type {type(value).__name__} cannot be kept as metadata.")


def _check_storable(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: half a surrogate pair at character {error.start}; this is not valid text."
        ) from error
    return text


def _whole(path: Path) -> Record:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not valid UTF-8 ({error.reason}); save the file as UTF-8.") from error
    return Record(text.replace("\r\n", "\n").replace("\r", "\n"), None, position=len(raw))


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    with open(path, "rb") as raw:
        binary: gzip.GzipFile | io.BufferedReader = (
            gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
        )
        for number, line in _numbered(path, io.TextIOWrapper(binary, encoding="utf-8-sig")):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, {place}: not valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, {place}: expected a JSON object, found {type(row).__name__}.")
            yield place, row, raw.tell()


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    # The limit is the module's, for all readers, and by default shorter than a long article.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CSV_FIELD))
    with open(path, "rb") as raw:
        lines = (line for _, line in _numbered(path, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")))
        reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        try:
            for values in reader:
                place = f"line {reader.line_num}"
                if not values:
                    continue
                if header is None:
                    header = values
                    if len(set(header)) < len(header):
                        raise ValueError(f"{path}, {place}: a column's name comes twice in the header {header}.")
                    continue
                if len(values) != len(header):
                    raise ValueError(f"{path}, {place}: {len(values)} fields, but the header names {len(header)}.")
                yield place, dict(zip(header, values, strict=True)), raw.tell()
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not valid CSV ({error}).") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    why = "a .parquet file"
    pyarrow = require("pyarrow", extra="train", why=why)
    parquet = require("pyarrow.parquet", extra="train", why=why)
    size, number = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            total = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row, size * number // total
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}, after row {number}: not a readable parquet file ({error}).") from error


def _numbered(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            yield number, line
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: the file cannot be read on ({error}).") from error
