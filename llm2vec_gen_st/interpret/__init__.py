"""Reading an embedding: what its soft prompt says when the frozen LLM speaks it."""

from __future__ import annotations

from llm2vec_gen_st.interpret.decode import decode_ids, decode_soft_prompts

__all__ = ["decode_ids", "decode_soft_prompts"]
