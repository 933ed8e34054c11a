"""What of a text that is still being written is already part of the answer, whatever follows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llm2vec_gen_st.reasoning import CLOSING, OPENING

_TAG = re.compile(f"{OPENING}|{CLOSING}")


class AnswerReader:
    """Reads a growing text, and gives out its answer piece by piece.

    The pieces together are the text without blocks of reasoning, up to the first stop word, without space around it.
    What may turn out to be no part of it (half a stop word, space at the end) is kept back until that is known.

    Args:
        stop: Texts that end the answer.
        reasoning: Whether the text begins inside a block of reasoning.

    Raises:
        ValueError: If a stop word is empty.

    Example:
        >>> reader = AnswerReader(["END"])
        >>> reader.read(" A bear"), reader.read(" A bear. E"), reader.read(" A bear. END of"), reader.stopped
        ('A bear', '.', '', True)
    """

    def __init__(self, stop: Sequence[str] = (), *, reasoning: bool = False) -> None:
        if not all(stop):
            raise ValueError("A stop word must not be empty.")
        self.stopped = False
        self._stop = tuple(stop)
        self._reasoning = reasoning
        self._given = 0

    def read(self, text: str, *, complete: bool = False) -> str:
        """The next piece of the answer.

        Args:
            text: All of the text so far; it begins with what the call before was given.
            complete: Whether nothing follows.

        Returns:
            The piece, which may be empty.
        """
        if self.stopped:
            return ""
        outside = _without_reasoning(text, self._reasoning, complete)
        ends = [place for word in self._stop if (place := outside.find(word)) >= 0]
        if ends:
            self.stopped = True
            outside = outside[: min(ends)]
        elif not complete:
            outside = _without_beginning(outside, self._stop)
        piece = outside.strip()[self._given :]
        self._given += len(piece)
        return piece


def _without_reasoning(text: str, reasoning: bool, complete: bool) -> str:
    """The text outside of blocks; an incomplete one also without the beginning of a tag at its end."""
    kept, start = [], 0
    for tag in _TAG.finditer(text):
        if not reasoning:
            kept.append(text[start : tag.start()])
        reasoning, start = tag.group() == OPENING, tag.end()
    if not reasoning:
        rest = text[start:]
        kept.append(rest if complete else _without_beginning(rest, (OPENING, CLOSING)))
    return "".join(kept)


def _without_beginning(text: str, words: Sequence[str]) -> str:
    """The text without the longest end of it with which one of the words begins.

    Example:
        >>> _without_beginning("and so <th", ["<think>", "</think>"])
        'and so '
    """
    sizes = (size for word in words for size in range(1, len(word)) if text.endswith(word[:size]))
    return text[: len(text) - max(sizes, default=0)]
