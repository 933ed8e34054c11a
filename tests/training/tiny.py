"""A recipe and rows for a tiny student."""

from __future__ import annotations

import numpy as np
from datasets import Dataset

from llm2vec_gen_st.training import Recipe

TINY = Recipe(
    thought_tokens=4,
    compression_tokens=4,
    learning_rate=1e-3,
    warmup_steps=0,
    epochs=100,
    batch_size=4,
    dtype="float32",
    logging_steps=1,
    save_steps=1000,
    max_seq_length=128,
    max_response_tokens=48,
)
WIDTH = 12

_PAIRS = [
    ("where do polar bears live?", "Polar bears live on sea ice in the Arctic and hunt seals."),
    ("who makes honey?", "Bees make honey and wax from the nectar of flowers."),
    ("what is a river?", "Rivers carry water from the mountains to the sea."),
    ("write a function", "def add(a, b): return a + b"),
]


def rows(count: int = 16) -> Dataset:
    """Queries, responses, and teacher's vectors that differ from row to row."""
    chosen = [_PAIRS[row % len(_PAIRS)] for row in range(count)]
    return Dataset.from_dict(
        {
            "query": [f"{query} ({row})" for row, (query, _) in enumerate(chosen)],
            "response": [response for _, response in chosen],
            "label": np.random.default_rng(count).normal(size=(count, WIDTH)).tolist(),
        }
    )


def with_negatives(data: Dataset, every: int = 1) -> Dataset:
    """The same rows; every so many of them have a hard negative with a response and its vector."""
    count = len(data)
    vectors = np.random.default_rng(count + 1).normal(size=(count, WIDTH)).tolist()
    has = [row % every == 0 for row in range(count)]
    columns = {
        "negative_query": [f"who hunts seals at night? ({row})" for row in range(count)],
        "negative_response": [f"Nobody hunts seals at night, {row}." for row in range(count)],
        "negative_label": vectors,
    }
    for name, values in columns.items():
        data = data.add_column(name, [value if given else None for value, given in zip(values, has, strict=True)])
    return data
