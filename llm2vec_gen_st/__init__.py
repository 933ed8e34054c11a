"""LLM2Vec-Gen for sentence-transformers: embed, retrieve, answer and explain with one frozen LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

__all__ = ["LLM2VecGen"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds, and `llm2vec-gen --help` needs none of it.
    if name == "LLM2VecGen":
        from llm2vec_gen_st.model import LLM2VecGen

        return LLM2VecGen
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
