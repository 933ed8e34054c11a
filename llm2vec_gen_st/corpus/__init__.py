"""Corpora of any size: streamed from files, encoded part by part, resumably, by any number of processes."""

from __future__ import annotations

from llm2vec_gen_st.corpus.encoder import encode_corpus, finished_parts

__all__ = ["encode_corpus", "finished_parts"]
