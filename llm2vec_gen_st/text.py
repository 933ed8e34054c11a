"""Texts to token ids: control tokens stay text, tokenizer state is never touched, long texts are cut early."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from llm2vec_gen_st.reasoning import ends_inside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 8
_LOOKAHEAD = 64
_PLACEHOLDER = "\ue000message\ue000"
# Stands for something among token ids; no token has it.
_PLACE = -1


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of one text, and whether the text was longer than the limit."""

    ids: list[int]
    cut: bool


class TextTokenizer:
    """Thread-safe view of a tokenizer that reads user text as nothing but text.

    The wrapped tokenizer's Rust core is copied once and its settings never change afterwards: no padding, no
    truncation, and special tokens spelled inside a text are split like any other words. Tokens that the
    tokenizer itself puts in front (such as a BOS token) are kept.

    Args:
        tokenizer: A fast Hugging Face tokenizer.

    Raises:
        TypeError: If the tokenizer has no Rust core.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None:
            raise TypeError(
                f"{type(tokenizer).__name__} has no fast (Rust) implementation; load one with AutoTokenizer "
                "from a directory that has a tokenizer.json."
            )
        self._core = Tokenizer.from_str(core.to_str())
        self._core.no_padding()
        self._core.no_truncation()
        self._core.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The one setting that the core's own copies and pickles leave out.
        self._core.encode_special_tokens = True

    def ids(self, text: str, limit: int | None = None, *, add_special_tokens: bool = True) -> TokenizedText:
        """Token ids of one text, at most ``limit`` of them.

        Args:
            text: Any string; lone surrogates become U+FFFD.
            limit: Largest number of tokens, or ``None`` for no limit. A text far over the limit is not
                tokenized to its end.
            add_special_tokens: Whether the tokenizer's own leading tokens (BOS) are added.

        Returns:
            The ids and whether anything was cut.
        """
        text = without_lone_surrogates(text)
        window = len(text) if limit is None else _CHARACTERS_PER_TOKEN * (limit + 1)
        while True:
            encoding = self._core.encode(text[:window], add_special_tokens=add_special_tokens)
            if limit is None or window >= len(text):
                cut = limit is not None and len(encoding.ids) > limit
                return TokenizedText(encoding.ids[:limit] if cut else encoding.ids, cut)
            if _final_tokens(encoding, text[:window]) >= limit:
                return TokenizedText(encoding.ids[:limit], True)
            window *= 2

    def batch(self, texts: Sequence[str], limit: int | None = None) -> list[TokenizedText]:
        """Token ids of several texts, see :meth:`ids`."""
        return [self.ids(text, limit) for text in texts]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the LLM reads it.

    Args:
        ids: Token ids.
        closing: What the chat template puts behind the last message, as text.
    """

    ids: list[int]
    closing: str

    @property
    def opens_reasoning(self) -> bool:
        """Whether the template has opened a block of reasoning, so that what is written begins inside it."""
        return ends_inside(self.closing)


