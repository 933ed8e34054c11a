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
_TRIED_DIMENSIONS = (64, 768, 1024, 4096)
_MOST_PARTS = 1024


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
            index = self.empty(0)
        except RuntimeError as error:
            raise _unbuildable(self.name, f"vectors of {self.dimension} dimensions", error) from error
        if _maps_ids(index):
            raise ValueError(
                f"index={self.name!r}: the store keeps the map from its documents to FAISS's vectors itself, and an "
                "index cannot have two; leave IDMap out of the string."
            )

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


def kind_of_any_dimension(name: str, metric: Metric) -> Kind:
    """A kind of index, for vectors whose dimension is not known yet: for the first dimension that it can be built for.

    Args:
        name: As in :class:`Kind`.
        metric: The store's metric.

    Raises:
        ValueError: If FAISS can build it for none of the dimensions tried.

    Example:
        >>> kind_of_any_dimension("flat", "cosine").dimension, kind_of_any_dimension("PQ7", "l2").dimension
        (64, 448)
    """
    # A product quantizer needs a dimension that its number of parts divides.
    parts = {int(number) for number in re.findall(r"[0-9]+", name)}
    tried = (*_TRIED_DIMENSIONS, *(64 * number for number in sorted(parts) if 0 < number <= _MOST_PARTS))
    refused: list[ValueError] = []
    for dimension in tried:
        try:
            return Kind(name, dimension, metric)
        except ValueError as error:
            refused.append(error)
    if isinstance(reason := refused[0].__cause__, RuntimeError):
        numbers = ", ".join(map(str, tried))
        raise _unbuildable(name, f"vectors of any number of dimensions that was tried ({numbers})", reason) from reason
    raise refused[0]


def search_parameters(main: Any, k: int, selector: Any) -> Any:
    """How an index is searched; made anew for each search, which FAISS changes it in.

    Args:
        main: The FAISS index with its map of ids.
        k: Neighbours wanted.
        selector: FAISS selector of the ids admitted, or None.
    """
    index = faiss.downcast_index(main.index)
    if isinstance(index, faiss.IndexPreTransform):
        # The map translates the outer selector alone. The inner one would take the ids for places in the index.
        translated = None if selector is None else faiss.IDSelectorTranslated(main.id_map, selector)
        inner = _search_parameters(index.index, k, translated)
        parameters = faiss.SearchParametersPreTransform(sel=selector, index_params=inner)
        # FAISS holds on to pointers only.
        parameters.kept = (translated, selector, inner)
        return parameters
    return _search_parameters(index, k, selector)


def _search_parameters(index: Any, k: int, selector: Any) -> Any:
    """As :func:`search_parameters`, for an index without a map of ids."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _search_parameters(index.index, k, selector)
        return faiss.SearchParametersPreTransform(sel=selector, index_params=inner)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(_HNSW_SEARCH, 2 * k), sel=selector)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=probes(index.nlist), sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)


def probes(lists: int) -> int:
    """Inverted lists looked into, of so many."""
    return min(lists, max(8, lists // 16))


def _unbuildable(name: str, vectors: str, error: RuntimeError) -> ValueError:
    return ValueError(
        f"index={name!r}: FAISS cannot build it for {vectors}; use flat, hnsw, ivf, ivfpq or a string that "
        f"faiss.index_factory knows ({str(error).rpartition(':')[2].strip()})."
    )


def _maps_ids(index: Any) -> bool:
    """Whether an index, or one inside it, has a map of ids."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _maps_ids(index.index)
    if isinstance(index, faiss.IndexRefine):
        return _maps_ids(index.base_index)
    return isinstance(index, faiss.IndexIDMap)


def _lists(count: int) -> int:
    """Inverted lists for so many vectors: the power of two nearest to their square root."""
    return max(_LISTS_AT_FIRST, 2 ** round(np.log2(max(count, 1)) / 2))


def _parts(dimension: int) -> int:
    """Parts of a product quantizer: of 8 dimensions each, or as near to that as divides the dimension."""
    return next(parts for parts in range(max(1, dimension // 8), 0, -1) if dimension % parts == 0)
