"""Cosine, inner product and Euclidean distance as scores: higher is always nearer."""

from __future__ import annotations

from typing import Literal

import numpy as np

Metric = Literal["cosine", "ip", "l2"]


def as_metric(name: str) -> Metric:
    """A metric by its name.

    Raises:
        ValueError: If there is no such metric; lists those there are.

    Example:
        >>> as_metric("l2")
        'l2'
    """
    found: dict[str, Metric] = {"cosine": "cosine", "ip": "ip", "l2": "l2"}
    if name not in found:
        raise ValueError(f"metric must be one of {', '.join(found)}, got {name!r}.")
    return found[name]


def prepared(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """Vectors as the index holds them: scaled to length 1 for cosine; a zero vector stays zero.

    Args:
        vectors: (N, D) float32.
        metric: The store's metric.

    Returns:
        (N, D) float32; the argument is left unchanged.

    Example:
        >>> prepared(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), "cosine").tolist()
        [[0.6..., 0.8...], [0.0, 0.0]]
    """
    if metric != "cosine":
        return vectors
    # In float64, since the squares of a small or large float32 leave its range.
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def exact_scores(query: np.ndarray, vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """Score of each vector for one query.

    Args:
        query: (D), prepared.
        vectors: (N, D), prepared.
        metric: The store's metric.

    Returns:
        (N) float32: cosine or inner product, or the negative Euclidean distance.

    Example:
        >>> exact_scores(np.zeros(2, np.float32), np.array([[3.0, 4.0]], np.float32), "l2").tolist()
        [-5.0]
    """
    if metric == "l2":
        return -np.linalg.norm(vectors - query, axis=1)
    return clipped(vectors @ query, metric)


def scores_of_distances(distances: np.ndarray, metric: Metric) -> np.ndarray:
    """What FAISS returns, as scores: it measures squared distances for ``l2``."""
    return -np.sqrt(np.maximum(distances, 0)) if metric == "l2" else clipped(distances, metric)


def clipped(scores: np.ndarray, metric: Metric) -> np.ndarray:
    """Cosines that rounding has put beyond 1 brought back."""
    return np.clip(scores, -1.0, 1.0) if metric == "cosine" else scores


def relevance(score: float, metric: Metric) -> float:
    """A score mapped to [0, 1], order kept.

    Args:
        score: Cosine, inner product, or negative distance.
        metric: Which of them.

    Returns:
        ``(1 + cosine) / 2``; ``1/2 + p / (2 (1 + |p|))`` of an inner product p; or ``1 / (1 + distance)``.

    Example:
        >>> relevance(1.0, "cosine"), relevance(0.0, "ip"), relevance(-1.0, "l2")
        (1.0, 0.5, 0.5)
        >>> relevance(100.0, "ip") < relevance(101.0, "ip") < 1
        True
    """
    if metric == "cosine":
        return (1.0 + score) / 2.0
    if metric == "l2":
        return 1.0 / (1.0 - score)
    # Vectors of any length have large products, where a logistic function is 1 in floating point.
    return 0.5 + score / (2.0 * (1.0 + abs(score)))
