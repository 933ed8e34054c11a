"""Searching a store: scores, filters, ids, files and settings, for every kind of index."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import StoreError, kinds, vector_index
from pyarrow import parquet

from llm2vec_gen_st.extras import MissingExtraError

KINDS = ["flat", "hnsw", "ivf", "IVF2,Flat"]
METRICS = ["cosine", "ip", "l2"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpus.store"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def names(count: int) -> list[str]:
    return [f"d{number}" for number in range(count)]


def exact(vectors: np.ndarray, query: np.ndarray, metric: str) -> np.ndarray:
    """Scores, from their definition."""
    vectors, query = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return -np.sqrt(((vectors - query) ** 2).sum(axis=1))
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        query = query / np.linalg.norm(query)
    return vectors @ query


def found(store: FaissStore, query: Any, k: int = 4, **more: Any) -> list[str]:
    return [str(document.id) for document in store.similarity_search_by_vector(query, k, **more)]


def filled(path: Path, vectors: np.ndarray, metadatas: list[dict[str, Any]] | None = None, **more: Any) -> FaissStore:
    store = FaissStore(path, **more)
    ids = names(len(vectors))
    store.add_embeddings([f"text of {id}" for id in ids], vectors, metadatas, ids)
    return store


def refuse_to_embed(*_: Any) -> None:
    raise AssertionError("nothing was to be embedded")


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


# Ids


@pytest.mark.parametrize("index", KINDS)
def test_ids_replace_and_delete_and_survive(path: Path, index: str) -> None:
    vectors = normal(100, 8)
    store = filled(path, vectors, [{"n": row} for row in range(100)], index=index)
    new = normal(10, 8, seed=1)
    store.add_embeddings([f"new {row}" for row in range(10)], new, [{"new": row} for row in range(10)], names(10))
    assert store.delete(names(100)[10:60]) is True
    assert store.delete(["nowhere"]) is True
    vectors[:10] = new

    def check(store: FaissStore) -> None:
        assert len(store) == 50
        assert set(store.ids()) == {*names(10), *names(100)[60:]}
        assert store.get_by_ids(["d10", "d3"]) == [Document(id="d3", page_content="new 3", metadata={"new": 3})]
        for row in (*range(10), *range(60, 100)):
            (document, score), *others = store.similarity_search_with_score_by_vector(vectors[row], k=50)
            assert document.id == f"d{row}"
            assert document.page_content == (f"new {row}" if row < 10 else f"text of d{row}")
            assert score == pytest.approx(1.0)
            assert len(others) == 49

    check(store)
    store.close()
    for read_only in (True, False):
        with FaissStore(path, read_only=read_only) as store:
            check(store)
    with FaissStore(path) as store:
        store.compact()
        check(store)
    with FaissStore(path, read_only=True) as store:
        check(store)
        assert store.stats()["marked_deleted"] == 0


@pytest.mark.parametrize("index", KINDS)
def test_a_refused_call_leaves_the_store_as_it_was(path: Path, index: str) -> None:
    good = normal(2, 8)
    with filled(path, normal(90, 8), index=index) as store:
        before = [*store.documents()], store.stats()["generation"]
        for refused in (
            lambda: store.add_embeddings(["a", "b"], good, ids=["same", "same"]),
            lambda: store.add_embeddings(["a", "b"], good, ids=["d1", "d1"]),
            lambda: store.add_embeddings(["a", "b"], good, ids=["d1"]),
            lambda: store.add_embeddings(["a"], good),
            lambda: store.add_embeddings(["a", "b"], good[:, :4], ids=["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], [[1.0] * 8, [math.nan] * 8], ids=["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], [[1.0] * 8, [1e300] * 8], ids=["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], good, [{"x": 1}, {"x": {1, 2}}], ["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], good, [{"x": 1}, {"x": math.inf}], ["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], good, [{"x": 1}], ["d1", "d2"]),
            lambda: store.add_embeddings(["a", "b"], good, ids=["d1", 2]),
            lambda: store.add_embeddings(["a", "b"], good, ids=["d1", "a\0b"]),
            lambda: store.add_embeddings(["a", 3], good, ids=["d1", "d2"]),
            lambda: store.add_embeddings("ab", good, ids=["d1", "d2"]),
            lambda: store.delete("d1"),
        ):
            with pytest.raises((ValueError, TypeError)):
                refused()
            assert ([*store.documents()], store.stats()["generation"]) == before


def test_metadata_nested_too_deep_is_refused_before_it_breaks_the_filters(path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(1200):
        deep = {"a": deep}
    fine: dict[str, Any] = {"end": 1}
    for _ in range(300):
        fine = {"a": fine}
    with filled(path, normal(1, 8)) as store:
        with pytest.raises(ValueError, match="Metadata 0 is nested"):
            store.add_embeddings(["deep"], normal(1, 8), [deep])
        store.add_embeddings(["fine"], normal(1, 8), [fine], ["fine"])
        assert store.ids({".".join(["a"] * 300 + ["end"]): 1}) == ["fine"]


@pytest.mark.parametrize("index", KINDS)
def test_deleting_everything_and_starting_anew(path: Path, index: str) -> None:
    with filled(path, normal(100, 8), index=index) as store:
        store.save()
        store.delete()
        assert len(store) == 0
        assert found(store, normal(8)) == []
        store.compact()
        store.add_embeddings(["new"], normal(1, 8), ids=["new"])
        assert found(store, normal(8), 10) == ["new"]
    with FaissStore(path) as store:
        assert found(store, normal(8), 10) == ["new"]
        assert store.stats()["marked_deleted"] == 0


def test_odd_texts_and_ids_come_back_as_they_were(path: Path) -> None:
    texts = ["", "\0", "a\0b", "\ud800 lone", "👩‍👩‍👧", "شجرة", " " * 2000, "x" * 100_000]
    metadatas = [{"": text, text[:50]: [text], "nested": {"ключ": None}} for text in texts]
    with FaissStore(path) as store:
        store.add_embeddings(texts, normal(len(texts), 8), metadatas, ids=["", *"abcdef", "名前 👾"])
    with FaissStore(path) as store:
        documents = list(store.documents())
        assert [document.page_content for document in documents] == texts
        assert [document.metadata for document in documents] == metadatas
        assert store.get_by_ids(["名前 👾"])[0].page_content == texts[-1]
        assert store.ids({"nested.ключ": None}) == store.ids()


# Two embeddings, other dimensions, other settings


def test_another_dimension_names_both(path: Path, toy: Callable[..., Any]) -> None:
    with FaissStore(path, toy(dimension=8)) as store:
        store.add_texts(["a"])
    with FaissStore(path, toy(dimension=6)) as store:
        with pytest.raises(ValueError, match=r"8 .*6"):
            store.add_texts(["b"])
        with pytest.raises(ValueError, match=r"8 .*6"):
            store.similarity_search("b")
        assert len(store) == 1


def test_another_embedding_names_both_and_can_be_overridden(path: Path, toy: Callable[..., Any]) -> None:
    with FaissStore(path, toy(model="one")) as store:
        store.add_texts(["a"])
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"\(one\).*\(two\)"):
            FaissStore(path, toy(model="two"), read_only=read_only)
    with FaissStore(path, toy(model="two"), verify_embedding=False) as store:
        assert len(store.similarity_search("a")) == 1
    with FaissStore(path, toy(model="one")) as store:
        assert len(store.similarity_search("a")) == 1
    with FaissStore(path) as store:
        assert found(store, normal(8)) == store.ids()
        with pytest.raises(StoreError, match="without an embedding"):
            store.similarity_search("a")


def test_metric_and_index_are_kept_and_can_be_changed_on_reopening(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vectors, query = normal(100, 8) * np.linspace(0.1, 3, 100, dtype=np.float32)[:, None], normal(8, seed=1)
    filled(path, vectors, metric="l2", index="hnsw").close()
    with FaissStore(path) as store:
        assert (store.metric, store.stats()["index"]) == ("l2", "hnsw")
    assert not caplog.records
    for metric, index in (("ip", "flat"), ("cosine", "IVF2,Flat"), ("l2", "flat")):
        with pytest.raises(StoreError, match="read_only"):
            FaissStore(path, metric=metric, index=index, read_only=True)
        with FaissStore(path, metric=metric, index=index) as store:
            order = np.argsort(-exact(vectors, query, metric))
            assert found(store, query, 10) == [f"d{row}" for row in order[:10]]
        with FaissStore(path) as store:
            assert (store.metric, store.stats()["index"]) == (metric, index)
            assert found(store, query, 10) == [f"d{row}" for row in order[:10]]


def test_unknown_metric_index_and_device_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"cosine, ip, l2.*'euclid'"):
        FaissStore(path, metric="euclid")  # type: ignore[arg-type]
    with FaissStore(path, index="nonsense") as store, pytest.raises(ValueError, match="'nonsense'"):
        store.add_embeddings(["a"], [[1, 0]])
    with filled(path.with_name("b"), normal(1, 8)):
        pass
    with pytest.raises(ValueError, match="'nonsense'"):
        FaissStore(path.with_name("b"), index="nonsense")
    with pytest.raises(ValueError, match="'tpu'"):
        FaissStore(path.with_name("b"), device="tpu")
    with FaissStore(path.with_name("b")) as store:
        assert store.stats()["index"] == "flat"


# Empty stores and files


@pytest.mark.parametrize("index", KINDS)
def test_an_empty_store_answers_with_nothing_and_goes_on(path: Path, index: str, hashing: Any) -> None:
    def check(store: FaissStore) -> None:
        assert store.similarity_search("q") == []
        assert store.similarity_search("q", filter={"a": 1}) == []
        assert store.similarity_search_with_score_by_vector(normal(8)) == []
        assert store.max_marginal_relevance_search("q") == []
        assert store.max_marginal_relevance_search_by_vector(normal(8), filter={"a": 1}) == []
        assert store.similarity_search_with_relevance_scores("q", score_threshold=0.1) == []
        assert store.as_retriever().invoke("q") == []
        assert (store.ids(), store.get_by_ids(["a"]), len(store), list(store.documents())) == ([], [], 0, [])
        assert store.explain(filter={"a": 1})["strategy"] == "empty"
        assert store.stats()["documents"] == 0

    with FaissStore.from_texts([], hashing, path=path, index=index) as store:
        check(store)
        store.delete()
        store.compact()
        store.save()
        check(store)
    with FaissStore(path, hashing, read_only=True) as store:
        check(store)
    with FaissStore(path, hashing) as store:
        check(store)
        store.add_texts(["only"])
        assert [document.page_content for document in store.similarity_search("q", k=10)] == ["only"]


@pytest.mark.parametrize("name", ["a b.store", "语料库", "corpus 🐻.store", "100%?#[x]*.store", "n" * 200, "x.y.faiss"])
@pytest.mark.parametrize("folder", [".", "文件 夹/🐝"])
def test_any_path_will_do(tmp_path: Path, folder: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / folder / name
    filled(path, normal(20, 8), index="hnsw").close()
    with FaissStore(path) as store:
        store.save()
        store.save()
    for read_only in (True, False):
        with FaissStore(path, read_only=read_only) as store:
            assert found(store, normal(20, 8)[7], 1) == ["d7"]
    assert not caplog.records
    assert len(list(path.parent.iterdir())) == 2


def test_a_store_leaves_the_files_of_its_neighbours_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("corpus", "corpus.old", "corpus.0123abcd"):
        filled(tmp_path / name, normal(5, 8)).close()
    (tmp_path / "corpus.notes.faiss").write_text("mine")
    with FaissStore(tmp_path / "corpus") as store:
        store.compact()
    assert (tmp_path / "corpus.notes.faiss").read_text() == "mine"
    for name in ("corpus", "corpus.old", "corpus.0123abcd"):
        with FaissStore(tmp_path / name) as store:
            assert store.stats()["index_bytes"] > 0
    assert not caplog.records


def test_there_is_no_pickle_and_only_one_index_file(path: Path) -> None:
    with filled(path, normal(10, 8), [{"n": row} for row in range(10)]) as store:
        store.save()
        store.save()
    assert len(list(path.parent.glob("*.faiss"))) == 1
    for file in path.parent.iterdir():
        head = file.read_bytes()
        assert not head.startswith(b"\x80")
        assert b"langchain" not in head


def test_importing_the_store_imports_neither_community_nor_torch(path: Path) -> None:
    code = (
        "import sys; from langchain_llm2vec_gen import FaissStore; s = FaissStore(sys.argv[1]);"
        "s.add_embeddings(['a'], [[1.0]]); s.similarity_search_by_vector([1.0]); s.close();"
        "print([name for name in ('langchain_community', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_store_says_so(path: Path) -> None:
    store = filled(path, normal(2, 8))
    store.close()
    store.close()
    for use in (lambda: found(store, normal(8)), lambda: store.delete(["d1"]), store.ids, store.save):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_a_temporary_store_leaves_nothing_behind(hashing: Any) -> None:
    store = FaissStore.from_texts(["a"], hashing)
    folder = store.path.parent
    assert folder.is_dir()
    store.close()
    del store
    assert not folder.exists()


# Many documents


def test_texts_are_embedded_in_batches_and_vectors_not_at_all(path: Path, hashing: Any) -> None:
    with FaissStore(path, hashing) as store:
        store.add_texts((f"text {number}" for number in range(130)), batch_size=50)
        assert [len(batch) for batch in hashing.batches] == [50, 50, 30]
        hashing.embed_documents = hashing.embed_query = refuse_to_embed
        store.add_embeddings(["ready-made"], normal(1, 8))
        assert len(store.similarity_search_by_vector(normal(8))) == 4


def test_a_progress_bar_if_asked_for(path: Path, hashing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FaissStore(path, hashing) as store:
        store.add_texts(["a", "b"])
        assert capsys.readouterr().err == ""
        store.add_texts(["c", "d"], show_progress_bar=True)
        assert "embedding" in capsys.readouterr().err


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "form", ["list", "float16", "float64", "torch", "torch bf16", "grad", "memmap", "fortran", "tuples", "rows"]
)
def test_vectors_in_any_form_are_taken_and_left_unchanged(path: Path, form: str, metric: str) -> None:
    # Numbers that bfloat16 holds too.
    vectors = np.random.default_rng(0).integers(-8, 9, (20, 8)).astype(np.float32)
    given: Any = {
        "list": lambda: vectors.tolist(),
        "float16": lambda: vectors.astype(np.float16),
        "float64": lambda: vectors.astype(np.float64),
        "torch": lambda: torch.from_numpy(vectors.copy()),
        "torch bf16": lambda: torch.from_numpy(vectors).bfloat16(),
        "grad": lambda: torch.from_numpy(vectors.copy()).requires_grad_(),
        "memmap": lambda: memory_map(path.with_name("vectors.npy"), vectors),
        "fortran": lambda: np.asfortranarray(vectors),
        "tuples": lambda: tuple(map(tuple, vectors.tolist())),
        "rows": lambda: iter(vectors),
    }[form]()
    query = given[3] if hasattr(given, "detach") else vectors[3]
    with FaissStore(path, metric=metric) as store:
        store.add_embeddings(names(20), given, ids=names(20))
        hits = store.similarity_search_with_score_by_vector(query, k=20)
    expected = exact(vectors, vectors[3], metric)
    np.testing.assert_allclose([score for _, score in hits], -np.sort(-expected), rtol=1e-5, atol=1e-5)
    if form != "rows":
        after = given.detach().float().numpy() if hasattr(given, "detach") else np.asarray(given, np.float32)
        np.testing.assert_array_equal(after, vectors)


def memory_map(path: Path, vectors: np.ndarray) -> np.ndarray:
    np.save(path, vectors)
    return np.load(path, mmap_mode="r")


def test_queries_and_documents_take_their_own_route(path: Path, hashing: Any) -> None:
    with FaissStore.from_texts(["d1", "d2"], hashing, path=path):
        pass
    with FaissStore(path, hashing) as store:
        hashing.batches.clear()
        store.as_retriever().invoke("q1")
        asyncio.run(store.as_retriever(search_type="mmr").ainvoke("q2"))
        asyncio.run(store.aadd_texts(["d3"]))
        asyncio.run(store.aadd_documents([Document(page_content="d4", id="four")]))
        assert hashing.queries == ["q1", "q2"]
        assert hashing.batches == [["d3"], ["d4"]]
        assert asyncio.run(store.aget_by_ids(["four"]))[0].page_content == "d4"


# Training and lossy indexes


def test_an_inverted_file_is_exact_until_trained_and_says_so(path: Path) -> None:
    vectors, query = normal(77, 8), normal(8, seed=1)
    with filled(path, vectors, index="IVF2,Flat") as store:
        stats = store.stats()
        assert (stats["indexed"], stats["waiting"], stats["exact"]) == (0, 77, True)
        assert "exact until there are 78" in stats["state"]
        assert store.explain()["exact"] is True
        before = found(store, query, 10)
    with FaissStore(path) as store:
        assert found(store, query, 10) == before
        store.add_embeddings(["last"], normal(1, 8, seed=2), ids=["last"])
        stats = store.stats()
        assert (stats["indexed"], stats["waiting"], stats["exact"]) == (78, 0, False)
        assert stats["state"] == "up to date"
        assert store.explain()["exact"] is False
    with FaissStore(path, read_only=True) as store:
        assert store.stats()["indexed"] == 78
        assert [id for id in found(store, query, 11) if id != "last"][:10] == before


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", ["SQ8", "IVF4,PQ4x4", "PQ4x4", "IVF2,SQ8", "HNSW8,SQ8"])
def test_a_lossy_index_gives_exact_scores(path: Path, index: str, metric: str) -> None:
    vectors, query = normal(700, 16), normal(16, seed=1)
    with filled(path, vectors, index=index, metric=metric) as store:
        assert store.stats()["indexed"] == 700
        assert store.stats()["exact"] is False
        hits = store.similarity_search_with_score_by_vector(query, k=10)
    by_id = dict(zip(names(700), exact(vectors, query, metric), strict=True))
    scores = [score for _, score in hits]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(scores, [by_id[str(document.id)] for document, _ in hits], rtol=1e-5, atol=1e-5)
    best = set(sorted(by_id, key=by_id.__getitem__)[-10:])
    assert len(best & {str(document.id) for document, _ in hits}) >= 6
    with FaissStore(path) as store:
        store.delete(sorted(best))
        again = [str(document.id) for document in store.similarity_search_by_vector(query, k=10)]
        assert len(again) == 10
        assert not best & set(again)


def test_the_built_in_product_quantizer_waits_until_it_can_be_trained(path: Path) -> None:
    with filled(path, normal(300, 16), index="ivfpq") as store:
        assert "exact until" in store.stats()["state"]
        assert store.explain()["exact"] is True
        assert found(store, normal(300, 16)[5], 1) == ["d5"]


def test_explain_tells_what_a_search_will_do(path: Path) -> None:
    with filled(path, normal(200, 8), [{"n": row} for row in range(200)]) as store:
        told = store.explain()
        assert (told["strategy"], told["documents"], told["admitted"], told["sql"]) == ("full", 200, None, None)
        told = store.explain(filter={"n": {"$lt": 3}})
        assert (told["strategy"], told["admitted"], told["exact"]) == ("scan", 3, True)
        assert told["sql"]
        assert "3 admitted" in told["reason"]
        assert store.explain(filter={"n": {"$gte": 3}})["strategy"] == "selector"
        assert store.explain(filter={"n": -1})["strategy"] == "empty"


@pytest.mark.parametrize("index", ["PQ4x4", "LSH", "IVF4,RQ2x4"])
def test_explain_tells_of_an_index_that_cannot_pass_over_deleted_documents(path: Path, index: str) -> None:
    vectors, query = normal(700, 16), normal(16, seed=1)
    order = 50 + np.argsort(-exact(vectors[50:], query, "l2"))
    with filled(path, vectors, index=index, metric="l2") as store:
        assert store.stats()["indexed"] == 700
        told = store.explain(10)
        assert (told["strategy"], told["exact"], told["reason"]) == ("full", False, "no filter")
        store.delete(names(50))
        told = store.explain(10)
        assert (told["strategy"], told["exact"]) == ("scan", True)
        assert f"{index} cannot pass over the 50 vectors that are marked as deleted" in told["reason"]
        assert "the other 650" in told["reason"]
        assert "compact" in told["reason"]
        assert found(store, query, 10) == [f"d{row}" for row in order[:10]]
    with FaissStore(path, read_only=True) as store:
        assert store.explain(10) == told
        assert found(store, query, 10) == [f"d{row}" for row in order[:10]]
    with FaissStore(path) as store:
        store.compact()
        told = store.explain(10)
        assert (told["strategy"], told["exact"], told["reason"]) == ("full", False, "no filter")


@pytest.mark.parametrize("deleted", [0, 50])
@pytest.mark.parametrize("index", ["LSH", "IVF4,RQ2x4"])
def test_explain_tells_of_an_index_that_cannot_pass_over_what_a_filter_does_not_admit(
    path: Path, index: str, deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, query = normal(700, 16), normal(16, seed=1)
    order = 100 + np.argsort(-exact(vectors[100:], query, "l2"))
    with filled(path, vectors, [{"n": row} for row in range(700)], index=index, metric="l2") as store:
        store.delete(names(deleted))
        assert "compared faster" in store.explain(10, {"n": {"$gte": 100}})["reason"]
        monkeypatch.setattr(vector_index, "_SCAN_FROM_FILE", 10)
        told = store.explain(10, {"n": {"$gte": 100}})
        assert (told["strategy"], told["exact"], told["admitted"]) == ("scan", True, 600)
        assert f"{index} cannot pass over vectors that are not admitted" in told["reason"]
        assert "the 600" in told["reason"]
        assert found(store, query, 10, filter={"n": {"$gte": 100}}) == [f"d{row}" for row in order[:10]]


@pytest.mark.parametrize("index", [*KINDS, "SQ8", "IVF4,PQ4x4", "HNSW8,SQ8"])
def test_other_kinds_are_searched_though_documents_are_deleted(
    path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(path, normal(2600, 16), [{"n": row} for row in range(2600)], index=index) as store:
        assert store.stats()["indexed"] == 2600
        exact_before = store.explain()["exact"]
        store.delete(names(50))
        told = store.explain()
        assert (told["strategy"], told["exact"]) == ("full", exact_before)
        for limit in ("_SCAN_FROM_MEMORY", "_SCAN_FROM_FILE"):
            monkeypatch.setattr(vector_index, limit, 0)
        assert store.explain(filter={"n": {"$gte": 100}})["strategy"] == "selector"


def test_stats_count(path: Path, hashing: Any) -> None:
    with FaissStore.from_texts(["a", "b", "c"], hashing, ids=["a", "b", "c"], path=path, metric="ip") as store:
        store.delete(["a"])
        stats = store.stats()
        assert (stats["documents"], stats["indexed"], stats["marked_deleted"]) == (2, 3, 1)
        assert (stats["dimension"], stats["metric"], stats["index"], stats["faiss"]) == (8, "ip", "flat", "Flat")
        assert stats["embedding"].endswith("ToyEmbeddings(toy)")
        assert stats["index_bytes"] == 0
        store.save()
        assert store.stats()["index_bytes"] == next(path.parent.glob("*.faiss")).stat().st_size


# Other stores


def test_merging_brings_everything_or_nothing(path: Path) -> None:
    other = filled(path.with_name("other"), normal(5, 8), [{"é": row} for row in range(5)])
    with filled(path, normal(3, 8, seed=1)) as store:
        with pytest.raises(ValueError, match="3 ids are in both"):
            store.merge_from(other)
        assert len(store) == 3
        store.delete()
        assert store.merge_from(other) == 5
        assert found(store, normal(5, 8)[4], 1, filter={"é": {"$gte": 2}}) == ["d4"]
        assert list(store.documents()) == list(other.documents())
    other.close()


def test_an_export_has_the_documents_in_order_and_none_that_are_gone(path: Path) -> None:
    texts, vectors = ["", "a\nb", "标题", "last"], normal(4, 8)
    metadatas = [{"n": [1, None]}, {}, {"é": {"x": 1.5}}, {}]
    with FaissStore(path) as store:
        assert store.export_parquet(path.with_name("empty.parquet")) == 0
        store.add_embeddings(texts, vectors, metadatas, names(4))
        store.delete(["d1"])
        assert store.export_parquet(path.with_name("all.parquet")) == 3
    rows = parquet.read_table(path.with_name("all.parquet")).to_pylist()
    assert [(row["id"], row["text"]) for row in rows] == [("d0", ""), ("d2", "标题"), ("d3", "last")]
    assert [json.loads(row["metadata"]) for row in rows] == [metadatas[row] for row in (0, 2, 3)]
    np.testing.assert_array_equal([row["embedding"] for row in rows], vectors[[0, 2, 3]])
    assert parquet.read_table(path.with_name("empty.parquet")).num_rows == 0


def test_merging_reads_each_document_once(path: Path) -> None:
    started = time.process_time()
    other = filled(path.with_name("other"), normal(800, 8))
    adding = time.process_time() - started
    with FaissStore(path) as store:
        started = time.process_time()
        assert store.merge_from(other) == 800
        # Reading all of them for each of them would take hundreds of times as long.
        assert time.process_time() - started < 25 * adding
    other.close()


def test_settings_of_the_user_are_kept(path: Path) -> None:
    with FaissStore(path) as store:
        store.settings["title"] = "标题"
        store.settings["metric"] = "mine"
    with FaissStore(path) as store:
        assert dict(store.settings) == {"title": "标题", "metric": "mine"}
        assert store.metric == "cosine"
        del store.settings["title"]
        assert "title" not in store.settings
        with pytest.raises(KeyError):
            del store.settings["title"]


# GPU


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this FAISS has GPU support")
def test_a_gpu_without_gpu_support_names_the_extra(path: Path) -> None:
    filled(path, normal(3, 8)).close()
    with pytest.raises(MissingExtraError, match=r"llm2vec-gen-st\[faiss-gpu\]"):
        FaissStore(path, device="cuda")
    with FaissStore(path) as store:
        assert len(store) == 3


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """FAISS with a GPU whose index is a copy on the CPU; what was copied."""
    copied: list[Any] = []

    def copy(resources: Any, device: int, index: Any) -> Any:
        copied.append(index)
        return faiss.clone_index(index)

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", copy, raising=False)
    return copied


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", ["flat", "IVF16,Flat"])
def test_a_gpu_gives_the_results_of_the_cpu(
    path: Path, index: str, metric: str, pretended_gpu: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    vectors, queries = normal(700, 8), normal(10, 8, seed=1)
    with filled(path, vectors, index=index, metric=metric, device="cuda") as store:
        on_gpu = [store.similarity_search_with_score_by_vector(query, k=10) for query in queries]
        assert len(pretended_gpu) == 1
        store.add_embeddings(["new"], [[9] * 8], ids=["new"])
        assert found(store, [9] * 8, 1) == ["new"]
        assert len(pretended_gpu) == 2
        store.delete(["new"])
        assert found(store, [9] * 8, 1) != ["new"]
    with FaissStore(path) as store:
        assert store.stats()["indexed"] == 701
        assert [store.similarity_search_with_score_by_vector(query, k=10) for query in queries] == on_gpu
    assert len(pretended_gpu) == 2
    assert not caplog.records


def test_a_gpu_that_is_not_there_is_named(
    path: Path, pretended_gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path, normal(3, 8)).close()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(RuntimeError, match="no GPU"):
        FaissStore(path, device="cuda")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    with pytest.raises(ValueError, match="hnsw"):
        FaissStore(path, index="hnsw", device="cuda")


def test_the_kinds_that_need_training_are_known() -> None:
    assert kinds.Kind("PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("IVF4,PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("OPQ4,PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("IVF100,SQ8", 16, "cosine").needed == 3900
    assert kinds.Kind("hnsw", 16, "l2").needed == 0


def test_nothing_is_logged_in_ordinary_use(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with filled(path, normal(100, 8), index="IVF2,Flat") as store:
        store.delete(["d3"])
    with FaissStore(path) as store:
        store.compact()
    FaissStore(path, read_only=True).close()
    assert not caplog.records
