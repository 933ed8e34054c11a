"""How time grows: encoding with the number and with the length of texts, searching with the size of a store.

    python benchmarks/speed/growth.py WORK                     # 100 to 10,000 texts; 1,000 to 1,000,000 vectors
    python benchmarks/speed/growth.py WORK --texts 100000      # the curve of texts goes on to 100,000

The number of texts is varied on a tiny random model of two layers, since the built-in one would take hours; what it
shows is everything around the LLM: tokenizing, sorting, batching. The length is varied on the built-in model, one text
at a time. The store is a flat FaissStore of random vectors, which compares a query with each of them; stores are built
in WORK once. Each exponent is the slope of a straight line through the upper half of the points, log over log.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from arithmetic import Shape
from encode import WORDS
from one_process import options, raw_arguments, seconds
from peers import report, table

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.testing import tiny_model

DIMENSION, K, QUERIES = 384, 10, 20
LENGTHS = tuple(2**power for power in range(3, 13))


def main() -> None:
    """Measure, and print, write and plot the curves."""
    parser = options(__doc__ or "", "growth")
    parser.add_argument("work", type=Path, help="folder of the stores")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--build-only", action="store_true", help="only build the stores")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = points(1_000, given.vectors)
    for size in sizes:
        build(given.work, size)
    if given.build_only:
        return
    curves = {
        "number of texts (tiny model)": by_number(points(100, given.texts), given.repeats),
        "tokens of a text (built-in model)": by_length(given.repeats),
        "vectors in a store (one search)": by_size(given.work, sizes),
    }
    rows = [
        [what, f"{xs[0]:,} … {xs[-1]:,}", f"{ys[0]:.3g}", f"{ys[-1]:.3g}", f"{exponent(xs, ys):.2f}"]
        for what, (xs, ys) in curves.items()
    ]
    shape = built_in_shape()
    asked = exponent(LENGTHS, [shape.forward([length]) for length in LENGTHS])
    rows[1][-1] += f" (floating-point operations: {asked:.2f})"
    report(
        given.output,
        [
            f"Median of {given.repeats}, {given.threads} threads; searches: median of {QUERIES} queries.",
            table(["varied", "from … to", "seconds, first", "seconds, last", "exponent"], rows),
            *(
                table([what, "seconds"], [[f"{x:,}", f"{y:.3g}"] for x, y in zip(xs, ys, strict=True)])
                for what, (xs, ys) in curves.items()
            ),
        ],
        {"arguments": {**raw_arguments(given), "work": ""}, "curves": curves},
    )
    plot(curves, given.output.with_suffix(".png"))


def points(least: int, most: int) -> list[int]:
    """About two points a decade, from the least to the most."""
    steps = round(2 * np.log10(most / least))
    return [round(least * 10 ** (step / 2)) for step in range(steps + 1)]


def by_number(numbers: list[int], repeats: int) -> tuple[list[int], list[float]]:
    """Seconds to encode so many texts of 5 to 50 words."""
    model = tiny_model()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 50))) for _ in range(numbers[-1])]
    return numbers, in_turns(lambda number: model.encode(texts[:number]), numbers, repeats)


def by_length(repeats: int) -> tuple[list[int], list[float]]:
    """Seconds to encode one text of so many tokens."""
    model = LLM2VecGen("llm2vec-gen-smollm2-135m", device="cpu")
    model.max_seq_length = LENGTHS[-1] + 100
    texts = {length: " river" * length for length in LENGTHS}
    for length, text in texts.items():
        assert len(model.preview(text).token_ids) == length
    return list(LENGTHS), in_turns(lambda length: model.encode(texts[length]), LENGTHS, repeats)


def built_in_shape() -> Shape:
    """What the floating-point operations of the built-in model depend on."""
    with tempfile.TemporaryDirectory() as folder:
        LLM2VecGen("llm2vec-gen-smollm2-135m", device="cpu").llm.config.save_pretrained(folder)
        return Shape.of(Path(folder))


def by_size(work: Path, sizes: list[int]) -> tuple[list[int], list[float]]:
    """Seconds of one search in stores of so many vectors."""
    from langchain_llm2vec_gen import FaissStore

    queries = np.random.default_rng(1).standard_normal((QUERIES, DIMENSION)).astype(np.float32)
    times = []
    for size in sizes:
        with FaissStore(store_path(work, size), read_only=True) as store:
            store.similarity_search_by_vector(queries[0], K)
            times.append(median(seconds(partial(store.similarity_search_by_vector, query, K))[0] for query in queries))
    return sizes, times


def in_turns(run: Callable[[int], Any], sizes: Any, repeats: int) -> list[float]:
    """Median seconds at each size; sizes take turns, so that all see the same machine."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(repeats + 1):
        for size in sizes:
            took, _ = seconds(partial(run, size))
            if number:  # The first round only warms up.
                times[size].append(took)
    return [median(found) for found in times.values()]


def store_path(work: Path, size: int) -> Path:
    """The store of so many vectors."""
    return work / f"flat-{size}" / "corpus.store"


def build(work: Path, size: int) -> None:
    """A store of random vectors, unless it is there."""
    from langchain_llm2vec_gen import FaissStore

    folder = store_path(work, size).parent
    if (folder / "finished").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    with FaissStore(store_path(work, size), index="flat") as store:
        for start in range(0, size, 50_000):
            count = min(50_000, size - start)
            vectors = chance.standard_normal((count, DIMENSION), dtype=np.float32)
            store.add_embeddings([str(number) for number in range(start, start + count)], vectors)
    (folder / "finished").touch()


def exponent(xs: Any, ys: Any) -> float:
    """Slope through the upper half of the points, log over log."""
    half = upper_half(xs)
    return float(np.polyfit(np.log(xs[half:]), np.log(ys[half:]), 1)[0])


def upper_half(xs: Any) -> int:
    """Where the upper half of the points begins; it has two points at least."""
    return min(len(xs) // 2, len(xs) - 2)


def plot(curves: dict[str, tuple[list[int], list[float]]], path: Path) -> None:
    """Draw the curves, log over log, with the fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.8), layout="constrained")
    for panel, (what, (xs, ys)) in zip(panels, curves.items(), strict=True):
        slope, half = exponent(xs, ys), upper_half(xs)
        upper = np.array(xs[half:])
        height = np.exp(np.mean(np.log(ys[half:]) - slope * np.log(upper)))
        panel.loglog(xs, ys, "o", color="#1f4e79", label="measured")
        panel.loglog(upper, height * upper**slope, "-", color="#c55a11", label=f"exponent {slope:.2f}")
        panel.set_xlabel(what)
        panel.grid(which="major", alpha=0.3)
        panel.legend(frameon=False, loc="upper left")
    panels[0].set_ylabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
