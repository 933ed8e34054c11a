"""What it saves to compute the last layer at the compression positions only.

    python benchmarks/speed/last_layer.py

SmolLM2-135M, mixed texts as in encode.py, float32 and bfloat16; with and without, turn by turn.
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import median

import numpy as np
import torch
from encode import mixed_texts
from one_process import options, raw_arguments, seconds
from peers import report, table

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.modules import suffix_transformer

WAYS = {"all positions": lambda *asked: nullcontext(), "compression positions": suffix_transformer.only_at}


def rows(dtype: str, texts: list[str], repeats: int) -> list[list[str]]:
    """Rows of the table for one number format."""
    model = LLM2VecGen("llm2vec-gen-smollm2-135m", device="cpu", model_kwargs={"dtype": dtype})
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    vectors = {}
    for turn in range(repeats + 1):
        # Each goes first every other time; the first turn warms up.
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            suffix_transformer.only_at = WAYS[way]
            spent, vectors[way] = seconds(lambda: model.encode(texts))
            times[way] += [spent] if turn else []
    base, other = (median(times[way]) for way in WAYS)
    first, second = vectors.values()
    return [
        [dtype, "all positions", f"{base:.2f}", "1.00", ""],
        [dtype, "compression positions", f"{other:.2f}", f"{base / other:.3f}", f"{np.abs(first - second).max():.1e}"],
    ]


def main() -> None:
    """Print the table and write it down."""
    parser = options(__doc__ or "", "last_layer", repeats=7)
    parser.add_argument("--texts", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    texts = mixed_texts(given.texts)
    found = [row for dtype in ("float32", "bfloat16") for row in rows(dtype, texts, given.repeats)]
    heads = ["format", "last layer computed at", "seconds", "speed", "largest difference"]
    said = f"{given.texts} texts; {given.threads} threads, median of {given.repeats}."
    report(given.output, [said, table(heads, found)], {"arguments": raw_arguments(given), "rows": found})


if __name__ == "__main__":
    main()
