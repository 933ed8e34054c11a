"""Reading an embedding: what its soft prompt says when the frozen LLM speaks it."""

from __future__ import annotations

from llm2vec_gen_st.interpret.decode import decode_ids, decoded_texts

__all__ = ["decode_ids", "decoded_texts"]
