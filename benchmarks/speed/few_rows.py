"""Linear layers of SmolLM2-135M for few rows, as in generation: x @ W.T beside W @ x.T, turn by turn.

    python benchmarks/speed/few_rows.py
    python benchmarks/speed/few_rows.py --dtype bfloat16

As many matrices of each shape as do not fit into the caches take turns, as the layers of an LLM do. A second thread on
the machine, or another library for matrix products, may change the picture: run it before you trust the bounds of
``llm2vec_gen_st/writing.py`` elsewhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

# Of SmolLM2-135M: name, outputs, inputs, number in the LLM.
LAYERS = (
    ("q, o", 576, 576, 60),
    ("k, v", 192, 576, 60),
    ("gate, up", 1536, 576, 60),
    ("down", 576, 1536, 30),
    ("LM head", 49152, 576, 1),
)
ROWS = (1, 2, 4, 8, 12, 15, 16, 24, 32, 40, 64)
BYTES_AT_LEAST = 100_000_000


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows from the left, as torch's linear layers do."""
    return nn.functional.linear(rows, weight)


def other_side(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight from the left, and the result laid out as the other's."""
    return torch.mm(weight, rows.t()).t().contiguous()


def seconds(
    way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, weights: list[torch.Tensor]
) -> float:
    """Time of one product."""
    start = time.perf_counter()
    for weight in weights:
        way(rows, weight)
    return (time.perf_counter() - start) / len(weights)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    ways = (linear, other_side)
    total = {(count, way): 0.0 for count in ROWS for way in ways}
    table = Table("rows", *[name for name, *_ in LAYERS], "all layers, ms", "all layers, speed", title=given.dtype)
    speeds: dict[tuple[int, str], float] = {}
    for name, outputs, inputs, number in tqdm(LAYERS, desc="shapes"):
        size = outputs * inputs * dtype.itemsize
        weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(max(2, BYTES_AT_LEAST // size))]
        for count in ROWS:
            rows = torch.randn(count, inputs, dtype=dtype)
            times = [[seconds(way, rows, weights) for way in ways] for _ in range(given.repeats + 1)][1:]
            found = [median(column) for column in zip(*times, strict=True)]
            speeds[count, name] = found[0] / found[1]
            for way, value in zip(ways, found, strict=True):
                total[count, way] += number * value
    for count in ROWS:
        table.add_row(
            str(count),
            *[f"{speeds[count, name]:.2f}" for name, *_ in LAYERS],
            f"{total[count, linear] * 1e3:.1f} / {total[count, other_side] * 1e3:.1f}",
            f"{total[count, linear] / total[count, other_side]:.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
