"""How an LLM multiplies while it writes: with one row a text, far fewer than the layers' matrices have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

# Rows of which W @ x.T is computed faster than x @ W.T; see `benchmarks/speed/few_rows.py`.
_FEW_ROWS = range(8, 33)


@contextmanager
def writing(llm: nn.Module) -> Iterator[None]:
    """While this lasts, an LLM's linear layers suit generation; values are the same up to the order of sums.

    Layers get contiguous rows: generation keeps the last position of a prompt, a strided view, which a linear layer on
    the CPU multiplies as a batch of matrices, and for that torch copies the weight once per row: gigabytes for the LM
    head and a batch of 128. Few rows in float32 on a CPU are multiplied from the other side.

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
    for layer in layers:
        vars(layer)["forward"] = partial(_multiply, layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _multiply(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
    # A quantized weight is a type of its own, which need not know every product.
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
    if plain and len(rows) in _FEW_ROWS:
        found = torch.mm(weight, rows.t()).t().contiguous()
        if bias is not None:
            found = found + bias
    else:
        found = nn.functional.linear(rows, weight, bias)
    return found.view(*inputs.shape[:-1], weight.shape[0])
