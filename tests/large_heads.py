"""Heads as training can leave them: each maps to large values that the other takes back."""

from __future__ import annotations

import torch

from llm2vec_gen_st import LLM2VecGen


@torch.no_grad()
def with_large_heads(model: LLM2VecGen) -> LLM2VecGen:
    """The model, giving the same embeddings by two heads that must not be rounded."""
    head = model.response_head
    assert head.mlp_recon is not None
    assert head.mlp_align is not None
    weight, bias = (value.double() for value in head.folded())
    width = head.hidden_size
    draw = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    large = (draw * torch.logspace(-2, 2, width)).double()
    head.mlp_recon.weight.copy_(large)
    align = torch.linalg.solve(large.T, weight.T).T
    head.mlp_align.weight.copy_(align)
    head.mlp_align.bias.copy_(bias - align @ head.mlp_recon.bias.double())
    return model
