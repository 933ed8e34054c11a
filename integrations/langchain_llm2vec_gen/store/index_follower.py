"""Keeps a FAISS index in step with a store's SQLite file, whoever writes to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from langchain_llm2vec_gen.store.agreement import Agreement
from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.index_file import drop_other_files, is_replaced, read_index, write_index
from langchain_llm2vec_gen.store.locks import ReadWriteLock
from langchain_llm2vec_gen.store.transactions import Snapshot
from langchain_llm2vec_gen.store.vector_index import VectorIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """A change that this process made itself, so that its index need not read it back.

    Args:
        generation: Number of the change.
        rows: Rows added (N), ascending.
        vectors: Their vectors (N, D) float32.
        removed: Rows deleted.
    """

    generation: int
    rows: np.ndarray
    vectors: np.ndarray
    removed: list[int]


class IndexFollower:
    """The index of a store, opened from its file when first needed and brought up to date when it is behind.

    Threads may share it: any number of them look at it at once, and it is changed while none does.

    Args:
        database: The store's SQLite file, which is the truth.
        agreement: Its metric and kind of index.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, database: Database, agreement: Agreement, *, device: str = "cpu") -> None:
        self._database = database
        self._agreement = agreement
        self._device = device
        self._lock = ReadWriteLock()
        self._index: VectorIndex | None = None
        self._generation = -1
        # Vectors that the index's file does not have, and that this process has added or had to read from the store.
        self.unsaved = 0

    @property
    def path(self) -> Path:
        """The store's file."""
        return self._database.path

    @contextmanager
    def view(self) -> Iterator[tuple[Snapshot, VectorIndex | None]]:
        """The file and the index in the same state, which stays as it is until the end; no index in an empty store."""
        while True:
            with self._lock.reading(), self._database.reading() as snapshot:
                if snapshot.generation == self._generation:
                    yield snapshot, self._index
                    return
            # Something was written since: first bring the index up to it.
            self.follow()

    def follow(self, change: Change | None = None) -> None:
        """Bring the index to the state of the file.

        Args:
            change: What this process has just written, if it has.
        """
        with self._lock.writing():
            while not self._followed(change):
                logger.debug("%s: another process has replaced the index meanwhile; trying again.", self.path)

    def _followed(self, change: Change | None) -> bool:
        """Bring the index to one snapshot of the file; False if its index file is gone because there is a newer one."""
        with self._database.reading() as snapshot:
            generation = snapshot.generation
            if generation == self._generation:
                return True
            with self._database.reading() as now:
                if self._index is None and is_replaced(self.path, snapshot, now):
                    return False
            try:
                if snapshot.dimension:
                    self._take_over(snapshot, snapshot.dimension, change)
            except BaseException:
                # Half a change must not be searched: the next search begins anew.
                self._index, self._generation = None, -1
                raise
            self._generation = generation
            return True

    def _take_over(self, snapshot: Snapshot, dimension: int, change: Change | None) -> None:
        """Take over what was written since the index was last brought up to date."""
        forgotten = int(snapshot.setting("forgotten_generation") or 0)
        if self._index is None or self._generation < forgotten:
            self._index = self._opened(snapshot, dimension)
        elif change is not None and change.generation == snapshot.generation == self._generation + 1:
            self._index.remove(change.removed)
            self._index.add(change.rows, change.vectors)
        else:
            for rows, vectors in snapshot.vectors_after(self._index.last_row, dimension):
                self._index.add(rows, vectors)
            self._index.remove(snapshot.deleted_since(self._generation))
        before = self._index.trained_on
        self._index.maintain(lambda: snapshot.vectors_after(0, dimension))
        if self._index.trained_on != before:
            self.unsaved = self._index.main_size

    def _opened(self, snapshot: Snapshot, dimension: int) -> VectorIndex:
        """The index from its file, brought up to the snapshot."""
        index = self._empty(dimension)
        read_index(self.path, snapshot, index, mapped=self._database.read_only)
        for rows, vectors in snapshot.vectors_after(index.last_row, dimension):
            index.add(rows, vectors)
            self.unsaved += len(rows)
        return index

    def _empty(self, dimension: int) -> VectorIndex:
        grows = not self._database.read_only
        return VectorIndex(self._agreement.kind(dimension), device=self._device, grows=grows)

    def rebuild(self) -> None:
        """Build the index anew from the file, trained on what is there now."""
        with self._lock.writing(), self._database.reading() as snapshot:
            if snapshot.dimension:
                self._index = self._empty(snapshot.dimension)
                self._index.rebuild(snapshot.vectors_after(0, snapshot.dimension))
            self._generation = snapshot.generation

    def save(self) -> None:
        """Write the index to its file, by one thread at a time.

        Raises:
            StoreError: If the store is read-only.
        """
        self.follow()
        with self._lock.reading(), self._database.changing() as transaction:
            if self._index is not None:
                write_index(self.path, transaction, self._index)
        with self._database.changing() as transaction:
            drop_other_files(self.path, transaction)
        self.unsaved = 0
