"""Vector servers: pgvector and Milvus rank as a FaissStore does, and take over its vectors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("faiss")

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings

from llm2vec_gen_st.testing import tiny_model

PGVECTOR_PACKAGES = "needs a server to test with: pip install pgserver langchain-postgres"
MILVUS_PACKAGES = "needs a server to test with: pip install milvus-lite langchain-milvus"

DOCUMENTS = [
    Document("Otters hold hands while they sleep on water.", id="otter", metadata={"topic": "animal", "year": 2014}),
    Document("A swift can stay in the air for ten months.", id="swift", metadata={"topic": "animal", "year": 2016}),
    Document("Eels swim to the Sargasso Sea to spawn.", id="eel", metadata={"topic": "animal", "year": 2022}),
    Document("Moles dig twenty metres of tunnel a day.", id="mole", metadata={"topic": "animal", "year": 2009}),
    Document("Salt lowers the freezing point of water.", id="salt", metadata={"topic": "matter", "year": 2011}),
    Document("Glass is made by melting sand with soda.", id="glass", metadata={"topic": "matter", "year": 2018}),
    Document("Helium makes a voice sound higher.", id="helium", metadata={"topic": "matter", "year": 2020}),
    Document("Bronze is copper with a little tin.", id="bronze", metadata={"topic": "matter", "year": 2003}),
    Document("Der Föhn ist ein warmer Wind am Rand der Alpen.", id="föhn", metadata={"topic": "weather", "year": 2019}),
    Document("虹は太陽の反対側に見える。", id="虹", metadata={"topic": "weather", "year": 2021}),
    Document("It's hail when ice falls;\nit's sleet when it's wet.", id="o'hail", metadata={"topic": "weather"}),
    Document("Fog is a cloud that touches the ground.", id="fog", metadata={"topic": "weather", "year": 2015}),
]
QUERIES = ["Which animals travel far?", "What is mixed into metal?", "雨のあとに何が見える？"]
FILTER = {"$and": [{"topic": {"$in": ["animal", "weather"]}}, {"year": {"$gte": 2015}}]}
FOUND_BY_FILTER = {"swift", "eel", "föhn", "虹", "fog"}

Ranking = list[tuple[str, float]]


class Spy(Embeddings):
    """Counts the documents that are embedded."""

    def __init__(self, embedding: Embeddings) -> None:
        self.embedding = embedding
        self.documents = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.documents += len(texts)
        return self.embedding.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self.embedding.embed_query(text)


@dataclass(frozen=True)
class Server:
    """What differs between the two servers."""

    new_store: Callable[[str, Embeddings], Any]
    filter: Mapping[str, Any]
    id_and_cosine: Callable[[Document, float], tuple[str, float]]

    def ranking(self, store: Any, query: str, k: int, **condition: Any) -> Ranking:
        return [self.id_and_cosine(*pair) for pair in store.similarity_search_with_score(query, k=k, **condition)]


def refuse_to_open_folders(*paths: Path) -> None:
    """Run as root, pgserver makes all folders above its own and its data's readable to everyone."""
    closed = {str(above) for path in paths for above in path.parents if above.stat().st_mode & 0o005 != 0o005}
    if closed:
        pytest.skip(f"pgserver, run as root, would open {', '.join(sorted(closed))} to everyone; run as another user")


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server on a socket in a temporary folder; gives its address."""
    pgserver = pytest.importorskip("pgserver", reason=PGVECTOR_PACKAGES)
    # Not pytest's folder: its path is long for a socket, and closed to the user that root's server runs as.
    with tempfile.TemporaryDirectory(prefix="pgvector-") as folder:
        data = Path(folder) / "data"
        as_root = os.geteuid() == 0
        if as_root:
            refuse_to_open_folders(Path(pgserver.__file__).parent, Path(folder))
        try:
            yield pgserver.get_server(data, cleanup_mode=None).get_uri()
        finally:
            # Its own clean-up forgets a server whose start took too long.
            if (data / "postmaster.pid").exists():
                pgserver.pg_ctl(["-w", "-m", "fast", "stop"], pgdata=data, user="pgserver" if as_root else None)


@pytest.fixture(scope="module")
def pgvector() -> Iterator[Server]:
    langchain_postgres = pytest.importorskip("langchain_postgres", reason=PGVECTOR_PACKAGES)
    with postgres() as address:
        engine = langchain_postgres.PGEngine.from_connection_string(
            address.replace("postgresql://", "postgresql+psycopg://")
        )

        def new_store(name: str, embedding: Embeddings) -> Any:
            engine.init_vectorstore_table(
                name,
                vector_size=len(embedding.embed_query("")),
                id_column=langchain_postgres.Column("langchain_id", "TEXT"),
            )
            return langchain_postgres.PGVectorStore.create_sync(engine, embedding, name)

        try:
            yield Server(
                new_store,
                filter={"filter": FILTER},
                id_and_cosine=lambda document, distance: (str(document.id), 1 - distance),
            )
        finally:
            asyncio.run(engine.close())


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    langchain_milvus = pytest.importorskip("langchain_milvus", reason=MILVUS_PACKAGES)
    server_manager = pytest.importorskip("milvus_lite.server_manager", reason=MILVUS_PACKAGES)
    path = tmp_path_factory.mktemp("milvus") / "vectors.db"

    def new_store(name: str, embedding: Embeddings) -> Any:
        return langchain_milvus.Milvus(
            embedding,
            collection_name=name,
            connection_args={"uri": str(path)},
            index_params={"metric_type": "COSINE", "index_type": "AUTOINDEX", "params": {}},
            consistency_level="Strong",
            enable_dynamic_field=True,
        )

    try:
        yield Server(
            new_store,
            filter={"expr": 'topic in ["animal", "weather"] and year >= 2015'},
            id_and_cosine=lambda document, score: (document.metadata["pk"], score),
        )
    finally:
        server_manager.server_manager_instance.release_server(str(path))
        shutil.rmtree(path.parent)


@pytest.fixture(scope="module", params=["pgvector", "milvus"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def embedding() -> Embeddings:
    return LLM2VecGenEmbeddings(tiny_model())


@pytest.fixture(scope="module")
def local(embedding: Embeddings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaissStore]:
    with FaissStore(tmp_path_factory.mktemp("local") / "corpus.store", embedding, metric="cosine") as store:
        store.add_documents(DOCUMENTS)
        yield store


def local_ranking(store: FaissStore, query: str, k: int, filter: dict[str, Any] | None = None) -> Ranking:
    found = store.similarity_search_with_score(query, k=k, filter=filter)
    return [(str(document.id), score) for document, score in found]


def assert_same(found: Ranking, expected: Ranking) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def assert_searches_agree(server: Server, store: Any, local: FaissStore) -> None:
    for query in QUERIES:
        assert_same(server.ranking(store, query, len(DOCUMENTS)), local_ranking(local, query, len(DOCUMENTS)))
        assert_same(server.ranking(store, query, 3), local_ranking(local, query, 3))
        filtered = server.ranking(store, query, len(DOCUMENTS), **server.filter)
        assert {name for name, _ in filtered} == FOUND_BY_FILTER
        assert_same(filtered, local_ranking(local, query, len(DOCUMENTS), FILTER))


def test_a_server_ranks_and_filters_as_a_faiss_store_does(
    server: Server, embedding: Embeddings, local: FaissStore
) -> None:
    spy = Spy(embedding)
    store = server.new_store("embedded", spy)
    ids = store.add_texts(
        [document.page_content for document in DOCUMENTS],
        [dict(document.metadata) for document in DOCUMENTS],
        ids=[document.id for document in DOCUMENTS],
    )
    assert ids == [document.id for document in DOCUMENTS]
    assert spy.documents == len(DOCUMENTS)
    assert_searches_agree(server, store, local)


def test_an_exported_store_moves_to_a_server_without_embedding_again(
    server: Server, embedding: Embeddings, local: FaissStore, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert local.export_parquet(tmp_path / "corpus.parquet") == len(DOCUMENTS)
    spy = Spy(embedding)
    store = server.new_store("moved", spy)
    # Several batches, as a file that does not fit into memory would be moved.
    for batch in parquet.ParquetFile(tmp_path / "corpus.parquet").iter_batches(5):
        rows = batch.to_pydict()
        store.add_embeddings(
            rows["text"], rows["embedding"], [json.loads(text) for text in rows["metadata"]], ids=rows["id"]
        )
    assert_searches_agree(server, store, local)
    assert spy.documents == 0
    by_id = {document.id: document for document in DOCUMENTS}
    for document, score in store.similarity_search_with_score(QUERIES[0], k=len(DOCUMENTS)):
        name, _ = server.id_and_cosine(document, score)
        assert document.page_content == by_id[name].page_content
        assert {key: value for key, value in document.metadata.items() if key != "pk"} == by_id[name].metadata
