"""Generation that stops paying for rows whose response has ended.

``generate`` runs every row of a batch until the last one ends. Here it is interrupted whenever enough rows have ended;
they leave the batch and its key/value cache, and the same ``generate`` goes on with the others where it stopped.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Rows leave once they are this share of the batch: each time costs about one step, the copy of the others' cache.
_RETIRED_AT_ONCE = 1 / 8
# Of an LLM's own generation config: what counts from where `generate` was called, or keeps states beside the cache.
_BOUND_TO_ONE_CALL = (
    "cache_implementation",
    "min_new_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "prompt_lookup_num_tokens",
)


@dataclass(frozen=True)
class Written:
    """What was written in one row.

    Args:
        ids: Token ids, without the end-of-text.
        ended: Whether there was an end-of-text.
        non_finite: Whether the LLM's scores were not finite at any of these tokens or at the end-of-text.
    """

    ids: list[int]
    ended: bool
    non_finite: bool


class _Ends(StoppingCriteria):
    """Knows which rows have ended, and stops all of them when enough have."""

    def __init__(self, ends: list[int], rows: int, device: torch.device, *, stopping: bool) -> None:
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stopping = stopping
        self.stopped = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.ended |= torch.isin(input_ids[:, -1], self.ends)
        self.stopped = self.stopping and int(self.ended.sum()) >= max(1, _RETIRED_AT_ONCE * len(self.ended))
        return torch.full_like(self.ended, self.stopped)  # type: ignore[return-value]


class _NonFinite(LogitsProcessor):
    """Remembers which rows had a non-finite score before they ended, and lets the others go on."""

    def __init__(self, ends: _Ends) -> None:
        self.ends = ends
        self.rows = torch.zeros_like(ends.ended)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # Of the largest score, which is nan if any is: tokens that the LLM's own settings forbid score -inf.
        bad = ~torch.isfinite(scores.amax(dim=-1))
        self.rows |= bad & ~self.ends.ended
        return torch.where(bad[:, None], torch.zeros_like(scores), scores)  # type: ignore[return-value]


def generate_rows(
    llm: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, config: GenerationConfig, ends: list[int]
) -> list[Written]:
    """Let an LLM go on with each row until its end-of-text, paying for no row much longer than that.

    Greedily written rows are those of plain ``generate``. LLMs whose cache cannot drop rows (other than attention over
    everything or over a sliding window) run all rows to the end of the longest.

    Args:
        llm: The causal LM.
        ids: Prompts (B, T), padded on the left, on the device of the LLM's inputs.
        mask: 1 for tokens, 0 for padding (B, T).
        config: How to generate, with ``max_new_tokens``.
        ends: Token ids of the end-of-text.

    Returns:
        What was written in each of the B rows.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> llm, prompts = tiny_backbone().llm, torch.tensor([[5, 6], [7, 8]])
        >>> config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
        >>> [len(row.ids) for row in generate_rows(llm, prompts, torch.ones_like(prompts), config, [2])]
        [3, 3]
    """
    width, longest = ids.shape[1], ids.shape[1] + cast(int, config.max_new_tokens)
    config = copy.deepcopy(config)
    config.eos_token_id = ends or None
    cache = _divisible_cache(llm)
    found: dict[int, Written] = {}
    rows = list(range(len(ids)))
    broken = [False] * len(ids)
    while rows:
        watch = _Ends(ends, len(rows), ids.device, stopping=cache is not None)
        non_finite = _NonFinite(watch)
        config.max_new_tokens = longest - ids.shape[1]
        ids = cast(Any, llm).generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([non_finite]),
            stopping_criteria=StoppingCriteriaList([watch]),
            **({} if cache is None else {"past_key_values": cache}),
        )
        for row, bad in zip(rows, non_finite.rows.tolist(), strict=True):
            broken[row] |= bad
        going_on = watch.stopped and ids.shape[1] < longest
        kept = [place for place, ended in enumerate(watch.ended.tolist()) if going_on and not ended]
        for place in sorted(set(range(len(rows))) - set(kept)):
            found[rows[place]] = written_until_end(ids[place, width:].tolist(), ends, non_finite=broken[rows[place]])
        rows = [rows[place] for place in kept]
        if cache is not None and rows:
            # On the CPU, since the layers of one cache may lie on several devices.
            cache.batch_select_indices(torch.tensor(kept))
        ids, mask = ids[kept], mask[kept]
        mask = torch.cat([mask, mask.new_ones(len(kept), ids.shape[1] - mask.shape[1])], dim=1)
    return [found[row] for row in range(len(broken))]


def _divisible_cache(llm: PreTrainedModel) -> DynamicCache | None:
    """An empty cache that rows can be taken from, or ``None`` if this LLM has none."""
    own = llm.generation_config
    if own is not None and (own.use_cache is False or any(getattr(own, name, None) for name in _BOUND_TO_ONE_CALL)):
        return None
    if "past_key_values" not in inspect.signature(llm.forward).parameters:
        return None
    cache = DynamicCache(config=llm.config)
    # These and no subclasses: those add states that selecting rows leaves as they were.
    divisible = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if divisible else None


def written_until_end(ids: list[int], ends: list[int], *, non_finite: bool = False) -> Written:
    """What was written before the first end-of-text.

    Args:
        ids: Token ids, perhaps with an end-of-text and what came behind it.
        ends: Token ids of the end-of-text.
        non_finite: Whether scores were not finite.

    Example:
        >>> written_until_end([5, 6, 2, 2], [2])
        Written(ids=[5, 6], ended=True, non_finite=False)
    """
    end = next((position for position, token in enumerate(ids) if token in ends), None)
    return Written(ids if end is None else ids[:end], end is not None, non_finite)
