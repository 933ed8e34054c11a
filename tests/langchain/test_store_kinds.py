"""Kinds of index: training, lossy ones, what `explain` tells of them, and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import kinds, vector_index

from llm2vec_gen_st.extras import MissingExtraError

from .stores import KINDS, METRICS, exact, filled, found, names, normal

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


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    "index", ["PCA8,Flat", "L2norm,Flat", "RR8,Flat", "Pad32,SQ8", "PCA8,HNSW8", "PCA8,IVF4,Flat", "OPQ4,IVF4,PQ4x4"]
)
def test_a_transform_before_the_index_leaves_filters_and_deletions_as_they_are(
    path: Path, index: str, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, odd = 4200, {"odd": 1}
    monkeypatch.setattr(vector_index, "_SCAN_FROM_FILE", 2000)
    vectors = normal(count, 16)
    store = filled(path, vectors, [{"odd": row % 2} for row in range(count)], index=index, metric="l2")
    # A vector is the nearest to itself, but the other kinds may not see that.
    sees_itself = index.endswith(",Flat")
    if saved:
        store.close()
        store = FaissStore(path, read_only=True)
    with store:
        assert store.stats()["indexed"] == count
        assert store.explain(10, odd)["strategy"] == "selector"
        for row in range(1, 200, 18):
            hits = store.similarity_search_by_vector(vectors[row], k=10, filter=odd)
            assert [document.metadata["odd"] for document in hits] == [1] * 10
            assert hits[0].id == f"d{row}" or not sees_itself
            assert f"d{row + 1}" not in found(store, vectors[row + 1], 10, filter=odd)
    gone = [100, 200, 201, 202]
    with FaissStore(path) as store:
        store.delete([f"d{row}" for row in gone])
    with FaissStore(path, read_only=saved) as store:
        assert store.explain()["strategy"] == "full"
        for row in (*range(97, 104), *range(197, 206)):
            hits = found(store, vectors[row], 10)
            assert not set(hits) & {f"d{number}" for number in gone}
            assert hits[0] == f"d{row}" or row in gone or not sees_itself


@pytest.mark.parametrize("index", ["IDMap,Flat", "IDMap2,Flat", "PCA8,IDMap,Flat", "IDMap,IVF4,Flat"])
def test_an_index_with_its_own_map_of_ids_is_refused_at_once(path: Path, index: str) -> None:
    with pytest.raises(ValueError, match="leave IDMap out"):
        FaissStore(path, index=index)
    filled(path, normal(3, 8)).close()
    with pytest.raises(ValueError, match="leave IDMap out"):
        FaissStore(path, index=index)
    with FaissStore(path) as store:
        assert store.stats()["index"] == "flat"


def test_a_kind_is_tried_before_the_dimension_is_known() -> None:
    for index in ("flat", "ivfpq", "PQ7x4", "OPQ11,IVF4,PQ11x4", "PCA2048,Flat", "IVF4,PQ48x4fs"):
        assert kinds.kind_of_any_dimension(index, "cosine").name == index
    with pytest.raises(ValueError, match=r"'hsnw': FAISS cannot build it .* 768.*could not parse"):
        kinds.kind_of_any_dimension("hsnw", "cosine")


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


# GPU


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this FAISS has GPU support")
def test_a_gpu_without_gpu_support_names_the_extra(path: Path) -> None:
    filled(path, normal(3, 8)).close()
    with pytest.raises(MissingExtraError, match=r"llm2vec-gen-st\[faiss-gpu\]"):
        FaissStore(path, device="cuda")
    with FaissStore(path) as store:
        assert len(store) == 3


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this FAISS has GPU support")
def test_a_new_store_refuses_a_device_that_cannot_be_used(path: Path, hashing: Any) -> None:
    for device, error in (("gpu", ValueError), ("cuda", MissingExtraError)):
        with pytest.raises(error, match=device):
            FaissStore(path, device=device)
        with pytest.raises(error, match=device):
            FaissStore.from_texts(["a"], hashing, path=path, device=device)
    assert not hashing.batches
    with FaissStore(path, hashing) as store:
        assert len(store) == 0


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
    for name in (path, path.with_name("new.store")):
        with pytest.raises(ValueError, match="hnsw"):
            FaissStore(name, index="hnsw", device="cuda")
    with FaissStore(path) as store:
        assert store.stats()["index"] == "flat"


def test_the_kinds_that_need_training_are_known() -> None:
    assert kinds.Kind("PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("IVF4,PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("OPQ4,PQ4x4", 16, "cosine").needed == 39 * 16
    assert kinds.Kind("IVF100,SQ8", 16, "cosine").needed == 3900
    assert kinds.Kind("hnsw", 16, "l2").needed == 0
