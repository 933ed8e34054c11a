"""What is read and written in one transaction of a store: documents, metadata and vectors, as SQLite keeps them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.filters import Condition

_BLOCK = 8192
_MOST_NAMES = 500


@dataclass(frozen=True)
class StoredDocument:
    """One document as it is kept.

    Args:
        row: Its row number; numbers grow and are never used again.
        id: Its identifier.
        text: Its text.
        metadata: Its metadata.
    """

    row: int
    id: str
    text: str
    metadata: dict[str, Any]


class Snapshot:
    """What one reader sees: the store as it was when the reader came, whatever is written meanwhile."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def setting(self, key: str) -> str | None:
        """A setting's value, or None."""
        found = self._connection.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def settings(self) -> dict[str, str]:
        """All settings."""
        return dict(self._connection.execute("SELECT key, value FROM settings"))

    @property
    def generation(self) -> int:
        """Number of changes so far."""
        return int(self.setting("generation") or 0)

    @property
    def dimension(self) -> int:
        """Dimension of the vectors; 0 until the first are there."""
        return int(self.setting("dimension") or 0)

    def count(self) -> int:
        """Number of documents."""
        return int(self._connection.execute("SELECT count(*) FROM documents").fetchone()[0])

    def last_row(self) -> int:
        """The highest row number ever given."""
        found = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'documents'").fetchone()
        return 0 if found is None else int(found[0])

    def rows(self, condition: Condition | None = None, *, up_to: int | None = None) -> np.ndarray:
        """Row numbers in ascending order: all, those that a condition admits, or those up to one."""
        where, values = ("1", ()) if condition is None else (condition.sql, condition.values)
        if up_to is not None:
            where, values = f"({where}) AND row <= ?", (*values, up_to)
        found = self._connection.execute(f"SELECT row FROM documents WHERE {where} ORDER BY row", values)
        return np.fromiter((row for (row,) in found), dtype=np.int64)

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Row number of each known id."""
        found: dict[str, int] = {}
        for names in _portions(ids):
            marks = ",".join("?" * len(names))
            found.update(self._connection.execute(f"SELECT id, row FROM documents WHERE id IN ({marks})", names))
        return found

    def documents(self, rows: Sequence[int]) -> dict[int, StoredDocument]:
        """The documents of some rows, by row."""
        found: dict[int, StoredDocument] = {}
        for numbers in _portions(rows):
            marks = ",".join("?" * len(numbers))
            for row in self._connection.execute(
                f"SELECT row, id, text, metadata FROM documents WHERE row IN ({marks})", numbers
            ):
                found[row[0]] = _document(*row)
        return found

    def all_documents(self, condition: Condition | None = None) -> Iterator[StoredDocument]:
        """Documents in the order in which they were added."""
        where, values = ("1", ()) if condition is None else (condition.sql, condition.values)
        for row in self._connection.execute(
            f"SELECT row, id, text, metadata FROM documents WHERE {where} ORDER BY row", values
        ):
            yield _document(*row)

    def vectors(self, rows: np.ndarray, dimension: int) -> np.ndarray:
        """Vectors (N, D) float32 of some rows, in ascending order of rows; all of them must be there."""
        blobs: list[bytes] = []
        for start in range(0, len(rows), _BLOCK):
            numbers = json.dumps(rows[start : start + _BLOCK].tolist())
            found = self._connection.execute(
                "SELECT vector FROM vectors WHERE row IN (SELECT value FROM json_each(?)) ORDER BY row", (numbers,)
            )
            blobs.extend(blob for (blob,) in found)
        if len(blobs) != len(rows):
            raise StoreError(f"The vectors of {len(rows) - len(blobs)} of {len(rows)} documents are missing.")
        return _matrix(blobs, dimension)

    def vectors_after(self, row: int, dimension: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of row numbers (n) and vectors (n, D) behind a row, in ascending order."""
        found = self._connection.execute("SELECT row, vector FROM vectors WHERE row > ? ORDER BY row", (row,))
        while block := found.fetchmany(_BLOCK):
            numbers = np.fromiter((number for number, _ in block), dtype=np.int64, count=len(block))
            yield numbers, _matrix([blob for _, blob in block], dimension)

    def documents_with_vectors(self) -> Iterator[tuple[list[StoredDocument], np.ndarray]]:
        """Blocks of all documents (n) and their vectors (n, D), in the order in which they were added."""
        for rows, vectors in self.vectors_after(0, self.dimension):
            found = self.documents(rows.tolist())
            yield [found[row] for row in rows.tolist()], vectors

    def deleted_since(self, generation: int) -> np.ndarray:
        """Row numbers that were deleted after a generation."""
        found = self._connection.execute("SELECT row FROM tombstones WHERE generation > ?", (generation,))
        return np.fromiter((row for (row,) in found), dtype=np.int64)


class Transaction(Snapshot):
    """A change in progress: seen by nobody until it is complete, and then by all."""

    def set(self, key: str, value: str | None) -> None:
        """Write or remove a setting."""
        if value is None:
            self._connection.execute("DELETE FROM settings WHERE key = ?", (key,))
        else:
            self._connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (key, value))

    def next_generation(self) -> int:
        """Count one more change."""
        generation = self.generation + 1
        self.set("generation", str(generation))
        return generation

    def add(
        self, ids: Sequence[str], texts: Sequence[str], metadatas: Iterable[str], vectors: np.ndarray
    ) -> np.ndarray:
        """Write new documents; none of the ids may be there.

        Args:
            ids: N identifiers.
            texts: N texts.
            metadatas: N JSON objects.
            vectors: (N, D) float32, C order.

        Returns:
            Their row numbers (N).
        """
        first = self.last_row() + 1
        rows = range(first, first + len(ids))
        self._connection.executemany(
            "INSERT INTO documents VALUES (?, ?, ?, ?)", zip(rows, ids, map(_storable, texts), metadatas, strict=True)
        )
        self._connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(rows, vectors, strict=True))
        return np.arange(first, first + len(ids), dtype=np.int64)

    def remove(self, rows: Iterable[int], generation: int) -> None:
        """Delete documents by row, and remember that they are gone."""
        numbers = [(int(row),) for row in rows]
        self._connection.executemany("DELETE FROM documents WHERE row = ?", numbers)
        self._connection.executemany("DELETE FROM vectors WHERE row = ?", numbers)
        self._connection.executemany("INSERT INTO tombstones VALUES (?, ?)", ((row, generation) for (row,) in numbers))

    def forget_deleted(self) -> None:
        """Drop the memory of deleted rows; an index older than this must be built anew."""
        self._connection.execute("DELETE FROM tombstones")
        self.set("forgotten_generation", str(self.generation))


def _document(row: int, id: str, text: str | bytes, metadata: str) -> StoredDocument:
    text = text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
    return StoredDocument(row, id, text, json.loads(metadata))


def _storable(text: str) -> str | bytes:
    """The text, as bytes if it has lone surrogates, which SQLite's texts cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _matrix(blobs: list[bytes], dimension: int) -> np.ndarray:
    joined = b"".join(blobs)
    if len(joined) != 4 * dimension * len(blobs):
        raise StoreError(f"A stored vector has not the store's dimension {dimension}: the store is damaged.")
    return np.frombuffer(joined, dtype="<f4").reshape(len(blobs), dimension)


def _portions(items: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), _MOST_NAMES):
        yield list(items[start : start + _MOST_NAMES])
