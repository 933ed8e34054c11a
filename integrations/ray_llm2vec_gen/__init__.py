"""LLM2Vec-Gen on Ray: a corpus encoded and queries answered by actors on many machines, each holding one model.

What is written is what ``llm2vec_gen_st.corpus.encode_corpus`` and ``llm2vec_gen_st.responses.write_responses`` write,
part by part, so either can go on where the other stopped.
"""

from __future__ import annotations

from ray_llm2vec_gen.embeddings import encode_corpus
from ray_llm2vec_gen.responses import write_responses

__all__ = ["encode_corpus", "write_responses"]
