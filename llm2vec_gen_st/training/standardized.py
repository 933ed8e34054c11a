"""A linear layer trained on standardized inputs: the same map, better conditioned."""

from __future__ import annotations

import torch
from torch import nn


class StandardizedLinear(nn.Module):
    """``W x + b`` written as ``A (x - mean) / std + c``, so that steps of one size suit every input.

    Hidden states of an LLM have a few very large dimensions and a large common offset; on them, steps that are small
    for most weights of a plain layer move its output far.

    Args:
        layer: The layer to start from.
        mean: Mean of its inputs (H).
        std: Their standard deviation (H).

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> same = StandardizedLinear(layer, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 9.0, 0.5])).folded()
        >>> torch.allclose(same.weight, layer.weight) and torch.allclose(same.bias, layer.bias, atol=1e-6)
        True
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, layer: nn.Linear, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.register_buffer("mean", mean.to(weight))
        self.register_buffer("std", std.to(weight))
        self.scaled_weight = nn.Parameter(torch.empty_like(weight))
        self.shifted_bias = nn.Parameter(torch.empty_like(layer.bias))
        self.assign(weight, layer.bias.detach())

    @property
    def weight(self) -> torch.Tensor:
        """W, with gradients to the standardized weight."""
        return self.scaled_weight / self.std

    @property
    def bias(self) -> torch.Tensor:
        """B, with gradients to the standardized weight and bias."""
        return self.shifted_bias - self.weight @ self.mean

    @torch.no_grad()
    def assign(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Become the layer with this weight (O, H) and bias (O)."""
        self.scaled_weight.copy_(weight * self.std)
        self.shifted_bias.copy_(bias + weight @ self.mean)

    @torch.no_grad()
    def folded(self) -> nn.Linear:
        """The plain layer that does the same."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], device=self.mean.device)
        layer.weight.copy_(self.weight)
        layer.bias.copy_(self.bias)
        return layer
