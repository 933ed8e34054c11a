"""Killed processes and damaged files: the store opens as it was before or after, or says what is wrong."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.store import StoreError
from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.vector_index import VectorIndex

from ..forking import server_of_workers
from . import stores

WORKER = Path(__file__).with_name("store_worker.py")
INDEXES = ["flat", "hnsw", "IVF2,Flat"]
KILLS = 18  # of each kind of index


@pytest.fixture(scope="module")
def scripted() -> ModuleType:
    """The worker's script, to foretell what it does."""
    specification = importlib.util.spec_from_file_location("store_worker", WORKER)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with server_of_workers(WORKER) as process:
        yield process


class Work:
    """One worker, from its first line to its death."""

    def __init__(self, server: subprocess.Popen[str], index: str, step: int, path: Path) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._lines = server.stdout
        self.started, self.done = -1, -1
        self.kind = "open"
        self.child = 0
        server.stdin.write(f"{index} {step} {path}\n")
        server.stdin.flush()
        # The parent's and the worker's lines may come in any order.
        while not self.child:
            self.next()

    def next(self) -> str:
        """Read one line; empty when the worker has ended."""
        line = self._lines.readline().split()
        assert line, "the server of workers has ended"
        if line[0] == "worker":
            self.child = int(line[1])
        elif line[0] == "start":
            self.kind, self.started = line[1], int(line[2])
        elif line[0] == "done":
            self.done = int(line[2])
        return "" if line[0] == "ended" else " ".join(line)

    def kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        while self.next():
            pass


def state_of(store: FaissStore) -> dict[str, tuple[str, int]]:
    return {str(document.id): (document.page_content, document.metadata["step"]) for document in store.documents()}


def check(store: FaissStore, documents: dict[str, tuple[str, np.ndarray]]) -> None:
    """Every document is found by its own vector, and nothing else is."""
    stats = store.stats()
    if documents:
        assert stats["indexed"] + stats["waiting"] - stats["marked_deleted"] == len(documents) == len(store)
    for id, (text, vector) in documents.items():
        (hit, score), *_ = store.similarity_search_with_score_by_vector(vector, k=1)
        assert (hit.id, hit.page_content) == (id, text)
        assert score == pytest.approx(1.0)
    everything = store.similarity_search_by_vector(np.ones(8), k=1000)
    assert sorted(str(document.id) for document in everything) == sorted(documents)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
