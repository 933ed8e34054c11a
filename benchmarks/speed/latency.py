"""Latency of a single query: the built-in student beside HyDE on the same LLM.

    python benchmarks/speed/latency.py

Queries of 10, 50 and 200 words, one at a time, each of them new, with both models warm. HyDE writes one answer of up to
64 tokens, greedily, and encodes query and answer by mean pooling of the same LLM. Systems take turns: between two
queries of HyDE, ours answers many, for the tail of its latencies.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from encode import WORDS
from one_process import options, percentile, raw_arguments, seconds
from peers import report, table, target, targets

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.baselines.hyde import hyde

LENGTHS = (10, 50, 200)
ANSWER_TOKENS = 64


def main() -> None:
    """Measure, and print and write the tables."""
    parser = options(__doc__ or "", "latency")
    parser.add_argument("--ours-per-turn", type=int, default=20, help="queries of ours for each one of HyDE")
    parser.add_argument("--model", default="llm2vec-gen-smollm2-135m")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    chance = random.Random(0)

    def query(words: int) -> str:
        return f"What is meant by {' '.join(chance.choices(WORDS, k=words - 4))}?"

    times: dict[str, dict[int, list[float]]] = {}
    written: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        ours = LLM2VecGen(given.model, device=given.device, model_kwargs={"dtype": dtype})
        peer = hyde(ours.backbone, answers=1, max_new_tokens=ANSWER_TOKENS, temperature=0, device=given.device)
        ways: dict[str, tuple[Callable[[str], Any], int]] = {
            f"ours, {dtype}": (ours.encode_query, given.ours_per_turn),
            f"HyDE, {dtype}": (peer.encode_query, 1),
        }
        for name, (encode, count) in ways.items():
            times[name] = {words: [] for words in LENGTHS}
            for _ in range(min(count, 5)):
                encode(query(LENGTHS[-1]))
        before = peer[0].writer.generated_tokens
        for _ in range(given.repeats):
            for words in LENGTHS:
                for name, (encode, count) in ways.items():
                    times[name][words] += [seconds(partial(encode, query(words)))[0] for _ in range(count)]
        written[dtype] = (peer[0].writer.generated_tokens - before) / given.repeats / len(LENGTHS)
    summarize(given, times, written)


def summarize(given: Any, times: dict[str, dict[int, list[float]]], written: dict[str, float]) -> None:
    """Print and write the tables."""
    rows, held = [], []
    for name, by_length in times.items():
        ours, dtype = name.startswith("ours"), name.split(", ")[1]
        for words, found in by_length.items():
            ratio = median(times[f"HyDE, {dtype}"][words]) / median(found)
            tail = f"{1e3 * percentile(found, 99):,.0f}" if ours else f"{1e3 * max(found):,.0f} (longest)"
            rows.append([name, str(words), str(len(found)), f"{1e3 * median(found):,.0f}", tail, f"{ratio:.1f}"])
            if ours:
                held.append(target(f"HyDE / ours, {dtype}, {words} words (p50)", ratio, 20, at_most=False))
    answers = ", ".join(f"{count:.0f} in {dtype}" for dtype, count in written.items())
    report(
        given.output,
        [
            f"{given.model}, one query at a time, {given.threads} threads. Tokens of HyDE's answers, on average: "
            f"{answers}.",
            table(["system", "words", "queries", "p50, ms", "p99, ms", "HyDE / this (p50)"], rows),
            targets(held),
        ],
        {"arguments": raw_arguments(given), "seconds": times, "answer_tokens": written},
    )


if __name__ == "__main__":
    main()
