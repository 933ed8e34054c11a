"""The idea's map: labelled texts under an encoder of what they say, beside the encoder of what would be answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm2vec_gen_st.encoding import as_texts

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

INPUT_CENTRIC, OUTPUT_CENTRIC = "mean pooling", "LLM2Vec-Gen"


@dataclass(frozen=True)
class MapPoint:
    """One text on one encoder's map.

    Args:
        encoder: Name of the encoder.
        text: The text.
        label: Its class.
        x: First principal component.
        y: Second principal component.
    """

    encoder: str
    text: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Separation:
    """How well an encoder keeps the classes apart, measured on the whole embeddings by cosine.

    Args:
        encoder: Name of the encoder.
        silhouette: Mean silhouette, from -1 to 1: how much nearer a text is to its own class than to the next one.
        neighbour_agreement: Share of a text's nearest neighbours that are of its class, from 0 to 1.
        explained: Shares of the variance that the map's two components show.
    """

    encoder: str
    silhouette: float
    neighbour_agreement: float
    explained: tuple[float, float]


@dataclass(frozen=True)
class IdeaMap:
    """Two maps of the same texts.

    Args:
        points: 2 N points, those of the input-centric encoder first.
        separation: One an encoder, in the same order.
    """

    points: list[MapPoint]
    separation: list[Separation]


def idea_map(
    model: LLM2VecGen,
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    prompt_name: str | None = "query",
    neighbours: int = 5,
    batch_size: int = 32,
) -> IdeaMap:
    """Map labelled texts under mean pooling of the plain LLM and under the student (paper, figure 1).

    Mean pooling reads the text alone; the student reads its instruction too. Each map shows the first two principal
    components of an encoder's embeddings, scaled to length 1.

    Args:
        model: The student; mean pooling runs on its LLM.
        texts: N texts.
        labels: N classes.
        prompt_name: Name of the student's instruction.
        neighbours: Nearest neighbours looked at for the agreement; all others if there are fewer.
        batch_size: Texts run at once.

    Returns:
        The points, and how well the classes separate.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If there is not one class a text, there are not 2 to N - 1 classes, or ``neighbours`` is not
            positive.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> found = idea_map(tiny_model(), ["bees", "honey", "a river", "the sea"], ["hive", "hive", "water", "water"])
        >>> [separation.encoder for separation in found.separation], len(found.points)
        (['mean pooling', 'LLM2Vec-Gen'], 8)
    """
    rows = as_texts(list(texts))
    labels = [str(label) for label in labels]
    if len(labels) != len(rows):
        raise ValueError(f"There must be one class a text: {len(rows)} texts, {len(labels)} classes.")
    count = len(set(labels))
    if not 2 <= count < len(rows):
        raise ValueError(
            f"{len(rows)} texts in {count} classes cannot be told apart by class; give at least 2 classes, and more "
            "texts than classes."
        )
    if neighbours < 1:
        raise ValueError(f"neighbours must be at least 1, got {neighbours}.")
    # Not above: the baselines' module builds on the student's, which builds on this folder.
    from llm2vec_gen_st.baselines.pooling import mean_pooling

    pooled = mean_pooling(model.backbone, device=str(model.device)).encode(
        rows, batch_size=batch_size, show_progress_bar=False
    )
    answered = model.encode(rows, prompt_name=prompt_name, batch_size=batch_size, show_progress_bar=False)
    points: list[MapPoint] = []
    separation: list[Separation] = []
    for encoder, vectors in ((INPUT_CENTRIC, pooled), (OUTPUT_CENTRIC, answered)):
        unit = _unit(vectors)
        places, explained = _components(unit)
        points += [
            MapPoint(encoder, text, label, float(x), float(y))
            for text, label, (x, y) in zip(rows, labels, places, strict=True)
        ]
        separation.append(
            Separation(encoder, _silhouette(unit, labels), neighbour_agreement(unit, labels, neighbours), explained)
        )
    return IdeaMap(points, separation)


def neighbour_agreement(unit: np.ndarray, labels: Sequence[str], neighbours: int) -> float:
    """Mean share of each row's nearest other rows that carry its label.

    Args:
        unit: (N, D) vectors of length 1.
        labels: N labels.
        neighbours: Nearest neighbours looked at.

    Example:
        >>> neighbour_agreement(np.eye(2)[[0, 0, 1, 1]], ["a", "a", "b", "b"], 1)
        1.0
    """
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, : min(neighbours, len(unit) - 1)]
    names = np.asarray(labels)
    return float((names[nearest] == names[:, None]).mean())


def _unit(vectors: np.ndarray) -> np.ndarray:
    values = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    unit: np.ndarray = values / np.where(lengths == 0, 1.0, lengths)
    return unit


def _components(unit: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """First two principal components (N, 2), and the shares of the variance that they hold."""
    # A requirement of sentence-transformers; imported here because that takes a while.
    from sklearn.decomposition import PCA

    fitted = PCA(n_components=2, svd_solver="full")
    # Texts that all have the same embedding have no variance to share out.
    with np.errstate(invalid="ignore"):
        places = fitted.fit_transform(unit)
    first, second = np.nan_to_num(fitted.explained_variance_ratio_)
    return places, (float(first), float(second))


def _silhouette(unit: np.ndarray, labels: Sequence[str]) -> float:
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(unit, labels, metric="cosine"))
