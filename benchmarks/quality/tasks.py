"""The sets on which the built-in models are chosen and reported; each takes any function from texts to vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler

from llm2vec_gen_st.files import read_jsonl

Embed = Callable[[Sequence[str]], np.ndarray]


def sts(embed: Embed, file: Path, most: int | None = None) -> float:
    """Spearman correlation of cosine similarities with the gold scores of sentence pairs."""
    rows = list(read_jsonl(file))[:most]
    first, second = (_unit(embed([row[key] for row in rows])) for key in ("sentence1", "sentence2"))
    return float(spearmanr((first * second).sum(axis=1), [row["score"] for row in rows]).statistic)


def banking77(
    embed: Embed, folder: Path, split: str = "test", *, per_class: int = 16, most: int = 1500, seed: int = 42
) -> dict[str, float]:
    """Accuracy of logistic regression on a few examples of each of 77 intents, for three ways of taking the vectors.

    Args:
        embed: Texts to vectors.
        folder: Holds ``train.jsonl.gz`` and ``test.jsonl``.
        split: ``test``, all of it; or ``train``, up to ``most`` rows that were not fitted: for choices.
        per_class: Examples of each intent that are fitted.
        most: Rows of the training split that are scored.
        seed: Chooses the fitted examples.

    Returns:
        Accuracy on the vectors as they are, by the classifier of MTEB (C = 1, 100 iterations); on standardized vectors
        (C = 0.1); and on vectors of unit length (C = 10). The last two C are near the best for mean pooling and
        all-MiniLM-L6-v2 on the training split, except unit length for mean pooling, whose vectors lie so close together
        there that it would need a C of 100.
    """
    train = list(read_jsonl(folder / "train.jsonl.gz"))
    taken: dict[int, list[dict[str, object]]] = {}
    others: list[dict[str, object]] = []
    for position in np.random.default_rng(seed).permutation(len(train)):
        chosen = taken.setdefault(int(train[position]["label"]), [])
        (chosen if len(chosen) < per_class else others).append(train[position])
    fit = [row for rows in taken.values() for row in rows]
    scored = list(read_jsonl(folder / "test.jsonl")) if split == "test" else others[:most]
    fitted, found = (embed([str(row["text"]) for row in rows]) for rows in (fit, scored))
    labels, wanted = ([row["label"] for row in rows] for rows in (fit, scored))
    ways = {
        "as given": make_pipeline(LogisticRegression(max_iter=100)),
        "standardized": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, C=0.1)),
        "unit length": make_pipeline(Normalizer(), LogisticRegression(max_iter=2000, C=10)),
    }
    return {way: float(model.fit(fitted, labels).score(found, wanted)) for way, model in ways.items()}


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
