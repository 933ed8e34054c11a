"""Files to documents of a store: find them, read them, cut them into chunks, and add what changed."""

from __future__ import annotations

from langchain_llm2vec_gen.ingest.files import FoundFiles, find_files
from langchain_llm2vec_gen.ingest.indexing import IndexReport, index_files

__all__ = ["FoundFiles", "IndexReport", "find_files", "index_files"]
