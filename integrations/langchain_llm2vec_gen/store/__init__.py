"""A vector store: the truth in one SQLite file, a FAISS index derived from it."""

from __future__ import annotations

from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.vectorstore import FaissStore

__all__ = ["FaissStore", "StoreError"]