def message_prompt(
    tokenizer: PreTrainedTokenizerBase, plain: TextTokenizer, message: str, *, system: str | None, limit: int
) -> ChatPrompt:
    """One user message in the tokenizer's chat format, ready for the assistant's answer.

    Args:
        tokenizer: Tokenizer with a chat template; without one the message itself is the prompt.
        plain: Its :class:`TextTokenizer`.
        message: The user's text.
        system: Optional system message; ``None`` leaves the template's own default.
        limit: Largest number of tokens of the message.

    Returns:
        The prompt.
    """
    message = message.strip()
    if not tokenizer.chat_template:
        return ChatPrompt(plain.ids(message, limit).ids, "")
    opening = [] if system is None else [("system", plain.ids(system.strip(), add_special_tokens=False).ids)]
    asked = ("user", plain.ids(message, limit, add_special_tokens=False).ids)
    return _in_template(tokenizer, [*opening, asked])


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    r"""What the tokenizer's chat format puts around one user message, for something that is no text, such as vectors.

    Args:
        tokenizer: Tokenizer with a chat template; without one there is nothing around a message.

    Returns:
        Token ids in front of the message, and those behind it, ready for the assistant's answer.

    Raises:
        ValueError: If the template has no place for a user message, or several.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> [tokenizer.decode(ids) for ids in chat_frame(tokenizer)]
        ['<|im_start|>user\n', '<|im_end|>\n<|im_start|>assistant\n']
    """
    if not tokenizer.chat_template:
        return [], []
    ids = _in_template(tokenizer, [("user", [_PLACE])]).ids
    if ids.count(_PLACE) > 1:
        raise ValueError("The tokenizer's chat template repeats the user's message; vectors can stand in one place.")
    place = ids.index(_PLACE)
    return ids[:place], ids[place + 1 :]


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, plain: TextTokenizer, messages: Sequence[tuple[str, str]]
) -> ChatPrompt:
    """A conversation in the tokenizer's chat format, ready for the assistant's next message.

    Args:
        tokenizer: Tokenizer with a chat template; without one the texts are joined by blank lines.
        plain: Its :class:`TextTokenizer`.
        messages: Role (``system``, ``user``, ``assistant``) and text of each; spaces around a text are dropped.

    Returns:
        The prompt.

    Raises:
        ValueError: If the template refuses these roles in this order, or has no place for one of the messages.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> prompt = chat_prompt(tokenizer, TextTokenizer(tokenizer), [("user", "Who?"), ("assistant", "Bees.")])
        >>> print(tokenizer.decode(prompt.ids))
        <|im_start|>user
        Who?<|im_end|>
        <|im_start|>assistant
        Bees.<|im_end|>
        <|im_start|>assistant
        <BLANKLINE>
    """
    texts = [text.strip() for _, text in messages]
    if not tokenizer.chat_template:
        return ChatPrompt(plain.ids("\n\n".join(texts)).ids, "")
    contents = [plain.ids(text, add_special_tokens=False).ids for text in texts]
    return _in_template(tokenizer, [(role, ids) for (role, _), ids in zip(messages, contents, strict=True)])


def _in_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, list[int]]]) -> ChatPrompt:
    """Messages, given as ids, between the control tokens of the chat template.

    The template is rendered around placeholders and tokenized apart from the messages, so that control tokens written
    inside a message cannot end it.
    """
    stand_ins = [
        {"role": role, "content": f"{_PLACEHOLDER}{number}{_PLACEHOLDER}"} for number, (role, _) in enumerate(messages)
    ]
    try:
        rendered = tokenizer.apply_chat_template(
            stand_ins, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except TemplateError as error:
        roles = ", ".join(role for role, _ in messages)
        raise ValueError(f"The tokenizer's chat template refuses messages of the roles {roles}: {error}") from error
    # Control text at even places, numbers of messages between them.
    parts = re.split(f"{_PLACEHOLDER}(\\d+){_PLACEHOLDER}", str(rendered))
    missing = set(range(len(messages))) - {int(number) for number in parts[1::2]}
    if missing:
        first = min(missing)
        raise ValueError(
            f"The tokenizer's chat template has no place for message {first} (role {messages[first][0]!r}) in a "
            "conversation like this; leave it out or merge it with a neighbour."
        )
    ids: list[int] = []
    for place, part in enumerate(parts):
        ids += messages[int(part)][1] if place % 2 else _control_ids(tokenizer, part)
    return ChatPrompt(ids, parts[-1])


def _control_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def without_lone_surrogates(text: str) -> str:
    r"""The text, with each lone surrogate replaced by U+FFFD, so that it can be written as UTF-8.

    Example:
        >>> without_lone_surrogates("a\ud800") == "a\ufffd"
        True
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _final_tokens(encoding: Encoding, window: str) -> int:
    """Number of leading tokens that stay as they are, whatever text follows the window.

    A tokenizer splits text into words before it splits words into tokens, and where it splits may depend on the
    run of letters, digits or spaces at the window's edge. So only words are final that end before the last space
    or punctuation mark behind a letter or digit, a few characters from the edge.
    """
    edge = len(window) - _LOOKAHEAD
    while edge > 0 and not (unicodedata.category(window[edge])[0] in "PSZC" and window[edge - 1].isalnum()):
        edge -= 1
    if edge <= 0:
        return 0
    tokens = (encoding.char_to_token(position) for position in range(edge, len(window)))
    first_open = next((token for token in tokens if token is not None), None)
    return 0 if first_open is None else encoding.word_ids.index(encoding.word_ids[first_open])
