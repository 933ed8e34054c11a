"""What a million texts cost here, and what a billion passages would cost on GPUs and in an index's memory.

    python benchmarks/speed/capacity.py

Measured: the built-in model on this machine's cores, float32 and bfloat16, the demonstration's questions as queries and
its passages in pairs as documents, a fixed number of seconds each; then extrapolated, nothing else. FAISS's bytes a
vector are measured on small indexes beside the formulas. Computed: time on H100s from the number of operations, and
memory of indexes from the formulas.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path

import faiss
import numpy as np
import torch

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.files import read_jsonl

MODEL = "llm2vec-gen-smollm2-135m"
BATCH = 64
# H100 SXM, bfloat16 without sparsity, by its data sheet; and the share of it that the arithmetic expects to be used.
H100_FLOPS, MFU = 989e12, 0.4
PASSAGES, PASSAGE_TOKENS = 10**9, 128
# Parameters without embeddings and head (model cards: an embedding pass runs neither as a product), and dimension.
STUDENTS = {
    "Qwen3-0.6B": (0.44e9, 1024),
    "Qwen3-1.7B": (1.4e9, 2048),
    "Qwen3-4B": (3.6e9, 2560),
    "Qwen3-8B": (6.95e9, 4096),
}
GB = 1e9


@dataclass(frozen=True)
class Kind:
    """A kind of index: how many bytes it takes for one vector of D dimensions, and FAISS's name for it."""

    name: str
    formula: str
    bytes_each: Callable[[int], int]
    factory: str


KINDS = (
    Kind("flat, float32", "4 D", lambda d: 4 * d, "Flat"),
    Kind("flat, float16", "2 D", lambda d: 2 * d, "SQfp16"),
    Kind("SQ8", "D", lambda d: d, "SQ8"),
    Kind("HNSW32, float32", "4 D + 4 (2 M) + about 20", lambda d: 4 * d + 4 * 64 + 20, "HNSW32"),
    Kind("IVFPQ, m = 64", "m + 8 (id)", lambda d: 64 + 8, "IVF16,PQ64"),
)


def measure(seconds: float) -> None:
    """Print texts and tokens a second of the built-in model, and hours a million."""
    folder = files("llm2vec_gen_st") / "demo"
    questions = [row["question"] for row in read_jsonl(Path(str(folder / "questions.jsonl")))]
    passages = [row["text"] for row in read_jsonl(Path(str(folder / "passages.jsonl")))]
    pairs = [" ".join(pair) for pair in zip(passages[::2], passages[1::2], strict=False)]
    print(f"## Measured: {MODEL}, {torch.get_num_threads()} threads, batches of {BATCH}, {seconds:.0f} s each\n")
    print("| texts | dtype | tokens a text | texts/s | tokens/s | GFLOP/s | hours a million (extrapolated) |")
    print("|---|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        model = LLM2VecGen(MODEL, device="cpu", model_kwargs={"dtype": dtype})
        inner = sum(parameter.numel() for parameter in model.llm.parameters()) - embedding_weight(model.llm).numel()
        for name, texts, prompt in (("queries", questions, "query"), ("passages", pairs, "document")):
            tokens = np.mean([_tokens(model, text, prompt) for text in texts])
            model.encode(texts[:BATCH], prompt_name=prompt, batch_size=BATCH)
            source, count, start = cycle(texts), 0, time.perf_counter()
            while (spent := time.perf_counter() - start) < seconds:
                model.encode(list(islice(source, BATCH)), prompt_name=prompt, batch_size=BATCH)
                count += BATCH
            rate = count / spent
            print(
                f"| {name} | {dtype} | {tokens:.0f} | {rate:.1f} | {rate * tokens:,.0f} | "
                f"{2 * inner * rate * tokens / 1e9:,.0f} | {1e6 / rate / 3600:.1f} |"
            )
    print(
        "\nTokens count the suffix, and the instruction, though a batch runs it once. GFLOP/s = 2 × parameters × "
        "tokens/s.\n"
    )


def _tokens(model: LLM2VecGen, text: str, prompt: str) -> int:
    seen = model.preview(text, prompt_name=prompt)
    return len(seen.token_ids) + seen.suffix_length


def gpus() -> None:
    """Print what a billion passages take on H100s, by arithmetic."""
    print(f"## Computed: {PASSAGES:,} passages of {PASSAGE_TOKENS} tokens (suffix included) on H100s\n")
    print(
        f"FLOP = 2 × parameters × tokens, without attention's own; {H100_FLOPS / 1e12:.0f} TFLOP/s (bfloat16) at a "
        f"model FLOPs utilization of {MFU:.0%}. Not measured.\n"
    )
    print("| student | parameters | passages/s an H100 | H100 hours | days on 64 | vectors in parts, TB |")
    print("|---|---|---|---|---|---|")
    for name, (parameters, dimension) in STUDENTS.items():
        each = 2 * parameters * PASSAGE_TOKENS
        rate = H100_FLOPS * MFU / each
        hours = PASSAGES / rate / 3600
        print(
            f"| {name} | {parameters / 1e9:.2f} B | {rate:,.0f} | {hours:,.0f} | {hours / 64 / 24:.2f} | "
            f"{4 * dimension * PASSAGES / 1e12:.1f} |"
        )
    print()


def memory() -> None:
    """Print what an index takes, by formula, and what FAISS takes on small ones."""
    count, dimension = 20_000, 256
    vectors = np.random.default_rng(0).normal(size=(count, dimension)).astype(np.float32)
    columns = sorted({dimension for _, dimension in STUDENTS.values()})
    print(f"## Memory of an index over {PASSAGES:,} vectors, GB\n")
    print(
        f"Bytes a vector by formula; beside it what each further vector of {dimension} dimensions adds to a FAISS "
        f"index (measured between {count // 2:,} and {count:,}). Milvus's kinds of these names (FLAT, IVF_SQ8, HNSW, "
        "IVF_PQ) store the same numbers; a server needs room beside them, and each replica needs all of it again.\n"
    )
    print(
        "| kind | bytes a vector | formula at D = 256 | FAISS, measured | "
        + " | ".join(f"D = {d}" for d in columns)
        + " |"
    )
    print("|---|---|---|---|" + "---|" * len(columns))
    for kind in KINDS:
        sizes = []
        index = faiss.index_factory(dimension, kind.factory)
        index.train(vectors)
        for part in np.split(vectors, 2):
            index.add(part)
            sizes.append(len(faiss.serialize_index(index)))
        each = (sizes[1] - sizes[0]) / (count / 2)
        cells = " | ".join(f"{kind.bytes_each(d) * PASSAGES / GB:,.0f}" for d in columns)
        print(f"| {kind.name} | {kind.formula} | {kind.bytes_each(dimension)} | {each:.1f} | {cells} |")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each of the four measurements")
    arguments = parser.parse_args()
    measure(arguments.seconds)
    gpus()
    memory()


if __name__ == "__main__":
    main()
