"""Many threads, tasks and processes on one store."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_llm2vec_gen import FaissStore

WRITERS, EACH, BATCH = 8, 500, 50
INDEXES = ["flat", "hnsw", "IVF2,Flat"]


def vector_of(writer: int, number: int) -> list[float]:
    return np.random.default_rng(writer * 100_000 + number).normal(size=8).tolist()


def batches(writer: int) -> list[list[int]]:
    return [list(range(start, start + BATCH)) for start in range(0, EACH, BATCH)]


def names(writer: int, numbers: list[int]) -> list[str]:
    return [f"{writer}-{number}" for number in numbers]


def check_all_there(store: FaissStore, gone: set[str]) -> None:
    expected = {f"{writer}-{number}" for writer in range(WRITERS) for number in range(EACH)} - gone
    assert len(store) == len(expected)
    assert set(store.ids()) == expected
    stats = store.stats()
    assert stats["indexed"] + stats["waiting"] - stats["marked_deleted"] == len(expected)
    sample = sorted(expected)[:: len(expected) // 150]
    for id in sample:
        writer, number = map(int, id.split("-"))
        (hit, score), *_ = store.similarity_search_with_score_by_vector(vector_of(writer, number), k=1)
        assert (hit.id, hit.page_content, hit.metadata) == (id, f"text {id}", {"writer": writer})
        assert score == pytest.approx(1.0)
    everything = store.similarity_search_by_vector([1.0] * 8, k=10_000)
    assert {str(document.id) for document in everything} == expected


@pytest.mark.parametrize("index", INDEXES)
def test_threads_add_search_and_delete_at_once(tmp_path: Path, index: str) -> None:
    writing = threading.Event()
    writing.set()
    gone: set[str] = set()

    def write(store: FaissStore, writer: int) -> None:
        for numbers in batches(writer):
            ids = names(writer, numbers)
            vectors = [vector_of(writer, number) for number in numbers]
            added = store.add_embeddings([f"text {id}" for id in ids], vectors, [{"writer": writer}] * BATCH, ids)
            assert added == ids
            store.delete([ids[3]])
            gone.add(ids[3])
            # What is written is seen at once.
            (hit, _), *_ = store.similarity_search_with_score_by_vector(vectors[5], k=1, filter={"writer": writer})
            assert hit.id == ids[5]
            assert not store.get_by_ids([ids[3]])

    def search(store: FaissStore, seed: int) -> int:
        count = 0
        while writing.is_set():
            query = vector_of(99, seed + count)
            before = len(store)
            hits = store.similarity_search_with_score_by_vector(
                query, k=10, filter={"writer": 1} if count % 2 else None
            )
            scores = [score for _, score in hits]
            assert scores == sorted(scores, reverse=True)
            assert count % 2 or len(hits) == 10 or before < 10 + WRITERS
            assert all(document.page_content == f"text {document.id}" for document, _ in hits)
            count += 1
        return count

    with FaissStore(tmp_path / "corpus.store", index=index) as store:
        with ThreadPoolExecutor(WRITERS + 2) as pool:
            searches = [pool.submit(search, store, seed) for seed in range(2)]
            writes = [pool.submit(write, store, writer) for writer in range(WRITERS)]
            try:
                for task in writes:
                    task.result(timeout=120)
            finally:
                writing.clear()
            assert all(task.result(timeout=60) > 5 for task in searches)
        check_all_there(store, gone)
    with FaissStore(tmp_path / "corpus.store", read_only=True) as store:
        check_all_there(store, gone)


class Slow(Embeddings):
    """Takes its time, as a model does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        time.sleep(self.seconds)
        return [self._vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        time.sleep(self.seconds)
        return self._vector(text)

    def _vector(self, text: str) -> list[float]:
        writer, _, number = text.removeprefix("text ").partition("-")
        return vector_of(int(writer), int(number))


async def test_tasks_add_search_and_delete_at_once(tmp_path: Path) -> None:
    gone: set[str] = set()
    with FaissStore(tmp_path / "corpus.store", Slow(0.0), index="IVF2,Flat") as store:

        async def write(writer: int) -> None:
            for numbers in batches(writer):
                ids = names(writer, numbers)
                documents = [Document(id=id, page_content=f"text {id}", metadata={"writer": writer}) for id in ids]
                assert await store.aadd_documents(documents) == ids
                await store.adelete([ids[3]])
                gone.add(ids[3])
                hits = await store.asimilarity_search(f"text {ids[5]}", k=1, filter={"writer": writer})
                assert hits[0].id == ids[5]
                assert [document.id for document in await store.aget_by_ids(ids[:5])] == [*ids[:3], ids[4]]

        await asyncio.gather(*map(write, range(WRITERS)))
        check_all_there(store, gone)


async def test_the_event_loop_goes_on_while_texts_are_embedded(tmp_path: Path) -> None:
    with FaissStore(tmp_path / "corpus.store", Slow(0.2)) as store:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                ticks.append(time.perf_counter())
                await asyncio.sleep(0.005)

        ticking = asyncio.create_task(tick())
        await store.aadd_texts([f"text 0-{number}" for number in range(6)], batch_size=2)
        await store.asimilarity_search("text 0-1")
        await store.amax_marginal_relevance_search("text 0-1")
        await store.as_retriever().ainvoke("text 0-1")
        ticking.cancel()
    assert len(ticks) > 50
    # On a busy machine a single tick may come late; an embedding on the loop would hold up one of 200 ms at each call.
    gaps = np.diff(ticks)
    assert np.quantile(gaps, 0.98) < 0.05
    assert (gaps > 0.15).sum() <= 1


# Processes

OTHER = """
import sys
from langchain_llm2vec_gen import FaissStore

store = FaissStore(sys.argv[1], read_only=sys.argv[2] == "read")
print("ready", flush=True)
for line in sys.stdin:
    command, *words = line.split()
    if command == "add":
        writer, start, count = words[0], int(words[1]), int(words[2])
        for number in range(start, start + count):
            store.add_embeddings([f"text {writer}-{number}"], [[float(number + 1), 1.0]], ids=[f"{writer}-{number}"])
        print("added", flush=True)
    elif command == "ids":
        found = store.similarity_search_by_vector([1.0, 0.0], k=1000)
        assert {d.id for d in found} == set(store.ids()), "index and file differ"
        print(*sorted(d.id for d in found), flush=True)
    elif command == "delete":
        store.delete(words)
        print("deleted", flush=True)
    elif command == "state":
        print(store.stats()["indexed"], flush=True)
store.close()
print("closed", flush=True)
"""


class Other:
    """Another process with the same store."""

    def __init__(self, path: Path, mode: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.hear() == "closed"
        assert self._process.wait(timeout=60) == 0


def found(store: FaissStore) -> list[str]:
    return sorted(str(document.id) for document in store.similarity_search_by_vector([1.0, 0.0], k=1000))


def add(store: FaissStore, writer: str, numbers: range) -> None:
    for number in numbers:
        store.add_embeddings([f"text {writer}-{number}"], [[number + 1.0, 1.0]], ids=[f"{writer}-{number}"])


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_two_processes_write_at_once_and_see_each_other(tmp_path: Path, index: str) -> None:
    path = tmp_path / "corpus.store"
    with FaissStore(path, index=index) as store:
        other = Other(path, "write")
        assert other.hear() == "ready"
        other.say("add theirs 0 60")
        add(store, "ours", range(60))
        assert other.hear() == "added"
        expected = sorted([f"ours-{number}" for number in range(60)] + [f"theirs-{number}" for number in range(60)])
        assert found(store) == expected
        assert other.ask("ids").split() == expected
        # Replaced and deleted there, seen here.
        assert other.ask("delete ours-3 theirs-4") == "deleted"
        assert other.ask("add ours 5 1") == "added"
        expected = [id for id in expected if id not in ("ours-3", "theirs-4")]
        assert found(store) == expected
        store.compact()
        add(store, "later", range(3))
        expected = sorted([*expected, *(f"later-{number}" for number in range(3))])
        assert other.ask("ids").split() == expected
        other.close()
        assert found(store) == expected
    with FaissStore(path) as store:
        assert found(store) == expected


def test_readers_share_a_store_with_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "corpus.store"
    with FaissStore(path) as store:
        add(store, "a", range(20))
        store.save()
        readers = [Other(path, "read") for _ in range(2)]
        assert [reader.hear() for reader in readers] == ["ready", "ready"]
        here = [FaissStore(path, read_only=True) for _ in range(3)]

        def check() -> None:
            expected = sorted(store.ids())
            assert all(found(reader) == expected for reader in here)
            assert all(reader.ask("ids").split() == expected for reader in readers)

        check()
        assert readers[0].ask("state") == "20"
        add(store, "b", range(20))
        check()
        store.delete(["a-3", "b-4"])
        check()
        # The file that the readers have mapped is replaced and deleted.
        store.save()
        store.compact()
        add(store, "c", range(3))
        check()
        for reader in here:
            reader.close()
        for other in readers:
            other.close()
        assert found(store) == sorted(store.ids())


def test_many_processes_may_make_the_same_store_at_once(tmp_path: Path) -> None:
    path = tmp_path / "corpus.store"
    others = [Other(path, "write") for _ in range(4)]
    assert [other.hear() for other in others] == ["ready"] * 4
    for number, other in enumerate(others):
        other.say(f"add w{number} 0 5")
    assert [other.hear() for other in others] == ["added"] * 4
    expected = sorted(f"w{writer}-{number}" for writer in range(4) for number in range(5))
    for other in others:
        assert other.ask("ids").split() == expected
    for other in others:
        other.close()


def test_threads_may_make_the_same_store_at_once(tmp_path: Path) -> None:
    for attempt in range(10):
        path = tmp_path / f"{attempt}.store"
        together = threading.Barrier(6)

        def make(path: Path = path, together: threading.Barrier = together) -> int:
            together.wait()
            with FaissStore(path) as store:
                add(store, str(threading.get_ident()), range(2))
                return len(store)

        with ThreadPoolExecutor(6) as pool:
            counts = [task.result() for task in [pool.submit(make) for _ in range(6)]]
        assert max(counts) == 12


def test_a_store_in_a_folder_that_cannot_be_written(
    tmp_path: Path, as_anyone: Callable[[Callable[[], Any]], None]
) -> None:
    folder = tmp_path / "read only"
    path = folder / "corpus.store"
    with FaissStore(path) as store:
        add(store, "a", range(5))
    expected = [f"a-{number}" for number in range(5)]
    # As copied from a store that was not closed.
    unfinished = folder / "unfinished.store"
    with FaissStore(tmp_path / "open.store") as store:
        add(store, "b", range(5))
        for suffix in ("", "-wal"):
            shutil.copy(f"{store.path}{suffix}", f"{unfinished}{suffix}")
    folder.chmod(0o555)
    path.chmod(0o444)

    def read() -> None:
        with FaissStore(path, read_only=True) as one, FaissStore(path, read_only=True) as two:
            assert found(one) == found(two) == expected
        with pytest.raises(ValueError, match=str(path)):
            FaissStore(path)
        with pytest.raises(ValueError, match="last changes"):
            FaissStore(unfinished, read_only=True)

    try:
        as_anyone(read)
    finally:
        folder.chmod(0o755)
    assert sorted(file.suffix for file in folder.iterdir()) == [".faiss", ".store", ".store", ".store-wal"]


@pytest.fixture
def as_anyone(tmp_path: Path) -> Callable[[Callable[[], Any]], None]:
    """Runs a function as a user whom permissions hold back: root is another one for that time, in a forked process."""
    if os.geteuid():
        return lambda function: function()

    def run(function: Callable[[], Any]) -> None:
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o005 and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o055)
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    return run
