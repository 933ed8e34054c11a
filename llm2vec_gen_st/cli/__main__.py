"""Runs the command line as ``python -m llm2vec_gen_st.cli``."""

from __future__ import annotations

from llm2vec_gen_st.cli import app

if __name__ == "__main__":
    app()
