"""Searching a store: scores and filters, for every kind of index."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.load import dumps
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import vector_index
from langchain_llm2vec_gen.store.metrics import relevance

from .stores import KINDS, METRICS, exact, filled, found, names, normal

# Scores


@pytest.mark.parametrize("index", KINDS)
def test_cosine_looks_at_the_angle_alone(path: Path, index: str) -> None:
    with FaissStore(path, index=index) as store:
        store.add_embeddings(["A", "B"], [[0.1, 0], [0.5, 0.5]], ids=["A", "B"])
        first, second = store.similarity_search_with_score_by_vector([1, 0])
        assert (first[0].id, second[0].id) == ("A", "B")
        assert first[1] == pytest.approx(1.0)
        assert second[1] == pytest.approx(math.sqrt(0.5))
        opposite = store.similarity_search_with_score_by_vector([-1, 0])
        assert [document.id for document, _ in opposite] == ["B", "A"]
        assert [score for _, score in opposite] == pytest.approx([-math.sqrt(0.5), -1.0])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", KINDS)
def test_zero_vectors_have_finite_scores(path: Path, index: str, metric: str) -> None:
    with FaissStore(path, index=index, metric=metric) as store:
        store.add_embeddings(["nothing", "something"], [[0, 0], [3, 4]])
        for query in ([0, 0], [1, 1]):
            scores = [score for _, score in store.similarity_search_with_score_by_vector(query)]
            assert len(scores) == 2
            assert all(map(math.isfinite, scores))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", KINDS)
def test_scores_are_those_of_the_definition_and_fall(path: Path, index: str, metric: str) -> None:
    vectors, query = normal(100, 8), normal(8, seed=1)
    with filled(path, vectors, index=index, metric=metric) as store:
        hits = store.similarity_search_with_score_by_vector(query, k=100)
    scores = exact(vectors, query, metric)
    assert [document.id for document, _ in hits] == [f"d{row}" for row in np.argsort(-scores)]
    np.testing.assert_allclose([score for _, score in hits], -np.sort(-scores), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_relevance_is_in_0_to_1_and_falls_with_rank(path: Path, metric: str, toy: Callable[..., Any]) -> None:
    vectors = {"q": [1, 0], "same": [1, 0], "near": [0.9, 0.3], "far": [-0.2, 1], "opposite": [-1, 0]}
    store = FaissStore.from_texts(list(vectors)[1:], toy(vectors), path=path, metric=metric)
    hits = store.similarity_search_with_relevance_scores("q", k=4)
    assert [document.page_content for document, _ in hits] == ["same", "near", "far", "opposite"]
    scores = [score for _, score in hits]
    assert all(0 <= score <= 1 for score in scores)
    assert all(one > next for one, next in pairwise(scores))
    kept = store.similarity_search_with_relevance_scores("q", k=4, score_threshold=(scores[1] + scores[2]) / 2)
    assert [document.page_content for document, _ in kept] == ["same", "near"]
    retriever = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"k": 4, "score_threshold": scores[0] - 1e-6}
    )
    assert [document.page_content for document in retriever.invoke("q")] == ["same"]
    assert [document.page_content for document in asyncio.run(retriever.ainvoke("q"))] == ["same"]


def test_relevance_of_large_inner_products_tells_them_apart(path: Path, toy: Callable[..., Any]) -> None:
    products = [-1e6, -1000.0, -40.0, -1.0, 0.0, 1.0, 37.0, 38.0, 100.0, 101.0, 1000.0, 1e6]
    scores = [relevance(product, "ip") for product in products]
    assert all(0 < one < next < 1 for one, next in pairwise(scores))
    assert scores[4] == 0.5
    vectors = {"q": [10.0, 0.0], "near": [10.0, 0.0], "less": [9.0, 0.0], "far": [1.0, 9.0]}
    store = FaissStore.from_texts(list(vectors)[1:], toy(vectors), path=path, metric="ip")
    retriever = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": relevance(95.0, "ip")}
    )
    assert [document.page_content for document in retriever.invoke("q")] == ["near"]


def test_results_are_plain_numbers_with_ids(path: Path, hashing: Any) -> None:
    store = FaissStore.from_texts(["a", "b"], hashing, [{"n": 1}, {}], path=path)
    hits = store.similarity_search_with_score("a")
    for document, score in hits:
        assert type(score) is float
        assert isinstance(document.id, str)
        assert document == store.get_by_ids([document.id])[0]
    assert json.loads(json.dumps([[document.model_dump(), score] for document, score in hits]))
    assert dumps([document for document, _ in hits])
    assert all(document.id for document in store.max_marginal_relevance_search("a"))
    assert json.dumps(store.stats())
    assert json.dumps(store.explain(filter={"n": 1}))


@pytest.mark.parametrize("k", [0, 1, 3, 50])
@pytest.mark.parametrize("index", KINDS)
def test_as_many_results_as_asked_for_or_all(path: Path, index: str, k: int) -> None:
    with filled(path, normal(90, 8), index=index) as store:
        assert len(found(store, normal(8), k)) == k
        assert len(set(found(store, normal(8), 1000))) == 90


@pytest.mark.parametrize("index", KINDS)
def test_numbers_of_numpy_are_numbers(path: Path, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_SCAN_FROM_FILE", 0)
    monkeypatch.setattr(vector_index, "_SCAN_FROM_MEMORY", 0)
    k: Any = np.int64(3)
    with filled(path, normal(90, 8), [{"n": row} for row in range(90)], index=index) as store:
        for filter in (None, {"n": {"$gte": 3}}, {"n": {"$gte": np.int64(3)}}):
            expected = found(store, normal(8), 3, filter=filter)
            assert found(store, normal(8), k, filter=filter) == expected
            assert len(expected) == 3
            assert len(store.max_marginal_relevance_search_by_vector(normal(8), k, np.int64(9), filter=filter)) == 3
        with pytest.raises(TypeError, match=r"whole number, got 2\.5"):
            found(store, normal(8), 2.5)  # type: ignore[arg-type]


def test_k_must_not_be_negative(path: Path) -> None:
    with filled(path, normal(3, 8)) as store, pytest.raises(ValueError, match="-1"):
        found(store, normal(8), -1)


def test_an_inverted_file_returns_k_documents_though_it_looks_into_few_lists(path: Path) -> None:
    with filled(path, normal(1300, 8), index="IVF32,Flat") as store:
        assert store.stats()["indexed"] == 1300
        hits = store.similarity_search_with_score_by_vector(normal(8, seed=2), k=1300)
    assert len({document.id for document, _ in hits}) == 1300
    scores = [score for _, score in hits]
    assert scores == sorted(scores, reverse=True)


def test_a_graph_returns_k_documents_though_most_are_deleted(path: Path) -> None:
    vectors = normal(900, 8)
    with filled(path, vectors, index="hnsw") as store:
        store.delete(names(880))
        for row in range(40):
            assert set(found(store, -vectors[row], 20)) == {f"d{number}" for number in range(880, 900)}


# Filters


@pytest.mark.parametrize("selector", [False, True])
@pytest.mark.parametrize(
    ("index", "count"), [("flat", 10_000), ("IVF16,Flat", 10_000), ("ivf", 10_000), ("hnsw", 10_000)]
)
def test_filters_come_before_the_nearest(
    path: Path, index: str, count: int, selector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if selector:
        monkeypatch.setattr(vector_index, "_SCAN_FROM_MEMORY", 0)
        monkeypatch.setattr(vector_index, "_SCAN_FROM_FILE", 0)
    vectors, query = normal(count, 8), normal(8, seed=1)
    order = np.argsort(-exact(vectors, query, "cosine"))
    farthest = set(order[-10:].tolist())
    metadatas = [{"tag": "A" if row in farthest else "B"} for row in range(count)]
    with filled(path, vectors, metadatas, index=index) as store:
        assert store.stats()["indexed"] == count
        if index != "flat":
            assert store.explain(5, {"tag": "A"})["strategy"] == ("selector" if selector else "scan")
        assert found(store, query, 5, filter={"tag": "A"}) == [f"d{row}" for row in order[-10:-5]]
        assert found(store, query, 50, filter={"tag": "A"}) == [f"d{row}" for row in order[-10:]]
        assert found(store, query, 5, filter={"tag": "C"}) == []
        mmr = store.max_marginal_relevance_search_by_vector(query, k=20, fetch_k=3, filter={"tag": "A"})
        assert {str(document.id) for document in mmr} == {f"d{row}" for row in farthest}


def test_a_wide_filter_on_an_exact_index_gives_the_exact_results(path: Path) -> None:
    vectors, query = normal(3000, 8), normal(8, seed=1)
    with filled(path, vectors, [{"n": row} for row in range(3000)]) as store:
        assert store.explain(10, {"n": {"$gte": 1000}})["strategy"] == "selector"
        order = 1000 + np.argsort(-exact(vectors[1000:], query, "cosine"))
        assert found(store, query, 10, filter={"n": {"$gte": 1000}}) == [f"d{row}" for row in order[:10]]


@pytest.mark.parametrize(
    "filter",
    [
        {"a": {"$regex": "x"}},
        {"$nor": [{"a": 1}]},
        {"a": {"$gt": 1, "b": 2}},
        {"a": {"b": {"$like": 1}}},
        {"a": {"$in": "text"}},
        {"a": {"$gt": None}},
        {"a": {"$gt": True}},
        {"a": [1, 2]},
        {"a": {}},
        {"$and": []},
        {"$or": {"a": 1}},
        {"a..b": 1},
        {1: 2},
        {"a": {"$exists": 1}},
        {"a": object()},
        {"a": float("nan")},
        {"a": 2**64},
        {'a"b': 1},
        {"a\0b": 1},
        {"a\nb": 1},
        {"a": "\ud800"},
        [("a", 1)],
        "a = 1",
    ],
)
def test_filters_that_mean_nothing_raise_everywhere(path: Path, filter: Any) -> None:
    with filled(path, normal(3, 8), [{"a": 1}] * 3) as store:
        for ask in (
            lambda: store.similarity_search_by_vector(normal(8), filter=filter),
            lambda: store.max_marginal_relevance_search_by_vector(normal(8), filter=filter),
            lambda: store.ids(filter),
            lambda: store.explain(filter=filter),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                ask()
    with FaissStore(path.with_name("empty.store")) as store, pytest.raises(ValueError, match=r"\w"):
        store.similarity_search_by_vector(normal(8), filter=filter)


def test_filters_with_thousands_of_values(path: Path) -> None:
    with filled(path, normal(50, 8), [{"name": f"n{row}", "n": row} for row in range(50)]) as store:
        assert store.ids({"name": {"$in": [f"n{row}" for row in range(40, 40_000)]}}) == names(50)[40:]
        assert store.ids({"n": {"$nin": list(range(40, 40_000))}}) == names(40)
        assert store.ids({"$or": [{"n": row} for row in range(48, 1500)]}) == names(50)[48:]


def test_filters_through_a_retriever(path: Path, hashing: Any) -> None:
    store = FaissStore.from_texts(["a", "b", "c"], hashing, [{"n": 1}, {"n": 2}, {"n": 3}], path=path)
    for search_type in ("similarity", "mmr"):
        retriever = store.as_retriever(search_type=search_type, search_kwargs={"k": 2, "filter": {"n": {"$ne": 1}}})
        assert {document.page_content for document in retriever.invoke("a")} == {"b", "c"}
        assert {document.page_content for document in asyncio.run(retriever.ainvoke("a"))} == {"b", "c"}
    threshold = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.0, "filter": {"n": 2}}
    )
    assert [document.page_content for document in threshold.invoke("a")] == ["b"]


def test_a_remembered_filter_sees_later_changes(path: Path) -> None:
    with filled(path, normal(3, 8), [{"tag": True}, {"tag": 1}, {"tag": "1"}]) as store:
        assert found(store, normal(8), filter={"tag": 1}) == ["d1"]
        assert found(store, normal(8), filter={"tag": True}) == ["d0"]
        assert found(store, normal(8), filter={"tag": "1"}) == ["d2"]
        store.add_embeddings(["new"], normal(1, 8), [{"tag": 1}], ["new"])
        assert set(found(store, normal(8), filter={"tag": 1})) == {"d1", "new"}
        store.delete(["d1"])
        assert found(store, normal(8), filter={"tag": 1}) == ["new"]


def test_mmr_prefers_what_differs(path: Path) -> None:
    with FaissStore(path) as store:
        vectors = [[1, 0, 0], [1, 0.01, 0], [0.8, 0.6, 0]]
        store.add_embeddings(["best", "its twin", "another"], vectors, ids=["best", "twin", "another"])

        def mmr(**more: Any) -> list[Any]:
            found = store.max_marginal_relevance_search_by_vector([1, 0, 0], **more)
            return [document.id for document in found]

        assert mmr(k=2, lambda_mult=1.0) == ["best", "twin"]
        assert mmr(k=2, lambda_mult=0.3) == ["best", "another"]
        assert mmr(k=2, lambda_mult=0.3, fetch_k=2) == ["best", "twin"]
        assert sorted(mmr(k=10, fetch_k=1)) == ["another", "best", "twin"]


@pytest.mark.parametrize("length", [0.1, 1.0, 10.0, 1000.0])
def test_mmr_of_inner_products_does_not_depend_on_the_length_of_vectors(path: Path, length: float) -> None:
    vectors = length * np.array([[1, 0], [0.999, 0.01], [0.998, 0.02], [0.7, 0.7]])
    with filled(path, vectors, metric="ip") as store:
        query = [length, 0]
        chosen = [
            [document.id for document in store.max_marginal_relevance_search_by_vector(query, 2, lambda_mult=trade_off)]
            for trade_off in (0.0, 0.3, 0.9, 1.0)
        ]
        assert chosen == [["d0", "d3"], ["d0", "d3"], ["d0", "d1"], ["d0", "d1"]]
        assert len(store.max_marginal_relevance_search_by_vector([0, 0], 3)) == 3
