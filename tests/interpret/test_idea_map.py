"""The idea's map: coordinates are principal components, and separation is measured on the whole embeddings."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.baselines import mean_pooling
from llm2vec_gen_st.interpret import idea_map
from llm2vec_gen_st.interpret.idea_map import neighbour_agreement

TEXTS = ["bees make honey", "honey and wax", "the nectar of flowers", "rivers carry water", "the sea", "sea ice, seals"]
LABELS = ["hive", "hive", "hive", "water", "water", "ice"]


def unit(vectors: np.ndarray) -> np.ndarray:
    found: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def silhouette_of(row: int, distance: np.ndarray) -> float:
    """How much nearer a row is to its own label than to the next one; 0 where it is the only one of its label."""
    means = {
        name: [distance[row, n] for n, other in enumerate(LABELS) if other == name and n != row] for name in set(LABELS)
    }
    inside = means.pop(LABELS[row])
    outside = min(float(np.mean(values)) for values in means.values())
    return 0.0 if not inside else (outside - float(np.mean(inside))) / max(outside, float(np.mean(inside)))


def test_points_and_numbers_are_those_of_a_plain_computation(student: LLM2VecGen) -> None:
    found = idea_map(student, TEXTS, LABELS, neighbours=2)
    encoders = {
        "mean pooling": mean_pooling(student.backbone, device="cpu").encode(TEXTS),
        "LLM2Vec-Gen": student.encode_query(TEXTS),
    }
    assert [separation.encoder for separation in found.separation] == list(encoders)
    for separation in found.separation:
        vectors = unit(encoders[separation.encoder].astype(np.float64))
        points = [point for point in found.points if point.encoder == separation.encoder]
        assert [(point.text, point.label) for point in points] == list(zip(TEXTS, LABELS, strict=True))
        centred = vectors - vectors.mean(axis=0)
        u, s, _ = np.linalg.svd(centred, full_matrices=False)
        places = np.array([(point.x, point.y) for point in points])
        np.testing.assert_allclose(np.abs(places), np.abs(u[:, :2] * s[:2]), atol=1e-4)
        np.testing.assert_allclose(separation.explained, (s**2 / (s**2).sum())[:2], atol=1e-4)

        distance = 1 - vectors @ vectors.T
        agreement = []
        for row, label in enumerate(LABELS):
            nearest = sorted((n for n in range(6) if n != row), key=distance[row].__getitem__)[:2]
            agreement.append(np.mean([LABELS[n] == label for n in nearest]))
        silhouettes = [silhouette_of(row, distance) for row in range(6)]
        assert separation.silhouette == pytest.approx(np.mean(silhouettes), abs=1e-4)
        assert separation.neighbour_agreement == pytest.approx(np.mean(agreement))


def test_a_run_is_repeated_exactly_and_instructions_reach_the_student_alone(student: LLM2VecGen) -> None:
    first, again = idea_map(student, TEXTS, LABELS), idea_map(student, TEXTS, LABELS)
    assert first == again
    other = idea_map(student, TEXTS, LABELS, prompt_name=None)
    assert other.separation[0] == first.separation[0]
    assert other.separation[1] != first.separation[1]


@given(
    labels=st.lists(st.sampled_from("abc"), min_size=2, max_size=12),
    neighbours=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_agreement_counts_labels_of_other_rows_only(labels: list[str], neighbours: int, seed: int) -> None:
    vectors = unit(np.random.default_rng(seed).normal(size=(len(labels), 4)))
    found = neighbour_agreement(vectors, labels, neighbours)
    shares = []
    for row, label in enumerate(labels):
        others = sorted((n for n in range(len(labels)) if n != row), key=lambda n: -(vectors[row] @ vectors[n]))
        shares.append(np.mean([labels[n] == label for n in others[:neighbours]]))
    assert found == pytest.approx(np.mean(shares))


def test_clusters_and_noise_are_told_apart(student: LLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["a", "b"] * 10
    random = np.random.default_rng(0)
    clusters = np.where(np.array(labels)[:, None] == "a", [[5.0, 0.0, 0.0]], [[0.0, 5.0, 0.0]])
    clusters = (clusters + 0.1 * random.normal(size=(20, 3))).astype(np.float32)
    monkeypatch.setattr(student, "encode", lambda *_, **__: clusters, raising=False)
    found = idea_map(student, [f"text {number}" for number in range(20)], labels)
    assert found.separation[1].silhouette > 0.9
    assert found.separation[1].neighbour_agreement == 1.0
    assert found.separation[0].neighbour_agreement < 1.0


def test_same_embeddings_lie_on_one_point(student: LLM2VecGen) -> None:
    found = idea_map(student, ["bees"] * 4, LABELS[2:])
    assert all(abs(point.x) < 1e-6 and abs(point.y) < 1e-6 for point in found.points)
    assert all(np.isfinite(separation.silhouette) for separation in found.separation)


def test_wrong_arguments_are_named(student: LLM2VecGen) -> None:
    with pytest.raises(ValueError, match="6 texts, 5 classes"):
        idea_map(student, TEXTS, LABELS[:5])
    for labels in (["a"] * 6, list("abcdef")):
        with pytest.raises(ValueError, match="at least 2 classes, and more texts than classes"):
            idea_map(student, TEXTS, labels)
    with pytest.raises(ValueError, match="neighbours must be at least 1"):
        idea_map(student, TEXTS, LABELS, neighbours=0)
    with pytest.raises(TypeError, match="Input 1"):
        idea_map(student, ["a", 3, "c"], ["x", "x", "y"])  # type: ignore[list-item]


def test_records_make_a_table(student: LLM2VecGen) -> None:
    table = pd.DataFrame(idea_map(student, TEXTS, LABELS).points)
    assert list(table.columns) == ["encoder", "text", "label", "x", "y"]
    assert len(table) == 12
