"""The truth of a store: documents, metadata and vectors in one SQLite file, changed in transactions."""

from __future__ import annotations

import json
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.filters import Condition, text_matches

FORMAT_VERSION = 1
_APPLICATION_ID = 0x4C325653
_WAIT_SECONDS = 60.0
_BLOCK = 8192
_MOST_NAMES = 500

_SCHEMA = """
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, text NOT NULL, metadata TEXT NOT NULL
);
CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE tombstones (row INTEGER PRIMARY KEY, generation INTEGER NOT NULL);
CREATE INDEX tombstones_by_generation ON tombstones (generation);
"""


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


class Database:
    """One SQLite file in write-ahead mode: readers see snapshots, and one writer at a time changes it.

    Args:
        path: The file.
        read_only: Whether it is opened for reading; it must be there then.

    Raises:
        StoreError: If the file is not a store, is damaged, or is of a newer version.
        FileNotFoundError: If it is to be read and is not there.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self._readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._immutable = False
        self._closed = threading.Event()
        if read_only and not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such store.")
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._writer, version = self._open()
            self._check(version)

    def _connect(self) -> sqlite3.Connection:
        mode = "ro" if self.read_only else "rwc"
        uri = f"{self.path.resolve().as_uri()}?mode={mode}" + ("&immutable=1" if self._immutable else "")
        connection = sqlite3.connect(
            uri, uri=True, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        connection.create_function("text_matches", 4, text_matches, deterministic=True)
        connection.execute(f"PRAGMA cache_size = {-16 * 1024}")
        connection.execute("PRAGMA mmap_size = 1073741824")
        return connection

    def _open(self) -> tuple[sqlite3.Connection, int | None]:
        """The first connection, and the version that it finds."""
        try:
            connection = self._connect()
            return connection, self._version(connection)
        except sqlite3.OperationalError:
            # A folder that cannot be written to has no room for the files that readers share.
            if not self.read_only or os.access(self.path.parent, os.W_OK):
                raise
        if self._log_bytes():
            raise StoreError(
                f"{self.path}: its last changes are in the file {self._log.name}, which can only be read where the "
                "folder can be written to. Close the store where it was written, and copy it again."
            )
        self._immutable = True
        connection = self._connect()
        return connection, self._version(connection)

    @property
    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except FileNotFoundError:
            return 0

    def _check(self, version: int | None) -> None:
        if version is None:
            if self.read_only:
                raise StoreError(f"{self.path}: the file is empty, not a store.")
            self._create()
        elif version > FORMAT_VERSION:
            raise StoreError(f"{self.path}: written by a newer version (format {version}); update llm2vec-gen-st.")
        self._check_length()

    def _version(self, connection: sqlite3.Connection) -> int | None:
        """Format of the store, or None of an empty file."""
        # In this order: another process may be making the store in between, in one transaction.
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application == 0 and tables == 0:
            return None
        if application != _APPLICATION_ID:
            raise StoreError(f"{self.path}: a database, but not a store of this package; choose another path.")
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    def _create(self) -> None:
        # Both can only be set while the file is empty, and outside a transaction. SQLite waits for others everywhere
        # but here, where it changes the mode of a file that they are making too.
        self._writer.execute("PRAGMA page_size = 8192")
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                self._writer.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._writer.execute("BEGIN IMMEDIATE")
        # Another process may have been first.
        if self._version(self._writer) is None:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._writer.execute(statement)
            self._writer.execute("INSERT INTO settings VALUES ('store', ?)", (uuid.uuid4().hex,))
            self._writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._writer.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        self._writer.execute("COMMIT")

    def _check_length(self) -> None:
        """Refuse a file that was cut: SQLite would notice only when it comes to the missing pages."""
        if self._log_bytes():
            return
        pages, size = (self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        found = self.path.stat().st_size
        if found < pages * size:
            raise StoreError(
                f"{self.path}: damaged; it has {found} bytes where {pages * size} were written. Restore it from a copy."
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise StoreError(
                    f"{self.path}: another process has been writing for {_WAIT_SECONDS:.0f} seconds; try again later."
                ) from error
            raise StoreError(f"{self.path}: cannot be used ({error}).") from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.ProgrammingError | sqlite3.IntegrityError):
                raise
            raise StoreError(f"{self.path}: not a store, or damaged ({error}). Restore it from a copy.") from error

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """A snapshot for one reader.

        Raises:
            StoreError: If the store is closed or its file damaged.
        """
        if self._closed.is_set():
            raise StoreError(f"{self.path}: the store is closed.")
        with self._explained():
            try:
                connection = self._readers.get_nowait()
            except queue.Empty:
                connection = self._connect()
            try:
                connection.execute("BEGIN")
                yield Snapshot(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if self._closed.is_set():
                    connection.close()
                else:
                    self._readers.put(connection)

    @contextmanager
    def changing(self) -> Iterator[Transaction]:
        """A transaction for one writer: all of its changes are made, or none; waits for other writers.

        Raises:
            StoreError: If the store is closed, read-only or damaged, or another process writes for too long.
        """
        if self._closed.is_set():
            raise StoreError(f"{self.path}: the store is closed.")
        if self.read_only:
            raise StoreError(f"{self.path}: the store was opened read-only.")
        with self._writing, self._explained():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(self._writer)
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.is_set()

    def shrink(self) -> None:
        """Give the room of deleted documents back to the file system."""
        with self._writing, self._explained():
            self._writer.execute("VACUUM")

    def close(self) -> None:
        """Close all connections; the last one to close folds the write-ahead log into the file."""
        if self._closed.is_set():
            return
        self._closed.set()
        while True:
            try:
                self._readers.get_nowait().close()
            except queue.Empty:
                break
        with self._writing:
            self._writer.close()


class Settings(MutableMapping[str, str]):
    """Texts that the user of a store keeps in it, by name."""

    _PREFIX = "user."

    def __init__(self, database: Database) -> None:
        self._database = database

    def __getitem__(self, key: str) -> str:
        with self._database.reading() as snapshot:
            value = snapshot.setting(self._PREFIX + key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        with self._database.changing() as transaction:
            transaction.set(self._PREFIX + key, value)

    def __delitem__(self, key: str) -> None:
        self[key]
        with self._database.changing() as transaction:
            transaction.set(self._PREFIX + key, None)

    def __iter__(self) -> Iterator[str]:
        with self._database.reading() as snapshot:
            known = snapshot.settings()
        return (key.removeprefix(self._PREFIX) for key in known if key.startswith(self._PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
