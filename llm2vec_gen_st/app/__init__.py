"""The page in the browser behind ``llm2vec-gen app``: what one or two queries' embeddings hold, side by side."""

from __future__ import annotations

from llm2vec_gen_st.app.reading import Hit, QueryReader, Reading, Step, cosine, passages_store

__all__ = ["Hit", "QueryReader", "Reading", "Step", "cosine", "passages_store"]
