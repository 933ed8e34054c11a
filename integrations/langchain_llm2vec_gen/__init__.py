"""LangChain on LLM2Vec-Gen: embeddings, a vector store, and a chat model on one set of weights."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_llm2vec_gen.chat import ChatLLM2VecGen
    from langchain_llm2vec_gen.embeddings import LLM2VecGenEmbeddings
    from langchain_llm2vec_gen.store import FaissStore

__all__ = ["ChatLLM2VecGen", "FaissStore", "LLM2VecGenEmbeddings"]

_HOMES = {"ChatLLM2VecGen": "chat", "FaissStore": "store", "LLM2VecGenEmbeddings": "embeddings"}


def __getattr__(name: str) -> Any:
    # Each part is imported when it is used: the store needs FAISS but no LLM, the chat model no FAISS.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
