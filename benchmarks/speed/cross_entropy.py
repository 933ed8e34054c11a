"""Peak memory and agreement of the chunked cross entropy against full logits, at a large vocabulary.

    python benchmarks/speed/cross_entropy.py

B = 8 responses of 128 tokens, V = 151,936 (the Qwen vocabulary), H = 1,024, float32. Each way runs in a process of
its own, so that its peak resident memory is its own; inputs and head are subtracted as measured before the loss.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from llm2vec_gen_st.losses import chunked_cross_entropy

ROWS, VOCABULARY, HIDDEN = 8 * 128, 151_936, 1024


def measure(way: str) -> dict[str, float | list[float]]:
    """One way in this process: loss, some gradients, and the growth of the peak resident memory in MB."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    functional.cross_entropy(head(hidden[:2]), labels[:2]).backward()
    hidden.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "full":
        loss = functional.cross_entropy(head(hidden), labels, reduction="sum") / ROWS
    else:
        loss = chunked_cross_entropy(hidden, labels, head) / ROWS
    loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert hidden.grad is not None
    return {"loss": float(loss), "gradient": hidden.grad[::64, ::64].flatten().tolist(), "mb": (after - before) / 1024}


def main() -> None:
    """Run both ways and print the comparison."""
    found = {
        way: json.loads(
            subprocess.run([sys.executable, __file__, way], capture_output=True, check=True, text=True).stdout
        )
        for way in ("full", "chunked")
    }
    full, chunked = found["full"], found["chunked"]
    gap = max(abs(a - b) for a, b in zip(full["gradient"], chunked["gradient"], strict=True))
    table = Table("way", "loss", "peak memory of loss and gradient", "share of full")
    for way, values in found.items():
        table.add_row(way, f"{values['loss']:.6f}", f"{values['mb']:,.0f} MB", f"{values['mb'] / full['mb']:.2f}")
    Console(width=100).print(table)
    print(f"loss differs by {abs(full['loss'] - chunked['loss']):.1e}, gradients by at most {gap:.1e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
