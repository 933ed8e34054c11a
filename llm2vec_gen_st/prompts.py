"""The generative instructions put before queries and documents at inference (paper, section 4)."""

from __future__ import annotations

QUERY = "Generate a passage that answers this question: "
DOCUMENT = "Summarize the following passage: "

DEFAULT_PROMPTS: dict[str, str] = {"query": QUERY, "document": DOCUMENT}