@pytest.mark.parametrize("index", INDEXES)
def test_a_killed_process_leaves_the_old_or_the_new_state(
    tmp_path: Path, index: str, server: subprocess.Popen[str], scripted: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(index)
    path = tmp_path / "corpus.store"
    documents: dict[str, tuple[str, np.ndarray]] = {}
    step = 0
    interrupted: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for attempt in range(KILLS):
        aim = ["add", "save", "delete", "compact", "open", "add"][attempt % 6]
        work = Work(server, index, step, path)
        if aim != "open":
            while work.kind != aim or work.started == work.done:
                assert work.next(), "the worker has ended by itself"
        time.sleep(chance.uniform(0, 0.015))
        work.kill()
        while step <= work.done:
            documents = scripted.after(step, documents)
            step += 1
        pending = scripted.after(step, documents) if work.started == step else documents
        interrupted[work.kind if work.started > work.done or work.kind == "open" else "between"] += 1
        if attempt % 2 and path.exists() and path.stat().st_size:
            # A reader changes nothing, so that the next worker finds the files as the killed one left them.
            store = FaissStore(path, read_only=True)
        else:
            store = FaissStore(path, index=index)
        with store:
            found = state_of(store)
            old, new = (
                {id: (text, int(text.rpartition(" ")[2])) for id, (text, _) in state.items()}
                for state in (documents, pending)
            )
            assert found in (old, new), f"neither old nor new after a kill during {work.kind} {work.started}"
            if found == new and found != old:
                outcomes["new"] += 1
            elif old != new:
                outcomes["old"] += 1
            documents = pending if found == new else documents
            step += work.started == step and found == new
            check(store, documents)
    # The test is of no use unless most kills came in the midst of something.
    assert interrupted.total() - interrupted["between"] >= KILLS // 2, interrupted
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with FaissStore(path, index=index) as store:
        store.save()
        check(store, documents)
    leftovers = {file.name for file in tmp_path.iterdir()} - {path.name}
    assert len(leftovers) <= 1, leftovers


# Damaged files


def filled(path: Path, count: int = 100, index: str = "flat", seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    with FaissStore(path, index=index) as store:
        ids = [str(number) for number in range(count)]
        store.add_embeddings([f"{id} of step {seed}" for id in ids], vectors, [{"step": seed}] * count, ids)
    return vectors


def index_file(path: Path) -> Path:
    (file,) = path.parent.glob(f"{path.name}.*.faiss")
    return file


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite_with(data: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(data)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def swap(file: Path) -> None:
    """Another store's index, of the same kind and size."""
    other = file.parent / "other" / "corpus.store"
    filled(other, index="hnsw" if "hnsw" in file.parent.name else "flat", seed=1)
    shutil.copy(index_file(other), file)


DAMAGES = {
    "missing": Path.unlink,
    "cut": cut,
    "empty": overwrite_with(b""),
    "garbage": overwrite_with(b"garbage " * 1000),
    "flipped": flip,
    "swapped": swap,
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("index", INDEXES)
def test_a_damaged_index_file_is_built_anew_and_said_so(
    tmp_path: Path, index: str, damage: str, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "corpus.store"
    vectors = filled(path, index=index)
    DAMAGES[damage](index_file(path))
    documents = {str(row): (f"{row} of step 0", vector) for row, vector in enumerate(vectors)}
    with FaissStore(path, read_only=read_only) as store:
        check(store, documents)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "built anew" in record.getMessage()
    assert path.name in record.getMessage()
    caplog.clear()
    if not read_only:
        # Mended for good.
        with FaissStore(path) as store:
            check(store, documents)
        assert not caplog.records


def test_a_change_that_the_index_cannot_take_over_is_written_once_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Raised, the error would have the caller add the same texts again, under new ids."""
    vectors = stores.normal(12, 8)
    store = stores.filled(tmp_path / "s", vectors[:8])
    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "add", _no_memory)
        store.add_embeddings(["a", "b", "c", "d"], vectors[8:], ids=list("abcd"))
    assert "could not take over a change (MemoryError" in caplog.text
    assert len(store.ids()) == 12
    assert stores.found(store, vectors[9], 1) == ["b"]
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "remove", _no_memory)
        store.delete(["b"])
    assert "could not take over a change" in caplog.text
    assert "b" not in stores.found(store, vectors[9], 12)
    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "add", _no_memory)
        store.add_embeddings(["e"], vectors[:1], ids=["e"])
        with pytest.raises(MemoryError):
            stores.found(store, vectors[0])


def _no_memory(*_: Any) -> None:
    raise MemoryError("no room for vectors")


def test_a_file_that_others_have_made_smaller_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "s", 8)
    measure = Database._written_bytes
    larger = iter([8192, 0])
    monkeypatch.setattr(Database, "_written_bytes", lambda self: measure(self) + next(larger))
    assert len(FaissStore(tmp_path / "s").ids()) == 8


def test_an_older_copy_of_the_index_file_is_not_taken_for_the_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "corpus.store"
    filled(path)
    old = index_file(path).read_bytes()
    vectors = filled(path, seed=1)
    index_file(path).write_bytes(old)
    with FaissStore(path) as store:
        check(store, {str(row): (f"{row} of step 1", vector) for row, vector in enumerate(vectors)})
    assert "built anew" in caplog.text


def foreign(file: Path) -> None:
    file.unlink()
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE documents (row INTEGER PRIMARY KEY, text TEXT)")
    connection.commit()
    connection.close()


def newer(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 1000")
    connection.commit()
    connection.close()


def without_head(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(b"\0" * 100 + data[100:])


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "damaged"),
        (lambda file: os.truncate(file, 50), "not a store"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "damaged"),
        (overwrite_with(b"xy"), "not a store"),
        (overwrite_with(b"not a database " * 1000), "not a store"),
        (without_head, "not a store"),
        (foreign, "not a store of this package"),
        (newer, "newer version"),
    ],
    ids=["half", "head only", "last byte", "two bytes", "garbage", "without head", "foreign", "newer"],
)
def test_a_damaged_or_foreign_store_is_refused_and_left_alone(
    tmp_path: Path, damage: Callable[[Path], Any], told: str, read_only: bool
) -> None:
    path = tmp_path / "corpus.store"
    filled(path, 500)
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=told) as refusal:
        FaissStore(path, read_only=read_only)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("part", [0.2, 0.65, 0.8])
def test_destroyed_pages_are_reported_as_damage(tmp_path: Path, part: float) -> None:
    path = tmp_path / "corpus.store"
    filled(path, 500)
    data = bytearray(path.read_bytes())
    start = int(len(data) * part) // 8192 * 8192
    data[start : start + 8192] = random.Random(0).randbytes(8192)
    path.write_bytes(data)
    index_file(path).unlink()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="damaged") as refusal:
        use_all_of(path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def use_all_of(path: Path) -> None:
    with FaissStore(path, read_only=True) as store:
        store.get_by_ids(store.ids())
        store.similarity_search_by_vector(np.ones(8), k=500)


def test_a_folder_or_nothing_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there\.store"):
        FaissStore(tmp_path / "there.store", read_only=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match="cannot be used"):
        FaissStore(tmp_path)
    (tmp_path / "empty.store").touch()
    with pytest.raises(StoreError, match="empty"):
        FaissStore(tmp_path / "empty.store", read_only=True)
    with FaissStore(tmp_path / "empty.store") as store:
        assert len(store) == 0
