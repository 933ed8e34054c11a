"""One training step with both losses: this package and the authors', turn by turn.

    python benchmarks/speed/train_step.py                    # queries of 64 and of 512 tokens
    python benchmarks/speed/train_step.py --queries 64 --repeats 1

B = 8, responses of 128 tokens, float32, the built-in model as start: forward, backward and a step of AdamW, from token
ids to updated parameters. Every row starts from the same parameters and sees the same batch in every step, and their
step is what their training script does with their package. Their default is gradient checkpointing of encoder and
decoder; ours checkpoints the reconstruction pass if asked to.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

from arithmetic import Shape
from encode import SUFFIX
from peers import Peers, arguments, in_turns, median, peak, report, settings, start, table, target, targets

BATCH, RESPONSE, PROMPT, DIMENSION, RATE = 8, 128, 10, 384, 1e-6
OURS, OURS_CHECKPOINTED = "ours", "ours, reconstruction checkpointed"
THEIRS, THEIRS_PLAIN = "theirs (checkpointed)", "theirs, without checkpointing"
WAYS = {OURS: False, OURS_CHECKPOINTED: True, THEIRS: True, THEIRS_PLAIN: False}
BOUNDS = {64: 0.6, 512: 0.4}


def batch(query: int) -> dict[str, Any]:
    """Ids of queries and responses, drawn from ordinary tokens, and teacher embeddings of length 1.

    Args:
        query: Tokens of each query.
    """
    chance = random.Random(0)
    teacher = [[chance.gauss(0, DIMENSION**-0.5) for _ in range(DIMENSION)] for _ in range(BATCH)]
    return {
        "query": [[chance.randrange(100, 40_000) for _ in range(query)] for _ in range(BATCH)],
        "response": [[chance.randrange(100, 40_000) for _ in range(RESPONSE)] for _ in range(BATCH)],
        "teacher": teacher,
    }


def main() -> None:
    """Measure, and print and write the tables."""
    parser = arguments(__doc__ or "", "train_step")
    parser.add_argument("--queries", type=int, nargs="+", default=[64, 512], help="tokens of a query")
    given = parser.parse_args()
    peers = Peers(given.work, given.threads)
    with peers.ours("peak") as worker:
        gflops = worker.ask("matmul_peak", dtype="float32", sizes=[512, 1024, 2048], seconds=1.0)["gflops"]
    shape = Shape.of(peers.base)
    parts = [
        f"B = {BATCH}, responses of {RESPONSE} tokens, suffix of {SUFFIX}, float32; {given.threads} threads, median of "
        f"{given.repeats}. Peak of matrix products: {gflops:.0f} GFLOP/s."
    ]
    found: dict[str, Any] = {}
    held: list[list[str]] = []
    for query in given.queries:
        runs = measure(peers, query, given.repeats)
        found[str(query)] = runs
        least = shape.training_step(BATCH, query, SUFFIX, PROMPT, RESPONSE) / gflops / 1e9
        again = shape.reconstruction_again(BATCH, PROMPT, RESPONSE) / gflops / 1e9
        parts += [
            f"### Queries of {query} tokens",
            f"Arithmetic minimum at that peak: {least:.2f} s, {least + again:.2f} s with the reconstruction's forward "
            "pass run again.",
            summary(runs, least),
        ]
        held += held_against(query, runs)
    parts += ["### Targets", targets(held)]
    raw = {"arguments": settings(given), "gflops": gflops, "runs": found}
    report(given.output, parts, raw)


def measure(peers: Peers, query: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Runs of every way; the first step of each, which also allocates the optimizer's state, is not among them."""
    # At this length their default alone is compared.
    ways = [way for way in WAYS if query <= 128 or way != THEIRS_PLAIN]
    with ExitStack() as stack:
        workers = {}
        first = {}
        for number, way in enumerate(ways):
            if way.startswith("ours"):
                worker = stack.enter_context(peers.ours(f"train-{number}"))
                worker.ask("load")
            else:
                worker = stack.enter_context(peers.theirs(f"train-{number}"))
                worker.ask("load", checkpoint=str(peers.checkpoint))
            worker.ask("prepare_step", **batch(query), checkpointing=WAYS[way], rate=RATE)
            first[way] = worker.ask("step")
            workers[way] = worker
        runs = in_turns({way: lambda worker=worker: worker.ask("step") for way, worker in workers.items()}, repeats)
    return {way: [{**first[way], "first": True}, *found] for way, found in runs.items()}


def summary(runs: dict[str, list[dict[str, Any]]], least: float) -> str:
    """The table of one length of queries, with losses of the first and the last step as proof of equal work."""
    base = median(runs[THEIRS][1:])
    largest = peak(runs[THEIRS])
    rows = []
    for way, found in runs.items():
        seconds = median(found[1:])
        rows.append(
            [
                way,
                f"{seconds:.2f}",
                f"{seconds / base:.2f}",
                f"{seconds / least:.2f}",
                f"{peak(found):,.0f}",
                f"{start(found):,.0f}",
                f"{peak(found) / largest:.2f}",
                *(f"{step['reconstruction']:.5f} + {step['alignment']:.6f}" for step in (found[0], found[-1])),
            ]
        )
    heads = ["way", "seconds", "time / theirs", "time / minimum", "peak memory, MB", "before, MB", "memory / theirs"]
    return table([*heads, "losses, first step", "losses, last step"], rows)


def held_against(query: int, runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """The targets of one length of queries."""
    time = {way: median(found[1:]) / median(runs[THEIRS][1:]) for way, found in runs.items()}
    memory = {way: peak(found) / peak(runs[THEIRS]) for way, found in runs.items()}
    rows = []
    if query in BOUNDS:
        rows.append(target(f"time / theirs, query {query}", time[OURS], BOUNDS[query], at_most=True))
    if query == 64:
        rows += [
            target("memory / theirs, query 64", memory[OURS], 0.9, at_most=True),
            target("time / theirs, query 64, checkpointed", time[OURS_CHECKPOINTED], 0.85, at_most=True),
            target("memory / theirs, query 64, checkpointed", memory[OURS_CHECKPOINTED], 0.55, at_most=True),
        ]
    return rows


if __name__ == "__main__":
    main()
