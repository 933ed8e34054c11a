"""LangChain's own tests of a vector store, for every kind of index."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from langchain_core.vectorstores import VectorStore
from langchain_llm2vec_gen import FaissStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests


class OnDisk(VectorStoreIntegrationTests):
    index: str

    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Generator[VectorStore, None, None]:
        with FaissStore(tmp_path / "corpus.store", self.get_embeddings(), index=self.index) as store:
            yield store


class TestFlat(OnDisk):
    index = "flat"


class TestHNSW(OnDisk):
    index = "hnsw"


class TestUntrainedIVF(OnDisk):
    index = "ivf"


class TestTrainedIVF(OnDisk):
    index = "IVF2,Flat"

    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Generator[VectorStore, None, None]:
        with FaissStore(tmp_path / "corpus.store", self.get_embeddings(), index=self.index) as store:
            ids = [str(number) for number in range(80)]
            store.add_texts([f"filler {id}" for id in ids], ids=ids)
            assert store.stats()["indexed"] == 80
            store.delete(ids)
            yield store


class TestTemporary(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissStore.from_texts([], self.get_embeddings())


# What is here for others to build on is no test itself.
del OnDisk, VectorStoreIntegrationTests
