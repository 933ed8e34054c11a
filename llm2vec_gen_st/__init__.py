"""LLM2Vec-Gen for sentence-transformers: embed, retrieve, answer and explain with one frozen LLM."""

from __future__ import annotations

from llm2vec_gen_st.model import LLM2VecGen

__all__ = ["LLM2VecGen"]
__version__ = "0.1.0"
