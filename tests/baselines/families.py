"""Small random LLMs of several families, and the texts the tests read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.testing import tiny_backbone

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2, windows": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
}
TEXTS = [
    "bees",
    "Where do polar bears live? Who makes honey?",
    "",
    "Rivers carry water from the mountains to the sea, and bees make honey from the nectar of flowers.",
    "sea ice",
]


def family(name: str, *, attention: str = "sdpa") -> Backbone:
    """A random LLM whose weights are far from zero, so that what it attends to makes a difference that can be seen."""
    backbone = tiny_backbone(FAMILIES[name]())
    with torch.no_grad():
        for parameter in backbone.llm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    backbone.llm.set_attn_implementation(attention)
    return Backbone(backbone.llm, backbone.tokenizer, BaseReference.of(backbone.llm, "tiny"))


def states_by_hand(backbone: Backbone, ids: list[int]) -> torch.Tensor:
    """Last hidden states (T, H) of one row, from one unbatched causal pass."""
    with torch.no_grad():
        found: torch.Tensor = backbone.llm.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    return found[0]
