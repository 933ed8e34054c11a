"""Linear layers of SmolLM2-135M by torch, by oneDNN, and by oneDNN on weights in its own layout, turn by turn.

    python benchmarks/speed/few_rows.py
    python benchmarks/speed/few_rows.py --dtype bfloat16

As many matrices of each shape as do not fit into the caches take turns, as the layers of an LLM do. Few rows are those
of generation and short queries, many those of batches. Run it before you trust
``llm2vec_gen_st/products.py`` elsewhere.
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

from llm2vec_gen_st.products import multiply_onednn, onednn_formats, packed

# Of SmolLM2-135M: name, outputs, inputs, number in the LLM.
LAYERS = (
    ("q, o", 576, 576, 60),
    ("k, v", 192, 576, 60),
    ("gate, up", 1536, 576, 60),
    ("down", 576, 1536, 30),
    ("LM head", 49152, 576, 1),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
BYTES_AT_LEAST = 100_000_000


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As torch's linear layers do."""
    return nn.functional.linear(rows, weight)


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
    if dtype not in onednn_formats():
        parser.error(f"torch has no packed products of {given.dtype} on this machine")
    names = ("torch", "oneDNN", "oneDNN, packed")
    total = {(count, way): 0.0 for count in ROWS for way in names}
    speeds: dict[tuple[int, str], str] = {}
    for name, outputs, inputs, number in tqdm(LAYERS, desc="shapes"):
        size = outputs * inputs * dtype.itemsize
        weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(max(2, BYTES_AT_LEAST // size))]
        copies = [packed(weight, 16) for weight in weights]
        ways = ((linear, weights), (multiply_onednn, weights), (multiply_onednn, copies))
        for count in ROWS:
            rows = torch.randn(count, inputs, dtype=dtype)
            times = [[seconds(way, rows, held) for way, held in ways] for _ in range(given.repeats + 1)][1:]
            found = [median(column) for column in zip(*times, strict=True)]
            speeds[count, name] = " / ".join(f"{found[0] / other:.2f}" for other in found[1:])
            for way, value in zip(names, found, strict=True):
                total[count, way] += number * value
    table = Table("rows", *[name for name, *_ in LAYERS], "all layers, ms", "all layers, speed", title=given.dtype)
    for count in ROWS:
        table.add_row(
            str(count),
            *[speeds[count, name] for name, *_ in LAYERS],
            " / ".join(f"{total[count, way] * 1e3:.1f}" for way in names),
            " / ".join(f"{total[count, 'torch'] / total[count, way]:.2f}" for way in names[1:]),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
