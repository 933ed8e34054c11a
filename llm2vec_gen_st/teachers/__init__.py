"""Target embeddings of responses: from any SentenceTransformer, or from the LLM itself."""

from __future__ import annotations

from llm2vec_gen_st.teachers.embeddings import teacher_embeddings
from llm2vec_gen_st.teachers.sources import SELF, load_teacher, teacher_name

__all__ = ["SELF", "load_teacher", "teacher_embeddings", "teacher_name"]
