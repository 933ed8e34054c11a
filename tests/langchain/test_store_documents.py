"""What a store holds: ids, files, settings, many documents, and other stores, for every kind of index."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import StoreError, writing
from langchain_llm2vec_gen.store.vector_index import VectorIndex
from pyarrow import parquet

from .stores import KINDS, METRICS, exact, filled, found, names, normal, refuse_to_embed

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


@pytest.mark.parametrize("wrong", ["x", ["y"], 3, [], 0, ""])
def test_metadata_that_are_no_dictionaries_are_refused_by_position(path: Path, hashing: Any, wrong: Any) -> None:
    with FaissStore(path, hashing) as store:
        with pytest.raises(ValueError, match=f"Metadata 1 is not a dictionary but {type(wrong).__name__}"):
            store.add_texts(["a", "b"], [{}, wrong])
        with pytest.raises(ValueError, match="Metadata 1 is not a dictionary"):
            store.add_embeddings(["a", "b"], normal(2, 8), [{}, wrong])
        with pytest.raises(ValueError, match="list of dictionaries"):
            store.add_texts(["a"], {"source": "y"})  # type: ignore[arg-type]
        assert len(store) == 0
        assert not hashing.batches
        store.add_texts(["a", "b"], [None, MappingProxyType({"n": 1})])  # type: ignore[list-item]
        assert [document.metadata for document in store.documents()] == [{}, {"n": 1}]


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
    with pytest.raises(ValueError, match="'nonsense'"):
        FaissStore(path, index="nonsense")
    with FaissStore(path) as store:
        assert store.stats()["index"] == "flat"
    with filled(path.with_name("b"), normal(1, 8)):
        pass
    with pytest.raises(ValueError, match="'nonsense'"):
        FaissStore(path.with_name("b"), index="nonsense")
    with pytest.raises(ValueError, match="'tpu'"):
        FaissStore(path.with_name("b"), device="tpu")
    with FaissStore(path.with_name("b")) as store:
        assert store.stats()["index"] == "flat"


def test_an_index_that_does_not_fit_the_vectors_is_found_after_the_first_batch(path: Path, hashing: Any) -> None:
    texts = [f"text {number}" for number in range(200)]
    with FaissStore(path, hashing, index="PQ7x4") as store, pytest.raises(ValueError, match=r"'PQ7x4'.* 8 dimensions"):
        store.add_texts(texts)
    assert [len(batch) for batch in hashing.batches] == [64]
    with pytest.raises(ValueError, match="'hsnw'"):
        FaissStore.from_texts(texts, hashing, path=path.with_name("b"), index="hsnw")
    with FaissStore(path.with_name("b"), hashing) as store:
        store.add_embeddings(["a"], normal(1, 6))
        with pytest.raises(ValueError, match=r"6 .*8"):
            store.add_texts(texts)
    assert [len(batch) for batch in hashing.batches] == [64, 64]


def test_making_a_store_of_texts_takes_what_the_constructor_takes(path: Path, toy: Callable[..., Any]) -> None:
    FaissStore.from_texts(["a"], toy(model="one"), path=path).close()
    with pytest.raises(StoreError, match=r"\(one\).*\(two\)"):
        FaissStore.from_texts(["b"], toy(model="two"), path=path)
    with FaissStore.from_texts(["b"], toy(model="two"), path=path, verify_embedding=False) as store:
        assert len(store) == 2
    with pytest.raises(ValueError, match="'nonsense'"):
        FaissStore.from_texts(["b"], toy(), device="nonsense")


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


def test_an_overridden_embedding_of_documents_is_not_passed_by(path: Path, toy: Callable[..., Any]) -> None:
    kind: Any = type(toy())

    class WithArrays(kind):  # type: ignore[misc]
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [row.tolist() for row in self.embed_documents_array(texts)]

        def embed_documents_array(self, texts: list[str]) -> np.ndarray:
            return np.array([[1.0, 0.0]] * len(texts), np.float32)

    class Lists(WithArrays):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[2.0, 0.0]] * len(texts)

    class Arrays(WithArrays):
        def embed_documents_array(self, texts: list[str]) -> np.ndarray:
            return np.array([[3.0, 0.0]] * len(texts), np.float32)

    replaced = WithArrays()
    replaced.embed_documents = lambda texts: [[4.0, 0.0]] * len(texts)
    with FaissStore(path) as store:
        for number, embedding in enumerate((WithArrays(), Lists(), Arrays(), replaced), 1):
            store._embedding = embedding
            store.add_texts(["a"], ids=[str(number)])
            assert store.vectors([str(number)]).tolist() == [[float(number), 0.0]]


def test_an_index_that_cannot_be_saved_unasked_is_no_failure_of_adding(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Path] = []

    def full(index: Any, path: Path) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "_UNSAVED_AT_MOST", 10)
    with FaissStore(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(VectorIndex, "write", full)
            assert store.add_embeddings(names(20), normal(20, 8), ids=names(20)) == names(20)
            assert "No space left" in caplog.text
            assert "documents are safe" in caplog.text
            store.add_embeddings(["one more"], normal(1, 8))
            assert len(tried) == 1
            store.compact()
            with pytest.raises(OSError, match="No space left"):
                store.save()
            assert (len(store), len(found(store, normal(8), 30))) == (21, 21)
        store.add_embeddings(["another"] * 22, normal(22, 8))
        assert store.stats()["index_bytes"] > 0
        with monkeypatch.context() as patch:
            patch.setattr(VectorIndex, "write", full)
            store.add_embeddings(["last"], normal(1, 8))
            caplog.clear()
            store.close()
            assert "No space left" in caplog.text
    caplog.clear()
    with FaissStore(path) as store:
        assert (len(store), len(found(store, normal(8), 50))) == (44, 44)
    assert not caplog.records


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


def test_merging_takes_over_which_embedding_made_the_vectors(path: Path, toy: Callable[..., Any]) -> None:
    other = FaissStore.from_texts(["a", "b"], toy(model="one"), path=path.with_name("other"))
    with FaissStore(path) as store:
        assert store.merge_from(other) == 2
        assert store.stats()["embedding"] == other.stats()["embedding"]
    other.close()
    with pytest.raises(StoreError, match=r"\(one\).*\(two\)"):
        FaissStore(path, toy(model="two"))


def test_lone_surrogates_are_replaced_in_an_export(path: Path) -> None:
    with FaissStore(path) as store:
        store.add_embeddings(["bad \ud800 text", "ok"], normal(2, 8), [{"k\ud800": "\udfff"}, {}], names(2))
        assert store.export_parquet(path.with_name("all.parquet")) == 2
    with FaissStore(path.with_name("again")) as store:
        assert store.add_parquet(path.with_name("all.parquet")) == 2
        assert [document.page_content for document in store.documents()] == ["bad \ufffd text", "ok"]
        assert [document.metadata for document in store.documents()] == [{"k\ud800": "\udfff"}, {}]


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


def test_nothing_is_logged_in_ordinary_use(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with filled(path, normal(100, 8), index="IVF2,Flat") as store:
        store.delete(["d3"])
    with FaissStore(path) as store:
        store.compact()
    FaissStore(path, read_only=True).close()
    assert not caplog.records
