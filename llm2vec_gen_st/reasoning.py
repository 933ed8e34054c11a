"""What an LLM thinks before it answers, and how it is told from the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENING, CLOSING = "<think>", "</think>"
"""What the LLM's reasoning is written between; neither it nor they belong to an answer."""

_BLOCK = re.compile(f"{OPENING}.*?{CLOSING}", re.DOTALL)


def ends_inside(text: str) -> bool:
    """Whether a block of reasoning is open at the end of a text, as some chat templates leave it.

    Example:
        >>> ends_inside("assistant: <think>"), ends_inside("assistant: <think></think>")
        (True, False)
    """
    return text.rfind(OPENING) > text.rfind(CLOSING)


def without_reasoning(text: str, *, inside: bool = False) -> str:
    """Drop blocks of reasoning, whole or broken off, from what an LLM has written.

    Args:
        text: The text.
        inside: Whether it begins inside a block.

    Returns:
        The answer, without space around it.

    Example:
        >>> without_reasoning("<think>hm, 2 + 2</think> Four.")
        'Four.'
        >>> without_reasoning("first <think>never closed")
        'first'
        >>> without_reasoning("hm, 2 +", inside=True)
        ''
    """
    text = _BLOCK.sub("", OPENING + text if inside else text)
    return text.rpartition(CLOSING)[2].partition(OPENING)[0].strip()


def control_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of control tokens, which are no part of a text; the tags around reasoning count as text.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.eos_token_id in control_ids(tokenizer)
        True
    """
    tokens = tokenizer.added_tokens_decoder.items()
    return {number for number, token in tokens if token.special and token.content not in (OPENING, CLOSING)}


def written_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], control: Set[int]) -> str:
    """What an LLM has written, reasoning and its tags included.

    Args:
        tokenizer: The LLM's.
        ids: Token ids.
        control: Ids to leave out, see :func:`control_ids`.

    Returns:
        The text.
    """
    shown = [token for token in ids if token not in control]
    return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))
