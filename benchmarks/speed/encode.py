"""Embedding texts of mixed lengths: this package, the authors' package and the host's plain pooling, turn by turn.

    python benchmarks/speed/encode.py                          # 512 texts
    python benchmarks/speed/encode.py --texts 32 --repeats 1

Texts of 5 to 200 words through the built-in model. The authors' ``encode`` makes no batches of its own, so it is
measured in one call and in calls of as many texts as our batches have. MFU is the share of the machine's measured
matrix-product peak that a forward pass over the texts and their suffixes, without any padding, amounts to.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from arithmetic import Shape
from peers import Peers, Worker, arguments, in_turns, median, peak, report, settings, start, table, target, targets

SUFFIX = 20
_WORDS = """
the a of and to in is it that for on with as was at by from or an be this which river mountain winter harvest engine
letter market teacher village copper window journey garden science evening captain library because between carries
remains slowly always often nothing question answer number history weather kitchen morning second smaller yellow
broken careful expensive ancient several people water music island bread paper stone temperature government
instrument construction explanation neighbour understand remember measure describe protocol catalyst molecule
parliament photosynthesis theorem orchestra migration vaccine algorithm
"""
WORDS = _WORDS.split()


def mixed_texts(count: int) -> list[str]:
    """Texts of 5 to 200 words that mean nothing.

    Args:
        count: How many.

    Returns:
        The texts, the same in every run.
    """
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=chance.randint(5, 200))).capitalize() + "." for _ in range(count)]


def main() -> None:
    """Measure, and print and write the tables."""
    parser = arguments(__doc__ or "", "encode")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    peers = Peers(given.work, given.threads)
    texts = mixed_texts(given.texts)
    with ExitStack() as stack:
        ours, ours_bf16, pooling = (stack.enter_context(peers.ours(name)) for name in ("fp32", "bf16", "pooling"))
        theirs, theirs_batched = (stack.enter_context(peers.theirs(name)) for name in ("theirs", "theirs-batched"))
        peaks = {
            dtype: ours.ask("matmul_peak", dtype=dtype, sizes=[512, 1024, 2048], seconds=1.0)["gflops"]
            for dtype in ("float32", "bfloat16")
        }
        ours.ask("load")
        ours_bf16.ask("load", dtype="bfloat16")
        pooling.ask("load_pooling", base=str(peers.base))
        attention = {theirs.ask("load", checkpoint=str(peers.checkpoint))["attention"]}
        attention.add(theirs_batched.ask("load", checkpoint=str(peers.checkpoint))["attention"])
        counts = ours.ask("token_counts", texts=texts)["counts"]
        pooled = pooling.ask("token_counts", texts=texts)["counts"]

        systems: dict[str, tuple[Worker, int]] = {
            "ours, float32": (ours, given.batch_size),
            "ours, bfloat16": (ours_bf16, given.batch_size),
            "theirs, one call": (theirs, len(texts)),
            f"theirs, calls of {given.batch_size}": (theirs_batched, given.batch_size),
            "host's mean pooling, float32": (pooling, given.batch_size),
        }
        files = {name: str(given.work / f"vectors-{number}.npy") for number, name in enumerate(systems)}
        for name, (worker, _) in systems.items():
            worker.ask("encode", texts=texts[:2], batch_size=2, vectors=files[name])
        runs = in_turns(
            {
                name: partial(worker.ask, "encode", texts=texts, batch_size=size, vectors=files[name])
                for name, (worker, size) in systems.items()
            },
            given.repeats,
        )
    vectors = {name: np.load(file) for name, file in files.items()}
    parts, raw = summarize(given, Shape.of(peers.base), counts, pooled, peaks, runs, vectors)
    report(given.output, parts, {**raw, "attention": sorted(attention)})


def summarize(
    given: Any,
    shape: Shape,
    counts: list[int],
    pooled: list[int],
    peaks: dict[str, float],
    runs: dict[str, list[dict[str, Any]]],
    vectors: dict[str, np.ndarray],
) -> tuple[list[str], dict[str, Any]]:
    """The text, and what it was made of."""
    ours, bf16, one_call, batched, host = runs
    read = {name: sum(counts) + SUFFIX * len(counts) for name in runs} | {host: sum(pooled)}
    useful = dict.fromkeys(runs, shape.forward(count + SUFFIX for count in counts)) | {host: shape.forward(pooled)}
    seconds = {name: median(found) for name, found in runs.items()}
    memory = {name: peak(found) for name, found in runs.items()}
    mfu = {name: useful[name] / seconds[name] / 1e9 / peaks["bfloat16" if name == bf16 else "float32"] for name in runs}
    rows = [
        [
            name,
            f"{seconds[name]:.2f}",
            f"{seconds[one_call] / seconds[name]:.2f}",
            f"{memory[name]:,.0f}",
            f"{start(runs[name]):,.0f}",
            f"{memory[name] / memory[one_call]:.2f}",
            f"{read[name] / seconds[name]:,.0f}",
            f"{mfu[name]:.2f}",
        ]
        for name in runs
    ]
    heads = [
        "way",
        "seconds",
        "speed",
        "peak memory, MB",
        "before, MB",
        "share of theirs",
        "tokens/s",
        "MFU of useful tokens",
    ]
    agreement = [
        ["ours, float32, and theirs", *agree(vectors[ours], vectors[one_call])],
        ["theirs in one call, and in calls", *agree(vectors[one_call], vectors[batched])],
        ["ours, float32 and bfloat16", *agree(vectors[ours], vectors[bf16])],
    ]
    per_token = (seconds[host] / read[host]) / (seconds[ours] / read[ours])
    held = [
        target("speed at float32 / theirs, one call", seconds[one_call] / seconds[ours], 1.8, at_most=False),
        target("speed at float32 / theirs, in calls", seconds[batched] / seconds[ours], 1.8, at_most=False),
        target("speed at bfloat16 / theirs, one call", seconds[one_call] / seconds[bf16], 4, at_most=False),
        target("speed at bfloat16 / theirs, in calls", seconds[batched] / seconds[bf16], 4, at_most=False),
        target("peak memory at float32 / theirs, one call", memory[ours] / memory[one_call], 0.5, at_most=True),
        target("peak memory at float32 / theirs, in calls", memory[ours] / memory[batched], 0.5, at_most=True),
        target("MFU of useful tokens, float32", mfu[ours], 0.8, at_most=False),
        target("MFU of useful tokens, bfloat16", mfu[bf16], 0.65, at_most=False),
        target("speed per token / host's pooling", per_token, 0.95, at_most=False),
    ]
    parts = [
        f"{len(counts)} texts of {min(counts)} to {max(counts)} tokens, {sum(counts):,} in all, and {SUFFIX} of suffix "
        f"each; {given.threads} threads, median of {given.repeats}. Peak of matrix products: "
        f"{peaks['float32']:.0f} GFLOP/s in float32, {peaks['bfloat16']:.0f} in bfloat16.",
        table(heads, rows),
        table(["vectors of", "largest difference", "smallest cosine", "mean cosine"], agreement),
        targets(held),
    ]
    raw = {"arguments": settings(given), "peaks": peaks, "runs": runs}
    return parts, {**raw, "tokens": read, "flops": useful}


def agree(one: np.ndarray, other: np.ndarray) -> list[str]:
    """Largest difference of a value, and smallest and mean cosine, of two systems' vectors (N, D) at length 1."""
    one, other = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (one, other))
    cosines = (one * other).sum(axis=1)
    return [f"{np.abs(one - other).max():.1e}", f"{cosines.min():.6f}", f"{cosines.mean():.6f}"]


if __name__ == "__main__":
    main()
