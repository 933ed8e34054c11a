"""The sets on which the built-in models are chosen and reported; each takes any function from texts to vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from llm2vec_gen_st.files import read_jsonl

Embed = Callable[[Sequence[str]], np.ndarray]


def sts(embed: Embed, file: Path, most: int | None = None) -> float:
    """Spearman correlation of cosine similarities with the gold scores of sentence pairs."""
    rows = list(read_jsonl(file))[:most]
    first, second = (_unit(embed([row[key] for row in rows])) for key in ("sentence1", "sentence2"))
    return float(spearmanr((first * second).sum(axis=1), [row["score"] for row in rows]).statistic)


def banking77(embed: Embed, folder: Path, per_class: int = 16, seed: int = 42) -> float:
    """Accuracy of logistic regression on a few examples of each of 77 intents, on the whole test split."""
    train = list(read_jsonl(folder / "train.jsonl.gz"))
    order = np.random.default_rng(seed).permutation(len(train))
    taken: dict[int, list[dict[str, object]]] = {}
    for position in order:
        chosen = taken.setdefault(int(train[position]["label"]), [])
        if len(chosen) < per_class:
            chosen.append(train[position])
    fit = [row for rows in taken.values() for row in rows]
    test = list(read_jsonl(folder / "test.jsonl"))
    scaler = StandardScaler().fit(fitted := embed([str(row["text"]) for row in fit]))
    model = LogisticRegression(max_iter=2000, C=0.1)
    model.fit(scaler.transform(fitted), [row["label"] for row in fit])
    found = model.predict(scaler.transform(embed([str(row["text"]) for row in test])))
    return float(np.mean(found == np.array([row["label"] for row in test])))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
