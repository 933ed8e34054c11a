"""Stores of drawn vectors, and what a search in them should find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from langchain_llm2vec_gen import FaissStore

KINDS = ["flat", "hnsw", "ivf", "IVF2,Flat"]
METRICS = ["cosine", "ip", "l2"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def names(count: int) -> list[str]:
    return [f"d{number}" for number in range(count)]


def exact(vectors: np.ndarray, query: np.ndarray, metric: str) -> np.ndarray:
    """Scores, from their definition."""
    vectors, query = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return -np.sqrt(((vectors - query) ** 2).sum(axis=1))
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        query = query / np.linalg.norm(query)
    return vectors @ query


def found(store: FaissStore, query: Any, k: int = 4, **more: Any) -> list[str]:
    return [str(document.id) for document in store.similarity_search_by_vector(query, k, **more)]


def filled(path: Path, vectors: np.ndarray, metadatas: list[dict[str, Any]] | None = None, **more: Any) -> FaissStore:
    store = FaissStore(path, **more)
    ids = names(len(vectors))
    store.add_embeddings([f"text of {id}" for id in ids], vectors, metadatas, ids)
    return store


def refuse_to_embed(*_: Any) -> None:
    raise AssertionError("nothing was to be embedded")
