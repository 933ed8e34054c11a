"""How an LLM multiplies while it writes: with one row a text, far fewer than the layers' matrices have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

# Rows of which W @ x.T is computed faster than x @ W.T; see `benchmarks/speed/few_rows.py`.
_FEW_ROWS = range(8, 33)
# A copy of the weights lives as long as the writing does; that of a large LLM would not fit beside it.
_COPIES_AT_MOST = 1 << 30
# What oneDNN lays the weights out for; other numbers of rows gain too.
_ROWS_EXPECTED = 16


@contextmanager
def writing(llm: nn.Module) -> Iterator[None]:
    """While this lasts, an LLM's linear layers suit generation; values are the same up to the order of sums.

    Layers get contiguous rows: generation keeps the last position of a prompt, a strided view, which a linear layer on
    the CPU multiplies as a batch of matrices, and for that torch copies the weight once per row: gigabytes for the LM
    head and a batch of 128. On a CPU with oneDNN each layer of an LLM of at most 1 GiB multiplies by a copy of its
    weight in oneDNN's own layout, from its second product on, where no gradients are asked for; weights must stay as
    they are for so long. Elsewhere, few rows in float32 are multiplied from the other side.

    Args:
        llm: The causal LM.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> llm, ids = tiny_backbone().llm, torch.ones(9, 1, dtype=torch.long)
        >>> plain = llm(ids).logits
        >>> with writing(llm):
        ...     torch.allclose(llm(ids).logits, plain, atol=1e-5)
        True
    """
    # Those with a forward of their own have one from another library (hooks of a device map), or from another thread.
    layers = [layer for layer in llm.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    packs = sum(layer.weight.nbytes for layer in layers if _packable(layer.weight)) <= _COPIES_AT_MOST
    for layer in layers:
        vars(layer)["forward"] = _Product(layer, packs=packs and _packable(layer.weight))
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class _Product:
    """A linear layer's forward while its LLM writes."""

    def __init__(self, layer: nn.Linear, *, packs: bool) -> None:
        self.layer = layer
        self.packs = packs
        self.used = False
        self.packed: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        if self.packs and not torch.is_grad_enabled():
            # One product alone, as when a single token is written, is not worth a copy.
            if self.packed is None and self.used:
                self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED)
            self.used = True
        if self.packed is not None and not torch.is_grad_enabled() and rows.dtype == weight.dtype:
            found = torch.ops.mkldnn._linear_pointwise(rows, self.packed, bias, "none", [], "")
        elif _plain(weight) and weight.dtype == torch.float32 and len(rows) in _FEW_ROWS:
            found = torch.mm(weight, rows.t()).t().contiguous()
            if bias is not None:
                found = found + bias
        else:
            found = nn.functional.linear(rows, weight, bias)
        return found.view(*inputs.shape[:-1], weight.shape[0])


def _plain(weight: torch.Tensor) -> bool:
    """Whether every product knows a weight: a quantized one is a type of its own, which need not."""
    return type(weight) is nn.Parameter and weight.device.type == "cpu"


def _packable(weight: torch.Tensor) -> bool:
    return _plain(weight) and weight.dtype in _packed_formats()


@cache
def _packed_formats() -> frozenset[torch.dtype]:
    """Number formats in which this build of torch, on this CPU, multiplies by weights in oneDNN's layout."""
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return frozenset()
    formats = {torch.float32}
    if operators._is_mkldnn_bf16_supported():
        formats.add(torch.bfloat16)
    return frozenset(formats)
