"""One batch of queries to one batch of responses, through the backbone's own chat format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.reasoning import control_ids, without_reasoning, written_text
from llm2vec_gen_st.responses.retirement import Written, generate_rows
from llm2vec_gen_st.text import ChatPrompt, TextTokenizer, message_prompt
from llm2vec_gen_st.writing import writing


@dataclass(frozen=True)
class GenerationSettings:
    """How responses are written.

    Args:
        max_new_tokens: Longest response, in tokens (the paper uses 500).
        temperature: 0 for greedy responses, otherwise the sampling temperature.
        top_p: Nucleus sampling mass, used when ``temperature`` is above 0.
        system: Optional system message; ``None`` keeps the chat template's default.
        max_query_tokens: Queries are cut to this many tokens.
        seed: Seed of sampled responses.
    """

    max_new_tokens: int = 500
    temperature: float = 0.0
    top_p: float = 1.0
    system: str | None = None
    max_query_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Response:
    """One response: its text, its length in tokens, and what is wrong with it (``ok`` if nothing is).

    ``flag`` is ``ok``, ``empty``, ``cut_off`` (no end-of-text within ``max_new_tokens``) or ``non_finite``.
    """

    text: str
    tokens: int
    flag: str


def end_of_text_ids(backbone: Backbone) -> list[int]:
    """Token ids at which the LLM's own responses end: those of its generation config and its tokenizer."""
    return ids_that_end(backbone.llm.generation_config, backbone.tokenizer)


def ids_that_end(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids at which responses end, by an LLM's generation config, if it has one, and its tokenizer.

    Args:
        config: The generation config.
        tokenizer: The tokenizer.
    """
    found = None if config is None else config.eos_token_id
    ids = [found] if isinstance(found, int) else list(found or [])
    if tokenizer.eos_token_id is not None:
        ids.append(cast(int, tokenizer.eos_token_id))
    return sorted(set(ids))


@torch.inference_mode()
def generate_responses(
    backbone: Backbone, plain: TextTokenizer, queries: Sequence[str], settings: GenerationSettings, *, seed: int = 0
) -> list[Response]:
    """Write the LLM's response to each query of one batch.

    Args:
        backbone: The causal LLM and its tokenizer.
        plain: The tokenizer as :class:`~llm2vec_gen_st.text.TextTokenizer`.
        queries: B queries.
        settings: Lengths and sampling.
        seed: Added to the settings' seed, so that each batch samples on its own.

    Returns:
        B responses, in order.
    """
    prompts = [
        message_prompt(backbone.tokenizer, plain, query, system=settings.system, limit=settings.max_query_tokens)
        for query in queries
    ]
    ends = end_of_text_ids(backbone)
    pad = ends[0] if ends else 0
    width = max(len(prompt.ids) for prompt in prompts)
    device = embedding_weight(backbone.llm).device
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        temperature=settings.temperature if settings.temperature > 0 else None,
        top_p=settings.top_p if settings.temperature > 0 else None,
        # Set, so that the LLM's own generation config adds nothing that the settings do not record: a repetition
        # penalty would also count padding, and so make a response depend on its batch.
        top_k=0 if settings.temperature > 0 else None,
        repetition_penalty=1.0,
        num_beams=1,
        pad_token_id=pad,
    )
    with writing(backbone.llm), torch.random.fork_rng(enabled=settings.temperature > 0):
        if settings.temperature > 0:
            torch.manual_seed(settings.seed + seed)
        rows = generate_rows(backbone.llm, ids.to(device), mask.to(device), config, ends)
    return [as_response(backbone.tokenizer, prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def as_response(tokenizer: PreTrainedTokenizerBase, prompt: ChatPrompt, written: Written) -> Response:
    """Text and flag of what was written.

    Args:
        tokenizer: The writer's.
        prompt: What it was written behind.
        written: Token ids, without the end-of-text.
    """
    found = written_text(tokenizer, written.ids, control_ids(tokenizer))
    text = without_reasoning(found, inside=prompt.opens_reasoning)
    if written.non_finite:
        flag = "non_finite"
    elif not text:
        flag = "empty"
    else:
        flag = "ok" if written.ended else "cut_off"
    return Response(text, len(written.ids), flag)
