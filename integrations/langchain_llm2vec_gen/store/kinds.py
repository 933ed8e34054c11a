"""Kinds of FAISS index: their names, when they can be trained, and how they are searched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from langchain_llm2vec_gen.store.metrics import Metric

_POINTS_PER_CENTROID = 39  # FAISS warns of fewer.
_LISTS_AT_FIRST = 64
_PQ_CENTROIDS = 256
_HNSW_LINKS = 32
_HNSW_BUILD, _HNSW_SEARCH = 80, 64


@dataclass(frozen=True)
class Kind:
    """One kind of index.

    Args:
        name: ``flat``, ``hnsw``, ``ivf``, ``ivfpq``, or a string of FAISS's ``index_factory``.
        dimension: D.
        metric: The store's metric.

    Raises:
        ValueError: If FAISS does not know the string, or cannot build it for this dimension.

    Example:
        >>> Kind("ivf", 384, "cosine").factory(100_000)
        'IVF256,Flat'
        >>> Kind("flat", 384, "cosine").needed, Kind("ivf", 384, "cosine").needed
        (0, 2496)
    """

    name: str
    dimension: int
    metric: Metric

    def __post_init__(self) -> None:
        try:
            self.empty(0)
        except RuntimeError as error:
            raise ValueError(
                f"index={self.name!r}: FAISS cannot build it for vectors of {self.dimension} dimensions; use flat, "
                "hnsw, ivf, ivfpq or a string that faiss.index_factory knows "
                f"({str(error).rpartition(':')[2].strip()})."
            ) from error

    def factory(self, count: int) -> str:
        """FAISS's string for an index that is trained on some number of vectors."""
        if self.name == "flat":
            return "Flat"
        if self.name == "hnsw":
            return f"HNSW{_HNSW_LINKS}"
        if self.name == "ivf":
            return f"IVF{_lists(count)},Flat"
        if self.name == "ivfpq":
            return f"IVF{_lists(count)},PQ{_parts(self.dimension)}"
        return self.name

    def empty(self, count: int) -> Any:
        """A new index, to be trained on some number of vectors."""
        metric = faiss.METRIC_L2 if self.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        index = faiss.index_factory(self.dimension, self.factory(count), metric)
        graph = faiss.downcast_index(index)
        if isinstance(graph, faiss.IndexHNSW):
            graph.hnsw.efConstruction = _HNSW_BUILD
        return index

    @property
    def needed(self) -> int:
        """Vectors needed for training; 0 if there is none."""
        index = self.empty(0)
        if index.is_trained:
            return 0
        points = 1
        inverted = faiss.try_extract_index_ivf(index)
        if inverted is not None:
            points = inverted.nlist
        if (found := re.search(r"(?<!O)PQ\d+(?:x(\d+))?", self.factory(0))) is not None:
            points = max(points, 2 ** int(found[1]) if found[1] else _PQ_CENTROIDS)
        return _POINTS_PER_CENTROID * points

    @property
    def adapts(self) -> bool:
        """Whether the number of inverted lists follows the number of vectors."""
        return self.name in ("ivf", "ivfpq")

    @property
    def exact(self) -> bool:
        """Whether its search finds the very nearest."""
        return self.factory(0) == "Flat"

    @property
    def is_graph(self) -> bool:
        """Whether it is an HNSW graph."""
        owner = self.empty(0)
        return isinstance(faiss.downcast_index(owner), faiss.IndexHNSW)

    @property
    def lossless(self) -> bool:
        """Whether it holds the vectors as they are, so that its scores need no second look."""
        # Kept in a variable: what downcast_index returns does not keep the index alive.
        owner = self.empty(0)
        index = faiss.downcast_index(owner)
        if isinstance(index, faiss.IndexHNSW):
            index = faiss.downcast_index(index.storage)
        return isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat)


def search_parameters(index: Any, k: int, selector: Any) -> Any:
    """How an index (without its map of ids) is searched; made anew for each search, which FAISS changes it in.

    Args:
        index: The FAISS index.
        k: Neighbours wanted.
        selector: FAISS selector of the ids admitted, or None.
    """
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = search_parameters(index.index, k, selector)
        return faiss.SearchParametersPreTransform(sel=selector, index_params=inner)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(_HNSW_SEARCH, 2 * k), sel=selector)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=probes(index.nlist), sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)


def probes(lists: int) -> int:
    """Inverted lists looked into, of so many."""
    return min(lists, max(8, lists // 16))


def _lists(count: int) -> int:
    """Inverted lists for so many vectors: the power of two nearest to their square root."""
    return max(_LISTS_AT_FIRST, 2 ** round(np.log2(max(count, 1)) / 2))


def _parts(dimension: int) -> int:
    """Parts of a product quantizer: of 8 dimensions each, or as near to that as divides the dimension."""
    return next(parts for parts in range(max(1, dimension // 8), 0, -1) if dimension % parts == 0)
