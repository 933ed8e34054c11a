"""Soft prompts back to text through the frozen LLM: batched, with a key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.responses.generation import end_of_text_ids
from llm2vec_gen_st.writing import writing


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
        with writing(backbone.llm):
            rows = cast(Any, backbone.llm).generate(
                inputs_embeds=prompts,
                attention_mask=torch.ones(prompts.shape[:2], dtype=torch.long, device=weight.device),
                generation_config=config,
            )
        found.extend(_through_end(row, ends) for row in rows.tolist())
    return found


def decoded_texts(backbone: Backbone, rows: Sequence[Sequence[int]], *, end_text: str | None = None) -> list[str]:
    """The texts of what :func:`decode_ids` found.

    Args:
        backbone: The frozen LLM.
        rows: N lists of token ids.
        end_text: Text at which a result ends, for LLMs trained to write one that is not a token of theirs.

    Returns:
        N texts, without special tokens.
    """
    texts = [str(backbone.tokenizer.decode(list(row), skip_special_tokens=True)) for row in rows]
    return [text.partition(end_text)[0] if end_text else text for text in texts]


def is_soft_prompts(value: Any) -> bool:
    """Whether a value is an array, a tensor, or a list of such; everything else is taken for texts."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, torch.Tensor | np.ndarray)


def as_soft_prompts(value: Any, count: int, hidden_size: int, embedding_dim: int) -> torch.Tensor:
    """Soft prompts as one tensor.

    Args:
        value: (N, n, H) or (n, H) array or tensor, or a list of N of (n, H). One of (n, H) only if embeddings have
            another width, or else n pooled embeddings would be taken for one soft prompt.
        count: Compression tokens n.
        hidden_size: Width H.
        embedding_dim: Width D of embeddings.

    Returns:
        (N, n, H).

    Raises:
        ValueError: If the shape is another, such as a pooled embedding's.

    Example:
        >>> as_soft_prompts(torch.zeros(4, 8), 4, 8, 6).shape
        torch.Size([1, 4, 8])
    """
    listed = isinstance(value, list | tuple)
    prompts = torch.stack([torch.as_tensor(item) for item in value]) if listed else torch.as_tensor(value)
    alone = not listed and tuple(prompts.shape) == (count, hidden_size)
    if alone and embedding_dim != hidden_size:
        prompts = prompts[None]
    if prompts.ndim != 3 or prompts.shape[-1] != hidden_size:
        hint = "; if it is one soft prompt, and not pooled embeddings, pass array[None]" if alone else ""
        raise ValueError(
            f"decode takes soft prompts of shape (N, {count}, {hidden_size}) from encode_soft_prompts, or texts; an "
            f"array of shape {tuple(prompts.shape)} is not one (a pooled embedding has lost what decoding needs){hint}."
        )
    return prompts


def _through_end(ids: list[int], ends: list[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids
