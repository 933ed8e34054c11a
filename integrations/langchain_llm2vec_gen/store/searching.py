"""Searching a store: the filter's rows from SQLite, the nearest of them from the index."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np

from langchain_llm2vec_gen.store.filters import Condition, canonical, compile_filter
from langchain_llm2vec_gen.store.index_follower import IndexFollower
from langchain_llm2vec_gen.store.metrics import Metric, prepared
from langchain_llm2vec_gen.store.mmr import diverse
from langchain_llm2vec_gen.store.transactions import Snapshot, StoredDocument
from langchain_llm2vec_gen.store.vector_index import VectorIndex

Filter = dict[str, Any]

_REMEMBERED_FILTERS = 32


class Searcher:
    """Searches a store, each time in one consistent view of index and file.

    Args:
        follower: The store's index.
        metric: The store's metric.
    """

    def __init__(self, follower: IndexFollower, metric: Metric) -> None:
        self._follower = follower
        self._metric = metric
        self._filters: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()
        self._filters_lock = threading.Lock()

    def nearest(self, query: np.ndarray, k: int, filter: Filter | None) -> list[tuple[StoredDocument, float]]:
        """The nearest documents and their scores, best first.

        Args:
            query: (D) float32.
            k: Number of documents wanted.
            filter: Which documents may be found; all if None.

        Returns:
            min(k, documents admitted) documents; none of an empty store.

        Raises:
            ValueError: If k is negative, the filter means nothing, or the query is not of the store's dimension.
            TypeError: If k is not a whole number.
        """
        k, condition = _checked(k, filter)
        with self._follower.view() as (snapshot, index):
            rows, scores = self._rows(snapshot, index, query, k, filter, condition)
            found = snapshot.documents(rows.tolist())
        return [(found[row], score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)]

    def diverse(
        self, query: np.ndarray, k: int, fetch_k: int, trade_off: float, filter: Filter | None
    ) -> list[StoredDocument]:
        """Documents near the query and unlike each other, in the order in which they were chosen.

        Args:
            query: (D) float32.
            k: Number of documents wanted.
            fetch_k: Number of nearest documents they are chosen from.
            trade_off: 1 looks at nearness alone, 0 at diversity alone.
            filter: Which documents may be found; all if None.

        Returns:
            min(k, documents admitted) documents.

        Raises:
            ValueError: As :meth:`nearest`.
        """
        fetch_k, condition = _checked(max(k, fetch_k), filter)
        with self._follower.view() as (snapshot, index):
            rows, _ = self._rows(snapshot, index, query, fetch_k, filter, condition)
            if not len(rows):
                return []
            order = np.sort(rows)
            vectors = prepared(snapshot.vectors(order, len(query)), self._metric)[np.searchsorted(order, rows)]
            chosen = diverse(prepared(query[None], self._metric)[0], vectors, k, trade_off, self._metric)
            rows = rows[chosen]
            found = snapshot.documents(rows.tolist())
        return [found[row] for row in rows.tolist()]

    def _rows(
        self,
        snapshot: Snapshot,
        index: VectorIndex | None,
        query: np.ndarray,
        k: int,
        filter: Filter | None,
        condition: Condition | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearest rows and their scores, best first."""
        if index is None or not k:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        if len(query) != index.kind.dimension:
            raise ValueError(
                f"{self._follower.path}: the store's vectors have {index.kind.dimension} dimensions, the query's has "
                f"{len(query)}."
            )
        admitted = self._admitted(snapshot, filter, condition)
        return index.search(query, k, admitted, partial(snapshot.vectors, dimension=len(query)))

    def _admitted(self, snapshot: Snapshot, filter: Filter | None, condition: Condition | None) -> np.ndarray | None:
        """Rows that a filter admits; remembered as long as nothing is written."""
        if filter is None or condition is None:
            return None
        key, generation = canonical(filter), snapshot.generation
        with self._filters_lock:
            known = self._filters.get(key)
            if known is not None and known[0] == generation:
                self._filters.move_to_end(key)
                return known[1]
        rows = snapshot.rows(condition)
        with self._filters_lock:
            self._filters[key] = (generation, rows)
            while len(self._filters) > _REMEMBERED_FILTERS:
                self._filters.popitem(last=False)
        return rows


def _checked(k: int, filter: Filter | None) -> tuple[int, Condition | None]:
    """The k asked for and the condition; what is wrong with a search is told even where there is nothing to search."""
    try:
        # FAISS knows no other whole numbers than Python's.
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"k must be a whole number, got {k!r}.") from None
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}.")
    return k, None if filter is None else compile_filter(filter)
