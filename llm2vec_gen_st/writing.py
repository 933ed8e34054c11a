"""How an LLM multiplies while it writes: with one row a text, far fewer than the layers' matrices have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llm2vec_gen_st.products import (
    multiply_onednn,
    multiply_quickly,
    multiplying,
    onednn_formats,
    packed,
    prepare_products,
)

# A copy of the weights lives as long as the writing does; that of a large LLM would not fit beside it.
_COPIES_AT_MOST = 1 << 30
# What oneDNN lays the weights out for; other numbers of rows gain too.
_ROWS_EXPECTED = 16


@contextmanager
def writing(llm: nn.Module) -> Iterator[None]:
    """While this lasts, in this thread, an LLM's linear layers suit generation; values change by the order of sums.

    Layers get contiguous rows: generation keeps the last position of a prompt, a strided view, which a linear layer on
    the CPU multiplies as a batch of matrices, and for that torch copies the weight once per row: gigabytes for the LM
    head and a batch of 128. On a CPU with oneDNN each layer of an LLM of at most 1 GiB multiplies by a copy of its
    weight in oneDNN's own layout, from its second product on, where no gradients are asked for; weights must stay as
    they are for so long.

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
    prepare_products(llm)
    size = sum(layer.weight.nbytes for layer in llm.modules() if type(layer) is nn.Linear)
    with multiplying(_PackedProducts() if size <= _COPIES_AT_MOST else multiply_quickly):
        yield


class _PackedProducts:
    """Multiplies by copies of the layers' weights, made when they are used again."""

    def __init__(self) -> None:
        # One product alone, as when a single token is written, is not worth a copy.
        self._copies: dict[nn.Linear, torch.Tensor | None] = {}

    def __call__(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or layer.weight.dtype not in onednn_formats() or not len(rows):
            return multiply_quickly(layer, rows)
        if layer not in self._copies:
            self._copies[layer] = None
            return multiply_quickly(layer, rows)
        weight = self._copies[layer]
        if weight is None:
            weight = self._copies[layer] = packed(layer.weight, _ROWS_EXPECTED)
        return multiply_onednn(rows, weight, layer.bias)
