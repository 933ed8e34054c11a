"""Attention of a decoder LLM in both directions, for one pass, without changing the LLM."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import embedding_weight

_MASKED_KINDS = ("eager", "sdpa")


def bidirectional_states(llm: PreTrainedModel, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Last hidden states of right-padded rows, each token attending to all tokens of its row.

    Decoder LLMs take a ready mask (b, 1, T, T) as it is, in every layer, instead of making a causal one: also where
    layers have a sliding window. So the LLM itself stays causal for everyone else.

    Args:
        llm: The causal LM.
        ids: Token ids (b, T).
        lengths: Tokens of each row (b).

    Returns:
        (b, T, H); what stands at padding means nothing.

    Raises:
        ValueError: If the LLM's attention implementation takes no ready masks.
    """
    kind = llm.config._attn_implementation
    if kind not in _MASKED_KINDS:
        raise ValueError(
            f"The attention implementation {kind!r} takes no mask that lets tokens see later ones; load the base model "
            f"with attn_implementation='sdpa'."
        )
    dtype = llm.dtype
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None].to(ids.device)
    # Padding attends to the row too, so that no row of the softmax is empty.
    mask = torch.zeros(len(ids), 1, 1, ids.shape[1], dtype=dtype, device=ids.device)
    mask = mask.masked_fill(~real[:, None, None, :], torch.finfo(dtype).min)
    states: torch.Tensor = llm.base_model(
        input_ids=ids, attention_mask=mask.expand(-1, -1, ids.shape[1], -1), use_cache=False
    ).last_hidden_state
    return states


@torch.no_grad()
def check_bidirectional(llm: PreTrainedModel) -> None:
    """Refuse an LLM whose first token does not see a later one.

    Args:
        llm: The causal LM.

    Raises:
        ValueError: If its layers do not let tokens see later ones; names the family.
    """
    weight = embedding_weight(llm)
    if weight.device.type == "meta" or len(weight) < 3:
        return
    ids = torch.tensor([[0, 1], [0, 2]], device=weight.device)
    first = bidirectional_states(llm, ids, torch.tensor([2, 2], device=weight.device))[:, 0].float()
    if torch.equal(first[0], first[1]):
        raise ValueError(
            f"{type(llm).__name__} does not let a token see later ones, whatever mask it is given; LLM2Vec needs "
            "another base model (tried and tested: Llama, Qwen2, Qwen3, Mistral)."
        )
