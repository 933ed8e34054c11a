"""The LLM's next tokens one by one, so that whoever reads them may stop at any of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.modules.lora import lora_enabled


@dataclass(frozen=True)
class WritingSettings:
    """How an answer is written.

    Args:
        max_tokens: Longest answer, in tokens.
        temperature: 0 for the most likely token each time, otherwise the sampling temperature.
        top_p: Nucleus sampling mass, used when ``temperature`` is above 0.
        stop: Texts that end the answer.

    Raises:
        ValueError: If a number is out of its range, or a stop word is empty.
    """

    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if not all(self.stop):
            raise ValueError("A stop word must not be empty.")


def next_tokens(llm: PreTrainedModel, prompt: Sequence[int], settings: WritingSettings) -> Iterator[int]:
    """Token after token behind a prompt, without an end: the reader decides when it has enough.

    Only while a token is computed is anything held or switched (LoRA layers off, no gradients), so tokens may be taken
    by different threads, while others embed.

    Args:
        llm: The causal LM.
        prompt: Token ids, at least one.
        settings: Temperature and nucleus; the LLM's own generation config adds nothing to them.

    Yields:
        Token ids.

    Raises:
        FloatingPointError: If the LLM's scores are not finite.
    """
    device = embedding_weight(llm).device
    ids, past = torch.tensor([list(prompt)], device=device), None
    # Logits of the whole prompt would be the largest tensor by far.
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(llm.forward).parameters else {}
    while True:
        with lora_enabled(llm, False), torch.inference_mode():
            found = llm(input_ids=ids, past_key_values=past, use_cache=True, **only_last)
            ids = _chosen(found.logits[:, -1].float(), settings).to(device)
        past = found.past_key_values
        yield int(ids)


def _chosen(scores: torch.Tensor, settings: WritingSettings) -> torch.Tensor:
    """The next token (1, 1) by scores (1, V)."""
    if torch.isnan(scores).any() or torch.isposinf(scores).any():
        raise FloatingPointError(
            "The LLM's scores are not finite. Check its weights and the dtype (float16 overflows where bfloat16 does "
            "not)."
        )
    if settings.temperature == 0:
        return scores.argmax(dim=-1, keepdim=True)
    warpers: list[Any] = [TemperatureLogitsWarper(float(settings.temperature))]
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    unused: Any = None
    return torch.multinomial(LogitsProcessorList(warpers)(unused, scores).softmax(dim=-1), 1)
