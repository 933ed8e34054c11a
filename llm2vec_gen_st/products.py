"""How a frozen LLM's linear layers multiply: as torch would by itself, or on a CPU in a way that is quicker there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Way = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
"""Computes a layer's outputs (R, K) for contiguous rows (R, D) in the layer's number format, both on a CPU."""

# Of one thread: another one may run the same LLM for something else meanwhile.
_way: ContextVar[Way | None] = ContextVar("way", default=None)


def prepare_products(llm: nn.Module) -> None:
    """Make an LLM's linear layers heed :func:`multiplying`; outside of that they do what they did, to the bit.

    Layers of other types (quantized ones) and those with a forward of another library (hooks of a device map) are left
    alone. Doing it again changes nothing.

    Args:
        llm: The causal LM.
    """
    for layer in llm.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            vars(layer)["forward"] = _Product(layer)


@contextmanager
def multiplying(way: Way) -> Iterator[None]:
    """While this lasts, in this thread, prepared linear layers multiply in some way.

    Layers that are compiled, or under autocast, do as they would by themselves.

    Args:
        way: How a layer multiplies.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 1))
        >>> prepare_products(layer)
        >>> with multiplying(lambda layer, rows: rows.sum(dim=1, keepdim=True)):
        ...     layer(torch.tensor([[1.0, 2.0]])).item()
        3.0
    """
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


@contextmanager
def quick_products() -> Iterator[None]:
    """While this lasts, prepared layers in float32 multiply by oneDNN on a CPU that torch has it for.

    Torch leaves float32 to another library, which takes longer (`benchmarks/speed/few_rows.py`). Values are the same up
    to the order of sums. Gradients go through layers whose weights are frozen; others do as they would by themselves.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> llm, ids = tiny_backbone().llm, torch.tensor([[5, 6, 7]])
        >>> prepare_products(llm)
        >>> with quick_products():
        ...     quick = llm(ids).logits
        >>> torch.allclose(quick, llm(ids).logits, atol=1e-5)
        True
    """
    with multiplying(multiply_quickly):
        yield


def multiply_quickly(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """``rows @ layer.weight.T + layer.bias`` by oneDNN in float32, else as torch does."""
    weight, bias = layer.weight, layer.bias
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if weight.dtype != torch.float32 or weight.dtype not in onednn_formats() or not len(rows):
        return nn.functional.linear(rows, weight, bias)
    if not torch.is_grad_enabled() or not (trained or rows.requires_grad):
        return multiply_onednn(rows, weight, bias)
    if trained:
        return nn.functional.linear(rows, weight, bias)
    result: torch.Tensor = _FrozenProduct.apply(rows, weight, bias)
    return result


def multiply_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows @ weight.T + bias`` by oneDNN, without gradients.

    Args:
        rows: (R, D), contiguous.
        weight: (K, D), or the same in oneDNN's own layout (:func:`packed`).
        bias: (K).
    """
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def packed(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of a weight (K, D) in oneDNN's own layout, which :func:`multiply_onednn` takes.

    Args:
        weight: The weight.
        rows: Rows that it is going to be multiplied by; other numbers will do.
    """
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return found


def onednn_formats() -> frozenset[torch.dtype]:
    """Number formats in which this build of torch multiplies by oneDNN on this CPU."""
    return _built_for() if torch.backends.mkldnn.enabled else frozenset()


@cache
def _built_for() -> frozenset[torch.dtype]:
    # Operators of torch's own compiler, which are not documented; without them all is as without oneDNN.
    operators = torch.ops.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return frozenset()
    return frozenset({torch.float32, *([torch.bfloat16] if operators._is_mkldnn_bf16_supported() else [])})


class _Product:
    """A linear layer's forward."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        # A compiled layer is made for one state of things.
        way = None if torch.compiler.is_compiling() else _way.get()
        if way is None or not _simple(inputs, layer.weight):
            return nn.functional.linear(inputs, layer.weight, layer.bias)
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        return way(layer, rows).view(*inputs.shape[:-1], layer.weight.shape[0])


def _simple(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether operators may be called directly: a quantized weight is a type of its own, and autocast changes types."""
    plain = type(weight) is nn.Parameter and weight.device.type == inputs.device.type == "cpu"
    return plain and inputs.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")


class _FrozenProduct(torch.autograd.Function):
    """The product by a weight that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return multiply_onednn(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return multiply_onednn(gradients[0].contiguous(), weight.t()), None, None
