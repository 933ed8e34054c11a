"""On Ray: what is written is what one process writes, a dead worker costs nothing, and either goes on for the other."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from ray_llm2vec_gen import encode_corpus, write_responses
from ray_llm2vec_gen.embeddings import CorpusWorker
from ray_llm2vec_gen.responses import ResponseWorker

from llm2vec_gen_st import corpus as plain_corpus
from llm2vec_gen_st import responses as plain_responses
from llm2vec_gen_st.corpus.plan import plan_corpus
from llm2vec_gen_st.responses.store import plan_responses
from llm2vec_gen_st.testing import saved_base, saved_model

psutil = pytest.importorskip("psutil")
ROWS = 1600
EVERY = ("ok", "cut_off", "empty")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("students") / "student", base)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = ({"id": f"d{number}", "text": f"{number} " + "bears " * (number % 60)} for number in range(ROWS))
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def vectors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in plain_corpus.finished_parts(folder):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            assert row["id"] not in found
            found[row["id"]] = np.array(row["embedding"], np.float32)
    return found


def actor_processes() -> list[Any]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and "MapWorker" in " ".join(process.cmdline())
    ]


def test_workers_finish_parts_and_leave_those_that_are_there(
    base: Path, saved: Path, corpus: Path, tmp_path: Path
) -> None:
    """What an actor holds, without Ray around it."""
    plan = plan_corpus(corpus, tmp_path / "v", rows_per_part=800, progress=False)
    worker = CorpusWorker(plan, tmp_path / "v", str(saved), None, "document", 32)
    assert [worker.finish(np.int64(number)) for number in (1, 0)] == [800, 800]
    written = {path: path.stat().st_mtime_ns for path in plain_corpus.finished_parts(tmp_path / "v")}
    again = CorpusWorker(plan, tmp_path / "v", str(saved), None, "document", 32)
    assert again.finish(0) == 800
    assert {path: path.stat().st_mtime_ns for path in written} == written

    answers = plan_responses(["a", "b", "c"], batch_size=2, max_new_tokens=3)
    writer = ResponseWorker(tmp_path / "r", answers.manifest(), answers.settings, str(base), "transformers")
    parts = [{"number": number, "batch": batch} for number, batch in enumerate(answers.batches)]
    assert [writer.finish(part) for part in parts] == [2, 1]
    assert len(plain_responses.read_responses(tmp_path / "r", include=EVERY)) == 3


def test_what_is_wrong_with_the_corpus_is_told_before_ray_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "text": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 2: there is no id"):
        encode_corpus("nobody", tmp_path / "corpus.jsonl", tmp_path / "v", progress=False)


@pytest.mark.slow
def test_one_dead_worker_does_not_stop_the_job(cluster: Any, saved: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v"
    killed: list[dict[str, int]] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            parts = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
            if len(parts) >= 20:
                os.kill(actor_processes()[0].pid, signal.SIGKILL)
                killed.append(parts)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill_one)
    thread.start()
    encode_corpus(str(saved), corpus, folder, actors=2, rows_per_part=4, progress=False)
    thread.join()
    assert killed, "no worker was killed"
    assert 20 <= len(killed[0]) < ROWS // 4, "the job was over before a worker was killed"
    assert {name: (folder / name).stat().st_mtime_ns for name in killed[0]} == killed[0], "a part was written twice"
    found = vectors(folder)
    assert len(found) == ROWS
    alone = vectors(plain_corpus.encode_corpus(str(saved), corpus, tmp_path / "alone", rows_per_part=4, progress=False))
    assert found.keys() == alone.keys()
    np.testing.assert_allclose([found[name] for name in alone], list(alone.values()), atol=1e-5)


@pytest.mark.slow
def test_ray_goes_on_where_one_process_stopped_and_the_other_way_round(
    cluster: Any, base: Path, saved: Path, corpus: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rows_per_part": 200, "progress": False}
    folder = plain_corpus.encode_corpus(str(saved), corpus, tmp_path / "v", shard="0/2", **options)
    first = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert len(first) == 4
    encode_corpus(str(saved), corpus, folder, **options)
    assert len(vectors(folder)) == ROWS
    assert {name: (folder / name).stat().st_mtime_ns for name in first} == first
    with pytest.raises(RuntimeError, match="holds embeddings made differently"):
        encode_corpus(str(saved), corpus, folder, prompt_name="query", **options)

    queries = [f"Who is {number}?" for number in range(20)]
    settings: dict[str, Any] = {"batch_size": 4, "max_new_tokens": 6, "progress": False}
    answered = write_responses(queries, tmp_path / "r", str(base), **settings)
    whole = plain_responses.read_responses(answered, include=EVERY).to_list()
    (answered / "part-000002.parquet").unlink()
    plain_responses.write_responses(queries, answered, str(base), **settings)
    assert plain_responses.read_responses(answered, include=EVERY).to_list() == whole
    assert sorted(row["query"] for row in whole) == sorted(queries)
