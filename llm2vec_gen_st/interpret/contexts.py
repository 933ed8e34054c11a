"""Tokens in their sentences, and the file in which an index keeps them."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llm2vec_gen_st.text import TextTokenizer, without_lone_surrogates

_LONGEST_SENTENCE = 240
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*|(?<=[。！？])")
_SCHEMA = """
CREATE TABLE sentences (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE contexts (
    row INTEGER PRIMARY KEY, sentence INTEGER NOT NULL REFERENCES sentences, start INTEGER NOT NULL,
    stop INTEGER NOT NULL, token_id INTEGER NOT NULL
);
"""


@dataclass(frozen=True)
class Context:
    """One token in its sentence.

    Args:
        token_id: The token's id.
        sentence: The sentence around it.
        start: Where the token starts in the sentence, in characters.
        stop: Where it ends.
    """

    token_id: int
    sentence: str
    start: int
    stop: int


@dataclass(frozen=True)
class TokenSpan:
    """One token of a text, and the characters it stands for.

    Args:
        place: Its position among the text's tokens.
        token_id: Its id.
        start: First character.
        stop: Behind the last one.
    """

    place: int
    token_id: int
    start: int
    stop: int


class SpanTokenizer(TextTokenizer):
    """A :class:`~llm2vec_gen_st.text.TextTokenizer` that also tells which characters each token stands for."""

    def spans(self, text: str, limit: int) -> tuple[list[int], list[TokenSpan]]:
        """Ids of a text's first tokens, and the spans of those that stand for something in it.

        Args:
            text: The text, without lone surrogates.
            limit: Largest number of tokens.

        Returns:
            The ids; the spans, without tokens that the tokenizer itself puts in front (BOS).
        """
        encoding = self._core.encode(text)
        ids = encoding.ids[:limit]
        added = encoding.special_tokens_mask
        spans = [
            TokenSpan(place, token_id, *encoding.offsets[place])
            for place, token_id in enumerate(ids)
            if not added[place]
        ]
        return ids, spans


def context_of(text: str, span: TokenSpan) -> Context:
    """A token in the sentence around it; a long sentence is cut to what stands next to the token.

    Args:
        text: The text.
        span: The token.

    Returns:
        The context; spaces around the token are not marked.

    Example:
        >>> found = context_of("Bears live on ice. Bees make honey.", TokenSpan(7, 9, 28, 34))
        >>> found.sentence, found.sentence[found.start : found.stop]
        ('Bees make honey.', 'honey')
    """
    start, stop = span.start, span.stop
    token = text[start:stop]
    if token.strip():
        start += len(token) - len(token.lstrip())
        stop -= len(token) - len(token.rstrip())
    # What is farther away would be cut off in any case.
    first, last = max(0, start - _LONGEST_SENTENCE), min(len(text), stop + _LONGEST_SENTENCE)
    for end in _SENTENCE_END.finditer(text, first, last):
        if end.end() <= start:
            first = end.end()
        if end.start() >= stop:
            last = end.start()
            break
    width = max(_LONGEST_SENTENCE, stop - start)
    if last - first > width:
        first = max(first, min((start + stop - width) // 2, last - width))
        last = first + width
    return Context(span.token_id, text[first:last], start - first, stop - first)


class ContextWriter:
    """Writes contexts into a new SQLite file, in one transaction that nobody else can enter.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        self._connection.execute("BEGIN EXCLUSIVE")
        for statement in _SCHEMA.split(";"):
            self._connection.execute(statement)
        self._rows = self._sentences = 0

    def add(self, contexts: Iterable[Context]) -> None:
        """Append the contexts of one text, in the order of their states; each sentence is written once."""
        ids: dict[str, int] = {}
        for context in contexts:
            if context.sentence not in ids:
                ids[context.sentence] = self._sentences
                self._connection.execute("INSERT INTO sentences VALUES (?, ?)", (self._sentences, context.sentence))
                self._sentences += 1
            self._connection.execute(
                "INSERT INTO contexts VALUES (?, ?, ?, ?, ?)",
                (self._rows, ids[context.sentence], context.start, context.stop, context.token_id),
            )
            self._rows += 1

    def finish(self) -> None:
        """Make what was written stay."""
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def is_being_written(path: Path) -> bool:
    """Whether some process holds a :class:`ContextWriter` on a file."""
    if not path.exists():
        return False
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.DatabaseError as error:
            return "locked" in str(error)
    return False


def count_contexts(path: Path) -> int:
    """Number of contexts in a file.

    Raises:
        sqlite3.DatabaseError: If it is not such a file.
    """
    with closing(_reading(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM contexts").fetchone()[0])


def read_contexts(path: Path, rows: Sequence[int]) -> dict[int, Context]:
    """The contexts of some rows, by row."""
    with closing(_reading(path)) as connection:
        found = connection.execute(
            "SELECT row, token_id, text, start, stop FROM contexts JOIN sentences ON sentences.id = sentence "
            "WHERE row IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(set(rows))),),
        )
        return {row: Context(*rest) for row, *rest in found}


def as_corpus_text(text: object, number: int) -> str:
    """A corpus text as it can be tokenized and stored.

    Raises:
        TypeError: If it is not a string; names its position.
    """
    if not isinstance(text, str):
        raise TypeError(f"Text {number} is not a string but {type(text).__name__}: {str(text)[:80]!r}.")
    return without_lone_surrogates(text)


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
