"""The training objective: reconstruct the response from the soft prompt, match the teacher's embedding of it."""

from __future__ import annotations

from llm2vec_gen_st.losses.alignment import alignment_loss
from llm2vec_gen_st.losses.cross_entropy import chunked_cross_entropy
from llm2vec_gen_st.losses.llm2vec_gen import LLM2VecGenLoss
from llm2vec_gen_st.losses.margin import margin_loss
from llm2vec_gen_st.losses.reconstruction import reconstruction_loss

__all__ = ["LLM2VecGenLoss", "alignment_loss", "chunked_cross_entropy", "margin_loss", "reconstruction_loss"]
