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


def banking77(embed: Embed, folder: Path, per_class: int = 16, seed: int = 42) -> tuple[float, float]:
    """Accuracy of logistic regression on a few examples of each of 77 intents, on the whole test split.

    Returns:
        The accuracy on standardized features, and that on vectors scaled to length 1. The first lets every system use
        all directions of its vectors, the second only those that its cosines see.
    """
    train = list(read_jsonl(folder / "train.jsonl.gz"))
    order = np.random.default_rng(seed).permutation(len(train))
    taken: dict[int, list[dict[str, object]]] = {}
    for position in order:
        chosen = taken.setdefault(int(train[position]["label"]), [])
        if len(chosen) < per_class:
            chosen.append(train[position])
    fit = [row for rows in taken.values() for row in rows]
    test = list(read_jsonl(folder / "test.jsonl"))
    fitted, tested = (embed([str(row["text"]) for row in rows]) for rows in (fit, test))
    scaler = StandardScaler().fit(fitted)
    labels = [row["label"] for row in fit]

    def accuracy(strength: float, prepare: Callable[[np.ndarray], np.ndarray]) -> float:
        model = LogisticRegression(max_iter=2000, C=strength).fit(prepare(fitted), labels)
        return float(np.mean(model.predict(prepare(tested)) == np.array([row["label"] for row in test])))

    return accuracy(0.1, scaler.transform), accuracy(10.0, _unit)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
