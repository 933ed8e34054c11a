"""Hypothetical answers on disk: written by an LLM once, and never again."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.responses.generation import GenerationSettings, Response, generate_responses
from llm2vec_gen_st.text import TextTokenizer, without_lone_surrogates

_TABLE = """
CREATE TABLE IF NOT EXISTS answers (
    writer TEXT NOT NULL, query TEXT NOT NULL, number INTEGER NOT NULL,
    text TEXT NOT NULL, tokens INTEGER NOT NULL, flag TEXT NOT NULL,
    PRIMARY KEY (writer, query, number)
)
"""


class AnswerWriter:
    """N answers to each query, kept in an SQLite file.

    An answer's key is the LLM (its fingerprint, or else its id and revision; and its dtype), the settings, the query
    with its instruction, and its number; so asking for more answers writes only those that are missing. Each batch is
    committed when it is written: a run that was stopped goes on where it was.

    Args:
        backbone: The LLM that answers, in its own chat format.
        settings: Lengths and sampling.
        cache: The SQLite file; ``None`` keeps answers in memory, as long as this object lives.
        batch_size: Answers written at once.
    """

    def __init__(
        self, backbone: Backbone, settings: GenerationSettings, cache: str | Path | None = None, *, batch_size: int = 16
    ) -> None:
        self.backbone = backbone
        self.settings = settings
        self.cache = None if cache is None else Path(cache)
        self.batch_size = batch_size
        self.generated_tokens = 0
        """Tokens written by this object so far; answers that were there already cost none."""
        self._plain = TextTokenizer(backbone.tokenizer)
        self._memory = sqlite3.connect(":memory:", check_same_thread=False) if cache is None else None
        base = backbone.reference
        who = {
            # Weights are what answers depend on; where they lie is asked only if they cannot be told.
            "base": base.fingerprint or [base.id, base.revision],
            "dtype": str(backbone.llm.dtype),
            "settings": asdict(settings),
        }
        self.key = hashlib.sha256(json.dumps(who, sort_keys=True).encode()).hexdigest()

    def answers(self, queries: Sequence[str], count: int) -> list[list[str]]:
        """The answers to each query, written now if they were not before.

        Args:
            queries: B queries, instruction included.
            count: N.

        Returns:
            B lists of N texts; an answer may be empty.

        Raises:
            FloatingPointError: If the LLM's scores for an answer are not finite; nothing of its batch is kept.
        """
        asked = [without_lone_surrogates(query) for query in queries]
        if self._memory is not None:
            return self._answers(self._memory, asked, count)
        assert self.cache is not None
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.cache, timeout=60)) as store:
            return self._answers(store, asked, count)

    def _answers(self, store: sqlite3.Connection, asked: Sequence[str], count: int) -> list[list[str]]:
        store.execute(_TABLE)
        missing = [
            (query, number)
            for query in sorted(set(asked), key=lambda query: (len(query), query))
            for number in sorted(set(range(count)) - self._kept(store, query, count).keys())
        ]
        # One number at a time, so that no batch holds a query twice.
        for number in sorted({number for _, number in missing}):
            queries = [query for query, wanted in missing if wanted == number]
            for start in range(0, len(queries), self.batch_size):
                self._write(store, queries[start : start + self.batch_size], number)
        found = {query: self._kept(store, query, count) for query in set(asked)}
        return [[found[query][number] for number in range(count)] for query in asked]

    def _kept(self, store: sqlite3.Connection, query: str, count: int) -> dict[int, str]:
        rows = store.execute(
            "SELECT number, text FROM answers WHERE writer = ? AND query = ? AND number < ?", (self.key, query, count)
        )
        return dict(rows.fetchall())

    def _write(self, store: sqlite3.Connection, queries: Sequence[str], number: int) -> None:
        # The seed depends on what is written, not on when: the same batch is written alike in any run.
        digest = hashlib.sha256(json.dumps([list(queries), number]).encode()).digest()
        responses = generate_responses(
            self.backbone, self._plain, queries, self.settings, seed=int.from_bytes(digest[:4], "big")
        )
        broken = [query for query, response in zip(queries, responses, strict=True) if response.flag == "non_finite"]
        if broken:
            raise FloatingPointError(
                f"The LLM's scores are not finite while it answers {broken[0][:80]!r}; nothing of this batch was kept. "
                "Check its weights and dtype (float16 overflows where bfloat16 does not)."
            )
        with store:
            store.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (self.key, query, number, *_row(response))
                    for query, response in zip(queries, responses, strict=True)
                ],
            )
        self.generated_tokens += sum(response.tokens for response in responses)


def _row(response: Response) -> tuple[str, int, str]:
    return without_lone_surrogates(response.text), response.tokens, response.flag
