"""The LLM writes its own responses to unlabeled queries: the training targets (paper, section 3)."""

from __future__ import annotations

from llm2vec_gen_st.responses.backends import ResponseBackend, VllmBackend
from llm2vec_gen_st.responses.generation import GenerationSettings, generate_responses
from llm2vec_gen_st.responses.store import read_responses, write_responses

__all__ = [
    "GenerationSettings",
    "ResponseBackend",
    "VllmBackend",
    "generate_responses",
    "read_responses",
    "write_responses",
]
