"""The truth of a store: documents, metadata and vectors in one SQLite file, changed in transactions."""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.filters import text_matches
from langchain_llm2vec_gen.store.transactions import Snapshot, Transaction

FORMAT_VERSION = 1
_APPLICATION_ID = 0x4C325653
_WAIT_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, text NOT NULL, metadata TEXT NOT NULL
);
CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE tombstones (row INTEGER PRIMARY KEY, generation INTEGER NOT NULL);
CREATE INDEX tombstones_by_generation ON tombstones (generation);
"""


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
        written = self._written_bytes()
        # Asked in this order: what others have written up to here is in the file if their log is empty.
        if self._log_bytes():
            return
        found = self.path.stat().st_size
        # Unless another process has made the file smaller meanwhile, or written to it again.
        if found < written == self._written_bytes() and not self._log_bytes():
            raise StoreError(
                f"{self.path}: damaged; it has {found} bytes where {written} were written. Restore it from a copy."
            )

    def _written_bytes(self) -> int:
        """Bytes of the file once all that is written is in it."""
        pages, size = (self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return int(pages * size)

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
