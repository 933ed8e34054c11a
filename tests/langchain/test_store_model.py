"""A store against a dictionary: whatever is done to both, in whatever order, they agree."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import vector_index

DIMENSION = 4
names = st.sampled_from([f"d{number}" for number in range(30)])
seeds = st.integers(0, 10_000)
groups = st.integers(0, 2)


def vectors_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)


class StoreMachine(RuleBasedStateMachine):
    """Whole numbers of documents, so that indexes are trained and outgrown, and all of what a user may do."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "corpus.store"
        self.documents: dict[str, tuple[str, int, np.ndarray]] = {}
        self.store: FaissStore | None = None
        self.count = 0

    @initialize(index=st.sampled_from(["flat", "hnsw", "IVF2,Flat"]), metric=st.sampled_from(["cosine", "ip", "l2"]))
    def make(self, index: str, metric: Any) -> None:
        self.index, self.metric = index, metric
        self.store = FaissStore(self.path, index=index, metric=metric)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder)

    @property
    def opened(self) -> FaissStore:
        assert self.store is not None
        return self.store

    def _add(self, ids: list[str], seed: int, group: int) -> None:
        vectors = vectors_of(seed, len(ids))
        self.count += 1
        texts = [f"{id}, call {self.count}" for id in ids]
        assert self.opened.add_embeddings(texts, vectors, [{"group": group}] * len(ids), ids) == ids
        for id, text, vector in zip(ids, texts, vectors, strict=True):
            # What is replaced is as if deleted and added: it goes to the end.
            self.documents.pop(id, None)
            self.documents[id] = (text, group, vector)

    @rule(ids=st.lists(names, min_size=1, max_size=8, unique=True), seed=seeds, group=groups)
    def add_or_replace(self, ids: list[str], seed: int, group: int) -> None:
        self._add(ids, seed, group)

    @rule(seed=seeds, group=groups)
    def add_many(self, seed: int, group: int) -> None:
        self._add([f"many{number}" for number in range(seed % 7, 90)], seed, group)

    @rule(ids=st.lists(names, max_size=8))
    def delete(self, ids: list[str]) -> None:
        self.opened.delete(ids)
        for id in ids:
            self.documents.pop(id, None)

    @rule(odd=st.booleans())
    def delete_many(self, odd: bool) -> None:
        ids = [f"many{number}" for number in range(odd, 90, 1 + odd)]
        self.opened.delete(ids)
        for id in ids:
            self.documents.pop(id, None)

    @rule()
    def delete_all(self) -> None:
        self.opened.delete()
        self.documents.clear()

    @rule(ids=st.lists(names, min_size=2, max_size=4))
    def refused(self, ids: list[str]) -> None:
        with pytest.raises(ValueError, match="comes twice"):
            self.opened.add_embeddings([*ids, "again"], vectors_of(0, len(ids) + 1), ids=[*ids, ids[0]])

    @rule(seed=seeds, k=st.integers(0, 60))
    def search(self, seed: int, k: int) -> None:
        self._check_search(seed, k, None)

    @rule(seed=seeds, k=st.integers(0, 60), group=groups, selector=st.booleans())
    def search_filtered(self, seed: int, k: int, group: int, selector: bool) -> None:
        with selectors_forced(selector):
            self._check_search(seed, k, group)

    def _check_search(self, seed: int, k: int, group: int | None) -> None:
        query = vectors_of(seed + 1, 1)[0]
        expected = {
            id: self._score(vector, query) for id, (_, its, vector) in self.documents.items() if group in (None, its)
        }
        filter = None if group is None else {"group": group}
        plan = self.opened.explain(k, filter)
        hits = self.opened.similarity_search_with_score_by_vector(query, k, filter)
        ids = [str(document.id) for document, _ in hits]
        scores = [score for _, score in hits]
        assert len(set(ids)) == len(ids) == min(k, len(expected))
        assert set(ids) <= set(expected)
        assert all(document.page_content == self.documents[str(document.id)][0] for document, _ in hits)
        np.testing.assert_allclose(scores, [expected[id] for id in ids], rtol=1e-4, atol=1e-4)
        assert scores == sorted(scores, reverse=True)
        # Two lists are both looked into, and a graph of some dozens is searched whole.
        assert plan["exact"] or self.index != "flat"
        best = sorted(expected.values(), reverse=True)[: len(scores)]
        if plan["exact"] or self.index == "IVF2,Flat":
            np.testing.assert_allclose(scores, best, rtol=1e-4, atol=1e-4)

    def _score(self, vector: np.ndarray, query: np.ndarray) -> float:
        if self.metric == "l2":
            return -float(np.linalg.norm(vector.astype(np.float64) - query))
        product = float(vector.astype(np.float64) @ query)
        return product if self.metric == "ip" else product / float(np.linalg.norm(vector) * np.linalg.norm(query))

    @rule(group=groups)
    def filter(self, group: int) -> None:
        assert self.opened.ids({"group": group}) == [id for id, (_, its, _) in self.documents.items() if its == group]

    @rule()
    def save(self) -> None:
        self.opened.save()

    @rule()
    def compact(self) -> None:
        self.opened.compact()
        assert self.opened.stats().get("marked_deleted", 0) == 0

    @rule(saved=st.booleans())
    def reopen(self, saved: bool) -> None:
        if saved:
            self.opened.close()
        else:
            # As after a crash: the index file is behind.
            self.opened._database.close()
        self.store = FaissStore(self.path)
        assert (self.opened.stats()["index"], self.opened.metric) == (self.index, self.metric)

    @rule(index=st.sampled_from(["flat", "hnsw", "IVF2,Flat"]))
    def reopen_as(self, index: str) -> None:
        self.opened.close()
        self.index, self.store = index, FaissStore(self.path, index=index)

    @rule(damage=st.sampled_from(["missing", "cut", "garbage"]), saved=st.booleans())
    def damage_index(self, damage: str, saved: bool) -> None:
        if saved:
            self.opened.save()
        self.opened._database.close()
        for file in self.folder.glob("*.faiss"):
            if damage == "missing":
                file.unlink()
            else:
                data = file.read_bytes()
                file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"garbage" + data[7:])
        self.store = FaissStore(self.path)

    @precondition(lambda self: self.store is not None)
    @invariant()
    def agree(self) -> None:
        assert len(self.opened) == len(self.documents)
        found = [(str(d.id), d.page_content, d.metadata["group"]) for d in self.opened.documents()]
        assert found == [(id, text, group) for id, (text, group, _) in self.documents.items()]
        stats = self.opened.stats()
        assert stats.get("indexed", 0) + stats.get("waiting", 0) - stats.get("marked_deleted", 0) == len(self.documents)

    @precondition(lambda self: self.store is not None)
    @invariant()
    def a_reader_agrees(self) -> None:
        if self.count % 5 == 1:
            with FaissStore(self.path, read_only=True) as reader:
                hits = reader.similarity_search_by_vector(vectors_of(0, 1)[0], k=1000)
                assert sorted(str(document.id) for document in hits) == sorted(self.documents)


@contextmanager
def selectors_forced(forced: bool) -> Iterator[None]:
    """Have FAISS pass over what a filter does not admit, as it does in large stores."""
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            patch.setattr(vector_index, "_SCAN_FROM_MEMORY", 0)
            patch.setattr(vector_index, "_SCAN_FROM_FILE", 0)
        yield


StoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
