"""FAISS behind a store: row numbers in, nearest rows out. All of it can be built again from the SQLite file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np

from langchain_llm2vec_gen.store.gpu import GpuMirror, check_device
from langchain_llm2vec_gen.store.kinds import Kind, search_parameters
from langchain_llm2vec_gen.store.metrics import exact_scores, prepared, scores_of_distances

logger = logging.getLogger(__name__)

Strategy = Literal["empty", "scan", "selector", "full"]
Fetch = Callable[[np.ndarray], np.ndarray]

_SCAN_FROM_MEMORY = 20_000
_SCAN_FROM_FILE = 4_000
_OVERSAMPLE, _OVERSAMPLE_LEAST = 4, 64
_GROWTH_BEFORE_RETRAINING = 16
_MARKS_BEFORE_REBUILDING = 1000


@dataclass(frozen=True)
class Plan:
    """How a search will be run.

    Args:
        strategy: ``scan`` compares with every vector that may be found, ``selector`` lets FAISS skip those that the
            filter does not admit, ``full`` searches all, ``empty`` has nothing to search.
        reason: Why.
    """

    strategy: Strategy
    reason: str


class VectorIndex:
    """A FAISS index over the prepared vectors of a store.

    ``main`` is of the kind that was asked for; ``tail`` is an exact index of what ``main`` does not hold yet:
    everything before it can be trained, or, in read-only use, what was added after ``main`` was written.

    Args:
        kind: The kind of index.
        device: ``cpu`` or ``cuda``.
        grows: Whether new vectors go into ``main``; otherwise all go to the tail.
    """

    def __init__(self, kind: Kind, *, device: str = "cpu", grows: bool = True) -> None:
        check_device(device, kind)
        self.kind = kind
        self.grows = grows
        self._needed = kind.needed
        self._lossless = kind.lossless
        self._main: Any = None
        self._trained_on = 0
        self._tail = self._new_tail()
        self._deleted: set[int] = set()
        self._selector_of_alive: Any = None
        self._passes_over: bool | None = None
        self.last_row = 0
        self._mirror = GpuMirror() if device == "cuda" else None

    def __len__(self) -> int:
        return self.main_size + self.tail_size - len(self._deleted)

    @property
    def main_size(self) -> int:
        """Vectors in the main index, deleted ones included."""
        return 0 if self._main is None else int(self._main.ntotal)

    @property
    def tail_size(self) -> int:
        """Vectors in the exact tail."""
        return int(self._tail.ntotal)

    @property
    def deleted(self) -> int:
        """Vectors that are marked as deleted."""
        return len(self._deleted)

    @property
    def main_last_row(self) -> int:
        """The highest row number in the main index."""
        return int(_ids(self._main)[-1]) if self.main_size else 0

    @property
    def exact(self) -> bool:
        """Whether a search finds the very nearest."""
        return self.kind.exact or self._main is None or self._main.ntotal == 0

    @property
    def needed(self) -> int:
        """Vectors needed before the main index can be trained."""
        return self._needed

    @property
    def factory(self) -> str:
        """FAISS's string of the main index, or of the one to come."""
        return self.kind.factory(self._trained_on or self._needed)

    def add(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors under row numbers above all that are there.

        Args:
            rows: (N), ascending.
            vectors: (N, D) float32, as stored.
        """
        if not len(rows):
            return
        vectors = np.ascontiguousarray(prepared(vectors, self.kind.metric), dtype=np.float32)
        if self.grows and self._main is None and not self._needed:
            self._main = faiss.IndexIDMap(self.kind.empty(0))
        target = self._main if self.grows and self._main is not None else self._tail
        target.add_with_ids(vectors, rows)
        self.last_row = int(rows[-1])
        self._changed()

    def remove(self, rows: Iterable[int]) -> None:
        """Mark rows as deleted; rows that are not there are passed over."""
        gone = np.fromiter(rows, dtype=np.int64)
        if not len(gone):
            return
        indexes = [index for index in (self._main, self._tail) if index is not None]
        held = [gone[np.isin(gone, _ids(index), kind="sort")] for index in indexes]
        self._deleted.update(int(row) for row in np.concatenate(held))
        self._changed()

    def maintain(self, blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]) -> None:
        """Train when there is enough to train on, and build anew when most of the index is of no use.

        Args:
            blocks: Gives all rows and vectors as stored, in ascending order of rows.
        """
        if not self.grows:
            return
        can_be_trained = self._main is None and 0 < self._needed <= len(self)
        mostly_deleted = len(self._deleted) > max(_MARKS_BEFORE_REBUILDING, self.main_size // 3)
        outgrown = self.kind.adapts and 0 < _GROWTH_BEFORE_RETRAINING * self._trained_on <= len(self)
        if can_be_trained or mostly_deleted or outgrown:
            self.rebuild(blocks())

    def rebuild(self, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Build the index from all rows and vectors, trained on as many as there are now."""
        self._tail, self._main, self._deleted = self._new_tail(), None, set()
        last_row, self._trained_on = self.last_row, 0
        if not self._needed:
            for rows, vectors in blocks:
                self.add(rows, vectors)
        else:
            found = list(blocks)
            count = sum(len(rows) for rows, _ in found)
            vectors = np.concatenate([block for _, block in found]) if found else np.zeros((0, self.kind.dimension))
            rows = np.concatenate([block for block, _ in found]) if found else np.zeros(0, np.int64)
            del found
            if count >= self._needed and self.grows:
                logger.info("Training the index %s on %d vectors.", self.kind.factory(count), count)
                inner = self.kind.empty(count)
                inner.train(_sample(prepared(vectors, self.kind.metric), inner))
                self._main, self._trained_on = faiss.IndexIDMap(inner), count
            self.add(rows, vectors.astype(np.float32, copy=False))
        self.last_row = max(last_row, self.last_row)
        self._changed()

    def plan(self, k: int, admitted: int | None) -> Plan:
        """Choose how to search.

        Args:
            k: Neighbours wanted.
            admitted: Number of rows that the filter admits, or None without a filter.
        """
        if not len(self) or admitted == 0:
            return Plan("empty", "no document is admitted")
        if admitted is None:
            if self._deleted and not self._can_pass_over():
                return Plan(
                    "scan",
                    f"{self.factory} cannot pass over the {len(self._deleted)} vectors that are marked as deleted, so "
                    f"the other {len(self)} are compared one by one; compact the store to have the index searched",
                )
            return Plan("full", "no filter")
        in_memory = self._flat_storage() is not None and not self.tail_size
        limit = _SCAN_FROM_MEMORY if in_memory else _SCAN_FROM_FILE
        if self.kind.exact and in_memory:
            # Gathering a vector costs several times as much as passing over one.
            limit = len(self) // 50
        if admitted <= limit:
            return Plan("scan", f"{admitted} admitted vectors are compared faster one by one (up to {limit})")
        if not self._can_pass_over():
            return Plan(
                "scan",
                f"{self.factory} cannot pass over vectors that are not admitted, so the {admitted} that are admitted "
                "are compared one by one",
            )
        return Plan("selector", f"more than {limit} vectors are admitted, so FAISS passes over the others")

    def search(
        self, query: np.ndarray, k: int, admitted: np.ndarray | None, fetch: Fetch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Nearest rows of one query.

        Args:
            query: (D) float32, as given.
            k: Neighbours wanted.
            admitted: Rows that may be found, ascending; all if None.
            fetch: Reads the stored vectors of some rows, given in ascending order.

        Returns:
            Rows and scores, best first; min(k, rows admitted) of them.
        """
        query = prepared(query[None], self.kind.metric)
        count = len(self) if admitted is None else len(admitted)
        plan = self.plan(k, None if admitted is None else count)
        wanted = min(k, count)
        if plan.strategy == "empty":
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        if plan.strategy == "scan":
            return self._scan(query[0], wanted, admitted, fetch)
        selector = self._alive() if admitted is None else _Bitmap(admitted).selector
        depth = wanted if self._lossless else max(_OVERSAMPLE * wanted, _OVERSAMPLE_LEAST)
        rows, scores = self._search_main_and_tail(query, min(depth, count), selector)
        if not self._lossless and self.main_size:
            order = np.sort(rows)
            rows, scores = self._best(query[0], order, prepared(fetch(order), self.kind.metric), wanted)
        if len(rows) < wanted:
            # The index looked only where it expected neighbours, and too few of those may be found.
            return self._scan(query[0], wanted, admitted, fetch)
        return rows[:wanted], scores[:wanted]

    def _search_main_and_tail(self, query: np.ndarray, k: int, selector: Any) -> tuple[np.ndarray, np.ndarray]:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        if self.main_size:
            storage = self._flat_storage() if self.kind.exact and self.kind.metric != "l2" else None
            if self._mirror is not None and selector is None:
                found.append(self._mirror.search(self._main, query, k))
            elif storage is not None and selector is None:
                found.append(_largest(storage @ query[0], _ids(self._main), k))
            else:
                parameters = search_parameters(self._main, k, selector)
                distances, rows = self._main.search(query, k, params=parameters)
                found.append((rows[0], distances[0]))
        if self.tail_size:
            parameters = search_parameters(self._tail, k, selector)
            distances, rows = self._tail.search(query, k, params=parameters)
            found.append((rows[0], distances[0]))
        rows, distances = (np.concatenate([pair[part] for pair in found]) for part in (0, 1))
        there = rows >= 0
        rows, scores = rows[there], scores_of_distances(distances[there], self.kind.metric)
        if len(found) > 1:
            order = np.argsort(-scores, kind="stable")[:k]
            rows, scores = rows[order], scores[order]
        return rows, scores

    def _scan(
        self, query: np.ndarray, k: int, admitted: np.ndarray | None, fetch: Fetch
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearest of all rows that may be found, compared one by one."""
        rows = self._alive_rows() if admitted is None else admitted
        return self._best(query, rows, self._vectors(rows, fetch), k)

    def _best(self, query: np.ndarray, rows: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = exact_scores(query, vectors, self.kind.metric)
        order = np.argsort(-scores, kind="stable")[:k]
        return rows[order], scores[order]

    def _vectors(self, rows: np.ndarray, fetch: Fetch) -> np.ndarray:
        """Prepared vectors of some rows: from memory where they lie there as they are, else from the file."""
        storage = self._flat_storage()
        if storage is None or self.tail_size:
            return prepared(fetch(rows), self.kind.metric)
        places = np.searchsorted(_ids(self._main), rows)
        return storage[places]

    def _flat_storage(self) -> np.ndarray | None:
        """A view (N, D) of the main index's vectors, if it keeps them in one block."""
        if self._main is None:
            return None
        index = faiss.downcast_index(self._main.index)
        if isinstance(index, faiss.IndexHNSW):
            index = faiss.downcast_index(index.storage)
        if not isinstance(index, faiss.IndexFlat) or not index.ntotal:
            return None
        view: np.ndarray = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
        return view.reshape(index.ntotal, index.d)

    def _alive(self) -> Any:
        """A selector that passes over deleted rows; None if there are none."""
        if not self._deleted:
            return None
        if self._selector_of_alive is None:
            gone = np.fromiter(sorted(self._deleted), dtype=np.int64)
            self._selector_of_alive = _Bitmap(gone).inverse
        return self._selector_of_alive

    def _can_pass_over(self) -> bool:
        """Whether FAISS can pass over vectors of the main index: not in every kind, which only trying tells."""
        if not self.main_size:
            return True
        if self._passes_over is None:
            nothing = _Bitmap(np.zeros(0, np.int64))
            query = np.zeros((1, self.kind.dimension), np.float32)
            try:
                self._main.search(query, 1, params=search_parameters(self._main, 1, nothing.selector))
                self._passes_over = True
            except RuntimeError:
                self._passes_over = False
        return self._passes_over

    def _alive_rows(self) -> np.ndarray:
        """Rows that are not deleted, ascending."""
        rows = np.concatenate([_ids(index) for index in (self._main, self._tail) if index is not None])
        gone = np.fromiter(self._deleted, dtype=np.int64)
        return np.sort(rows[~np.isin(rows, gone, kind="sort")])

    def _changed(self) -> None:
        self._selector_of_alive = None
        if self._mirror is not None:
            self._mirror.forget()

    def _new_tail(self) -> Any:
        return faiss.IndexIDMap(Kind("flat", self.kind.dimension, self.kind.metric).empty(0))

    def write(self, path: Path) -> None:
        """Write the main index to a file that FAISS reads."""
        faiss.write_index(self._main, str(path))

    def read(self, path: Path, alive: np.ndarray, trained_on: int, *, mapped: bool) -> None:
        """Take the main index from a file.

        Args:
            path: A file of :meth:`write`.
            alive: Rows up to the last one in the file that are still in the store, ascending.
            trained_on: Vectors it was trained on.
            mapped: Whether it is mapped into memory that processes share, instead of read.

        Raises:
            ValueError: If the file does not hold what the store has.
        """
        flags = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY if mapped else 0
        try:
            index = faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise ValueError(f"FAISS cannot read it ({str(error).rpartition(':')[2].strip()})") from error
        if not isinstance(index, faiss.IndexIDMap) or index.d != self.kind.dimension:
            raise ValueError("it holds another kind of index")
        rows = _ids(index)
        if not np.isin(alive, rows, kind="sort").all():
            raise ValueError("documents of the store are missing in it")
        self._main, self._trained_on = index, trained_on
        self._deleted = {int(row) for row in rows[~np.isin(rows, alive, kind="sort")]}
        self.last_row = int(rows[-1]) if len(rows) else 0
        self._changed()

    @property
    def trained_on(self) -> int:
        """Vectors that the main index was trained on."""
        return self._trained_on


class _Bitmap:
    """FAISS selectors over a set of rows; they hold on to the bits, which FAISS only points to."""

    def __init__(self, rows: np.ndarray) -> None:
        marks = np.zeros(int(rows[-1]) + 1 if len(rows) else 1, dtype=bool)
        marks[rows] = True
        self._bits = np.packbits(marks, bitorder="little")

    @property
    def selector(self) -> Any:
        """Selects the rows."""
        return faiss.IDSelectorBitmap(self._bits)

    @property
    def inverse(self) -> Any:
        """Selects all other rows."""
        return faiss.IDSelectorNot(self.selector)


def _largest(products: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and inner products of the k largest products, largest first.

    FAISS goes through a flat index with one thread for one query; one product of matrix and vector uses all of them.

    Example:
        >>> _largest(np.array([0.1, 0.9, 0.5]), np.array([4, 5, 6]), 2)[0].tolist()
        [5, 6]
    """
    chosen = np.argpartition(products, len(products) - k)[len(products) - k :] if k < len(products) else slice(None)
    products, rows = products[chosen], rows[chosen]
    order = np.lexsort((rows, -products))
    return rows[order], products[order]


def _ids(index: Any) -> np.ndarray:
    """Row numbers of an index, in the order in which they were added, without a copy."""
    if not index.ntotal:
        return np.zeros(0, np.int64)
    ids: np.ndarray = faiss.rev_swig_ptr(index.id_map.data(), index.ntotal)
    return ids


def _sample(vectors: np.ndarray, index: Any, most_per_list: int = 64) -> np.ndarray:
    """Vectors to train on: FAISS's own sampling would copy all of them first."""
    inverted = faiss.try_extract_index_ivf(index)
    most = max(most_per_list * (1 if inverted is None else inverted.nlist), 20_000)
    if len(vectors) <= most:
        return np.ascontiguousarray(vectors, dtype=np.float32)
    chosen = np.random.default_rng(0).choice(len(vectors), most, replace=False)
    return np.ascontiguousarray(vectors[np.sort(chosen)], dtype=np.float32)
