"""Checkpoint forms: ours, the authors', and stock sentence-transformers modules."""

from __future__ import annotations

from llm2vec_gen_st.checkpoints.native import export_native
from llm2vec_gen_st.checkpoints.official import import_official
from llm2vec_gen_st.checkpoints.official_export import export_official

__all__ = ["export_native", "export_official", "import_official"]
