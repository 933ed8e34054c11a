"""The demonstration behind ``llm2vec-gen demo``: a small collection of passages, and questions about them."""

from __future__ import annotations

from llm2vec_gen_st.demo.run import DemoResult, load_passages, load_questions, run_demo

__all__ = ["DemoResult", "load_passages", "load_questions", "run_demo"]
