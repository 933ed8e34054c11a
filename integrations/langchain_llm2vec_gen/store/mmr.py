"""Maximal marginal relevance (Carbonell and Goldstein, 1998)."""

from __future__ import annotations

import numpy as np

from langchain_llm2vec_gen.store.metrics import Metric, exact_scores, prepared, relevance


def diverse(query: np.ndarray, vectors: np.ndarray, k: int, trade_off: float, metric: Metric) -> list[int]:
    """Choose vectors that are near the query and far from those already chosen.

    Args:
        query: (D), prepared for the metric.
        vectors: (N, D), prepared for the metric.
        k: Vectors wanted.
        trade_off: 1 looks at nearness alone, 0 at diversity alone.
        metric: The store's metric; nearness and likeness are its relevance in [0, 1]. An inner product grows with the
            length of vectors, so for ``ip`` nearness is relative to the largest product, and likeness is cosine.

    Returns:
        Positions of min(k, N) vectors, in the order in which they were chosen.

    Example:
        >>> vectors = np.array([[1, 0], [0.99, 0.1], [0.7, -0.7]], np.float32)
        >>> diverse(np.array([1, 0], np.float32), vectors, 2, 0.3, "cosine")
        [0, 2]
    """
    products = exact_scores(query, vectors, metric)
    if metric == "ip":
        # Both on the scale of a cosine, so that the trade-off means the same for vectors of any length.
        products = products / (np.abs(products).max(initial=0.0) or 1.0)
        vectors, metric = prepared(vectors, "cosine"), "cosine"
    near = np.array([relevance(float(score), metric) for score in products])
    closest_chosen = np.zeros(len(vectors))
    chosen: list[int] = []
    left = np.ones(len(vectors), dtype=bool)
    while len(chosen) < min(k, len(vectors)):
        value = trade_off * near - (1 - trade_off) * closest_chosen
        best = int(np.argmax(np.where(left, value, -np.inf)))
        chosen.append(best)
        left[best] = False
        to_best = exact_scores(vectors[best], vectors, metric)
        likeness = np.array([relevance(float(score), metric) for score in to_best])
        closest_chosen = np.maximum(closest_chosen, likeness)
    return chosen
