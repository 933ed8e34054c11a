"""Forward and backward pass of causal attention by torch's fused kernel and as this package trains, turn by turn.

    python benchmarks/speed/attention.py

Shapes of SmolLM2-135M's training: suffixes of 20 tokens behind texts, and soft prompts before responses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm2vec_gen_st.modules.attention import quick_backward

HEADS, WIDTH = 9, 64
# Rows, their queries, their keys.
SHAPES = ((32, 20, 20), (32, 20, 60), (8, 20, 84), (8, 20, 532), (3, 170, 170), (8, 148, 148))
KERNELS: dict[str, Callable[[torch.Tensor], AbstractContextManager[None]]] = {
    "fused": lambda states: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "ours": quick_backward,
}


def passes(kernel: str, states: list[torch.Tensor]) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    query, key, value = states
    length, seen = query.shape[-2], key.shape[-2]
    mask = None if length == seen else torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
    start = time.perf_counter()
    with KERNELS[kernel](query):
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    between = time.perf_counter()
    found.sum().backward()
    return between - start, time.perf_counter() - between


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = Table("format", "rows, queries, keys", *[f"{name}, ms" for name in KERNELS], "speed of ours")
    for dtype in (torch.float32, torch.bfloat16):
        for rows, length, seen in SHAPES:
            states = [
                torch.randn(rows, HEADS, tokens, WIDTH, dtype=dtype, requires_grad=True)
                for tokens in (length, seen, seen)
            ]
            times = [[passes(kernel, states) for kernel in KERNELS] for _ in range(given.repeats + 1)][1:]
            both = [[median(turn[place][step] for turn in times) for step in (0, 1)] for place in range(len(KERNELS))]
            table.add_row(
                str(dtype).removeprefix("torch."),
                f"{rows}, {length}, {seen}",
                *[f"{forward * 1e3:.2f} + {backward * 1e3:.2f}" for forward, backward in both],
                f"{sum(both[0]) / sum(both[1]):.2f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
