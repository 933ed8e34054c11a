"""The two pipeline modules of a student: texts to compression states, compression states to an embedding."""

from __future__ import annotations

from llm2vec_gen_st.modules.response_head import ResponseHead
from llm2vec_gen_st.modules.suffix_transformer import SuffixTransformer

__all__ = ["ResponseHead", "SuffixTransformer"]
