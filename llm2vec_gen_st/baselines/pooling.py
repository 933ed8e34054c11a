"""The plain LLM: mean over the text's tokens, or its last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.llm_module import Layout, LLMModule, encoder_of


class MeanPooledLLM(LLMModule):
    """Instruction and text in one causal pass; the mean of the last hidden states over the text's tokens."""

    def layout(self, text: str, prompt: str) -> Layout:
        """Instruction and text; the text is pooled."""
        return self.instructed(text, prompt, self.max_seq_length)


class LastTokenLLM(LLMModule):
    """Instruction and text in one causal pass; the last hidden state of the last token, which has seen them all."""

    def layout(self, text: str, prompt: str) -> Layout:
        """Instruction and text; the last position is pooled."""
        found = self.instructed(text, prompt, self.max_seq_length)
        return replace(found, first=len(found.ids) - 1)


def mean_pooling(
    base: str | Backbone,
    *,
    max_seq_length: int = 512,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """Mean pooling of the plain LLM, over the text's tokens; an instruction is read, but not pooled.

    Args:
        base: Hub id, directory, or loaded backbone.
        max_seq_length: Longest input in tokens.
        prompts: Instructions by name.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the LLM's width H.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> mean_pooling(tiny_backbone(), device="cpu").encode(["bees", "rivers"]).shape
        (2, 64)
    """
    return encoder_of(
        MeanPooledLLM, base, max_seq_length=max_seq_length, prompts=prompts, device=device, model_kwargs=model_kwargs
    )


def last_token(
    base: str | Backbone,
    *,
    max_seq_length: int = 512,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """The last token's state of the plain LLM; arguments as :func:`mean_pooling`.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> last_token(tiny_backbone(), device="cpu").encode("bees").shape
        (64,)
    """
    return encoder_of(
        LastTokenLLM, base, max_seq_length=max_seq_length, prompts=prompts, device=device, model_kwargs=model_kwargs
    )
