"""Logit lens: the words that the frozen LLM's head reads in each compression token's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llm2vec_gen_st.encoding import as_rows, instruction_options
from llm2vec_gen_st.interpret.dropping import Dropping, words_of
from llm2vec_gen_st.interpret.states import compression_states
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits, lm_logits

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

# Positions whose logits over the whole vocabulary exist at once.
_CHUNK = 64
# Candidates looked at first, beyond those wanted, where some are left out.
_SPARE = 64


@dataclass(frozen=True)
class LensToken:
    """One token that a compression token's state points at.

    Args:
        input: Which of the texts, from 0.
        text: That text.
        position: Which compression token, from 0.
        rank: Place among the tokens that were not left out, from 1.
        token_id: The token's id.
        token: Its text.
        logit: Its logit.
        probability: Its share of the softmax over the whole vocabulary, tokens that were left out included.
    """

    input: int
    text: str
    position: int
    rank: int
    token_id: int
    token: str
    logit: float
    probability: float


@torch.inference_mode()
def logit_lens(
    model: LLM2VecGen,
    texts: str | Iterable[str],
    *,
    top_k: int = 10,
    drop: Dropping | None = None,
    prompt_name: str | None = "query",
    prompt: str | None = None,
) -> list[LensToken]:
    """The most likely tokens at each compression token, by the frozen LLM's own head.

    The states are the last ones, behind the LLM's final norm, as its head expects them. The logits of 64 positions at
    a time exist in memory.

    Args:
        model: The student.
        texts: A string or any iterable of N strings.
        top_k: Tokens a position.
        drop: Which tokens are left out; ``Dropping()`` leaves what the model added to the text, ``None`` leaves all in.
        prompt_name: Name of the instruction.
        prompt: The instruction itself, instead.

    Returns:
        Up to N * n * top_k tokens, by text, position and rank; ``pandas.DataFrame(...)`` takes them as they are.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If ``top_k`` is not positive, or the LLM does something behind its head that is not known here.
        FloatingPointError: If a state is not finite.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> found = logit_lens(tiny_model(), ["who makes honey?"], top_k=3)
        >>> [(token.position, token.rank) for token in found[:4]]
        [(0, 1), (0, 2), (0, 3), (1, 1)]
    """
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}.")
    rows = as_rows(texts)
    instruction = instruction_options(prompt_name, prompt)
    states = compression_states(model, rows, **instruction)
    n = states.shape[1]
    vocabulary = Vocabulary(model)
    words = [vocabulary.words_in(text) if drop is not None else frozenset() for text in rows]

    def dropped(place: int, token_id: int) -> bool:
        return drop is not None and drop.drops(vocabulary.word(token_id), words[place // n])

    found: list[LensToken] = []
    for start, logits in lens_logits(model, states):
        totals = logits.logsumexp(dim=-1).tolist()
        best = _best(logits, top_k, None if drop is None else dropped, start)
        for row, tokens in enumerate(best):
            number, position = divmod(start + row, n)
            found.extend(
                LensToken(
                    input=number,
                    text=rows[number],
                    position=position,
                    rank=rank,
                    token_id=token_id,
                    token=vocabulary.text(token_id),
                    logit=logit,
                    probability=math.exp(logit - totals[row]),
                )
                for rank, (token_id, logit) in enumerate(tokens, 1)
            )
    return found


def lens_logits(model: LLM2VecGen, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of the LLM's own head at compression tokens, of 64 positions at a time.

    Args:
        model: The student.
        states: (N, n, H) of the last layer.

    Yields:
        Number of the first of r positions, counted through all N * n, and their logits (r, V) in float32.

    Raises:
        ValueError: If the LLM does something behind its head that is not known here.
    """
    try:
        check_lm_logits(model.llm)
    except ValueError as error:
        raise ValueError(
            f"{type(model.llm).__name__} applies something behind its LM head that is not known here, so its logits "
            "cannot be read from hidden states."
        ) from error
    flat = states.flatten(0, 1)
    dtype = model.llm.get_output_embeddings().weight.dtype
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(dtype if dtype.is_floating_point else model.llm.dtype)
        yield start, lm_logits(model.llm, part).float()


def _best(
    logits: torch.Tensor, count: int, dropped: Callable[[int, int], bool] | None, first: int
) -> list[list[tuple[int, float]]]:
    """The largest logits (r, V) of each row that are not left out, with their ids.

    Only as many candidates are looked at as are needed: leaving tokens out takes their text, and there are many.

    Args:
        logits: (r, V).
        count: Tokens a row.
        dropped: Whether a token of a place (first + row) is left out; ``None`` if none is.
        first: Place of the first row.
    """
    vocabulary = logits.shape[1]
    width = min(vocabulary, count if dropped is None else count + _SPARE)
    found: list[list[tuple[int, float]]] = [[] for _ in logits]
    open_rows = list(range(len(logits)))
    while open_rows:
        values, ids = logits[open_rows].topk(width, dim=-1)
        short = []
        for row, row_values, row_ids in zip(open_rows, values.tolist(), ids.tolist(), strict=True):
            pairs = zip(row_ids, row_values, strict=True)
            found[row] = [pair for pair in pairs if dropped is None or not dropped(first + row, pair[0])][:count]
            if len(found[row]) < count and width < vocabulary:
                short.append(row)
        open_rows, width = short, min(vocabulary, 4 * width)
    return found


class Vocabulary:
    """Texts of the LLM's tokens, decoded once each."""

    def __init__(self, model: LLM2VecGen) -> None:
        self._tokenizer = model.backbone.tokenizer
        self._plain = model.suffix_transformer.text_tokenizer
        self._limit = model.suffix_transformer.text_limit
        self._control = set(self._tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """A token's text; rows that the head has beyond the tokenizer's have none."""
        if token_id not in self._texts:
            self._texts[token_id] = str(self._tokenizer.decode([token_id]))
        return self._texts[token_id]

    def word(self, token_id: int) -> str:
        """A token's text as far as it says something: control tokens do not."""
        return "" if token_id in self._control else self.text(token_id)

    def words_in(self, text: str) -> frozenset[str]:
        """The words of a text and the tokens they are made of."""
        ids = self._plain.ids(text, self._limit, add_special_tokens=False).ids
        return words_of(text, map(self.text, ids))
