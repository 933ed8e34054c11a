"""Embeddings whose vectors are known beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

Vectors = Mapping[str, Sequence[float]]


class ToyEmbeddings(Embeddings):
    """Gives the vectors it was told, and those of a hash for all other texts; keeps what it was asked.

    Args:
        vectors: Vector of each known text.
        dimension: Length of the vectors of other texts.
        model: A name that tells one embedding from another.
    """

    def __init__(self, vectors: Vectors | None = None, *, dimension: int = 8, model: str = "toy") -> None:
        self.vectors = dict(vectors or {})
        self.dimension = dimension
        self.model = model
        self.batches: list[list[str]] = []
        self.queries: list[str] = []

    def _vector(self, text: str) -> list[float]:
        if text in self.vectors:
            return [float(value) for value in self.vectors[text]]
        seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")
        return [float(value) for value in np.random.default_rng(seed).normal(size=self.dimension)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(list(texts))
        return [self._vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.queries.append(text)
        return self._vector(text)


@pytest.fixture
def hashing() -> ToyEmbeddings:
    """Vectors of 8 dimensions from a hash of the text."""
    return ToyEmbeddings()


@pytest.fixture
def toy() -> Callable[..., ToyEmbeddings]:
    """Makes an embedding of chosen vectors."""
    return ToyEmbeddings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may go."""
    return tmp_path / "corpus.store"
