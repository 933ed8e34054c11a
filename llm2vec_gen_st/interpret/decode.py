"""Soft prompts back to text through the frozen LLM: batched, with a key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.responses.generation import end_of_text_ids


@torch.inference_mode()
def decode_ids(
    backbone: Backbone,
    soft_prompts: torch.Tensor,
    *,
    max_new_tokens: int = 64,
    end_ids: Sequence[int] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> list[list[int]]:
    """Greedy continuation of each soft prompt, with nothing before or after it (paper, section 3).

    Args:
        backbone: The frozen LLM.
        soft_prompts: (N, n, H).
        max_new_tokens: Longest text in tokens.
        end_ids: Ids that end a text; ``None`` for the LLM's own.
        batch_size: Soft prompts decoded at once.
        progress: Whether a progress bar is shown.

    Returns:
        N lists of token ids; an ending id is kept.
    """
    ends = list(end_ids) if end_ids is not None else end_of_text_ids(backbone)
    pad = ends[0] if ends else 0
    weight = embedding_weight(backbone.llm)
    dtype = weight.dtype if weight.dtype.is_floating_point else backbone.llm.dtype
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=ends or None,
        pad_token_id=pad,
    )
    found: list[list[int]] = []
    starts = range(0, len(soft_prompts), batch_size)
    for start in tqdm(starts, desc="decode", unit="batch", disable=not progress):
        prompts = soft_prompts[start : start + batch_size].to(weight.device, dtype)
        rows = cast(Any, backbone.llm).generate(
            inputs_embeds=prompts,
            attention_mask=torch.ones(prompts.shape[:2], dtype=torch.long, device=weight.device),
            generation_config=config,
        )
        found.extend(_through_end(row, ends) for row in rows.tolist())
    return found


def decode_soft_prompts(
    backbone: Backbone,
    soft_prompts: torch.Tensor,
    *,
    max_new_tokens: int = 64,
    end_ids: Sequence[int] | None = None,
    end_text: str | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> list[str]:
    """The text of each soft prompt.

    Args:
        backbone: The frozen LLM.
        soft_prompts: (N, n, H).
        max_new_tokens: Longest text in tokens.
        end_ids: Ids that end a text; ``None`` for the LLM's own.
        batch_size: Soft prompts decoded at once.
        progress: Whether a progress bar is shown.
        end_text: Text at which a result ends, for LLMs trained to write one that is not a token of theirs.

    Returns:
        N texts, without special tokens.
    """
    rows = decode_ids(
        backbone,
        soft_prompts,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        batch_size=batch_size,
        progress=progress,
    )
    texts = [str(backbone.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return [text.partition(end_text)[0] if end_text else text for text in texts]


def _through_end(ids: list[int], ends: list[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids
