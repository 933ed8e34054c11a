"""GIRCSE (Tsai et al. 2025): soft tokens generated one by one and fed back, their states pooled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.baselines.loading import encoder_of_base_or_saved
from llm2vec_gen_st.baselines.pooling import LastTokenLLM
from llm2vec_gen_st.losses.cross_entropy import lm_logits
from llm2vec_gen_st.modules.groups import in_groups, similar_lengths


class GIRCSELLM(LastTokenLLM):
    """Read the text, then K times: softmax over the vocabulary, the mixture of input embeddings it weighs, fed back.

    The embedding is the mean of the last hidden states at the K soft tokens.

    Args:
        backbone: The LLM.
        soft_tokens: K; may be raised after training (``model[0].soft_tokens = 20``).
        temperature: Divides the logits before the softmax.
        **options: As in :class:`~llm2vec_gen_st.baselines.llm_module.LLMModule`.

    Raises:
        ValueError: If K or temperature is not positive.
    """

    setting_kinds: ClassVar = {**LastTokenLLM.setting_kinds, "soft_tokens": "a whole number", "temperature": "a number"}

    def __init__(self, backbone: Backbone, *, soft_tokens: int = 5, temperature: float = 1.0, **options: Any) -> None:
        if soft_tokens < 1 or temperature <= 0:
            raise ValueError(
                f"GIRCSE needs at least 1 soft token and a temperature above 0, got {soft_tokens} and {temperature}."
            )
        super().__init__(backbone, **options)
        self.soft_tokens = soft_tokens
        self.temperature = temperature

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``soft_states`` (B, K, H) and their mean, ``sentence_embedding`` (B, H), in float32 to the features."""
        ids, lengths = features["input_ids"], features["attention_mask"].sum(dim=1)
        equal = not self.attends_to_everything(ids.shape[1] + self.soft_tokens)
        with self.own_pass():
            groups = similar_lengths(lengths.tolist(), self.max_batch_tokens, equal=equal)
            states = in_groups(
                lambda rows, width: self.soft_states(ids[rows, :width], lengths[rows]), groups, lengths
            ).float()
        features["soft_states"] = states
        features["sentence_embedding"] = states.mean(dim=1)
        return features

    def soft_states(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last hidden states (b, K, H) of the soft tokens, generated with a key/value cache.

        Args:
            ids: Token ids (b, T), right-padded; all rows of the same length where layers have a window.
            lengths: Tokens of each row (b).
        """
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        read = self.llm.base_model(input_ids=ids, use_cache=True)
        rows = torch.arange(len(ids), device=read.last_hidden_state.device)
        state = read.last_hidden_state[rows, lengths.to(rows.device) - 1]
        past, states = read.past_key_values, []
        for step in range(self.soft_tokens):
            mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=1)
            written = self.llm.base_model(
                inputs_embeds=self.soft_token(state)[:, None],
                attention_mask=mask,
                position_ids=lengths[:, None] + step,
                past_key_values=past,
                use_cache=True,
            )
            past, state = written.past_key_values, written.last_hidden_state[:, -1]
            states.append(state)
        return torch.stack(states, dim=1)

    def soft_token(self, state: torch.Tensor) -> torch.Tensor:
        """The mixture of input embeddings (b, H) that a hidden state (b, H) calls for."""
        weights = torch.softmax(lm_logits(self.llm, state).float() / self.temperature, dim=-1)
        embeddings = embedding_weight(self.llm)
        # Some families scale what they look up.
        scale = getattr(self.llm.get_input_embeddings(), "embed_scale", 1.0)
        mixed: torch.Tensor = weights.to(embeddings) @ embeddings * scale
        return mixed


def gircse(
    base_or_path: str | Path | Backbone,
    *,
    base: str | Backbone | None = None,
    soft_tokens: int = 5,
    temperature: float = 1.0,
    max_seq_length: int = 512,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """GIRCSE on a base LLM (not trained), or trained here.

    Args:
        base_or_path: A backbone; hub id or directory of an LLM; or a directory that
            :func:`~llm2vec_gen_st.baselines.train_gircse` wrote, which has its own settings.
        base: For such a directory, another place of its base model, or a loaded backbone.
        soft_tokens: K, the passes of one token each that follow the text's.
        temperature: Divides the logits before the softmax.
        max_seq_length: Longest text in tokens, instruction included.
        prompts: Instructions by name.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the LLM's width H.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> gircse(tiny_backbone(), soft_tokens=3, device="cpu").encode(["bees"]).shape
        (1, 64)
    """
    return encoder_of_base_or_saved(
        GIRCSELLM,
        base_or_path,
        base=base,
        soft_tokens=soft_tokens,
        temperature=temperature,
        max_seq_length=max_seq_length,
        prompts=prompts,
        device=device,
        model_kwargs=model_kwargs,
    )
