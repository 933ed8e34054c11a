"""Kills, full disks, damaged files and wrong clocks while parts are written: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.corpus import encode_corpus, finished_parts
from llm2vec_gen_st.files import read_rows
from llm2vec_gen_st.parts import PartFolder
from llm2vec_gen_st.responses import read_responses, write_responses

from ..forking import server_of_workers

WORKER = Path(__file__).with_name("parts_worker.py")
KINDS = ["responses", "corpus"]
EVERY = ("ok", "cut_off", "empty", "non_finite")
KILLS = 12  # of each kind
PARTS = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = ({"id": f"d{n}", "text": f"{n} " + "seals " * (n % 9)} for n in range(90))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with server_of_workers(WORKER) as process:
        yield process


def start(server: subprocess.Popen[str], kind: str, folder: Path, corpus: Path) -> int:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{kind}\t{folder}\t{corpus}\n")
    server.stdin.flush()
    word, child = server.stdout.readline().split()
    assert word == "worker"
    return int(child)


def wait(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    word, status = server.stdout.readline().split()
    assert word == "ended"
    return int(status)


def parts(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}


def write(kind: str, student: LLM2VecGen, corpus: Path, folder: Path, rows: int = 8) -> None:
    """Three parts, with a tiny model of this process."""
    if kind == "corpus":
        source = folder.with_name(f"{folder.name}.jsonl")
        if not source.exists():
            source.write_text("\n".join(corpus.read_text().splitlines()[: 3 * rows]))
        encode_corpus(student, source, folder, rows_per_part=rows, keep=["text"], progress=False)
    else:
        queries = [f"query {number}" for number in range(3 * rows)]
        write_responses(queries, folder, student.backbone, batch_size=rows, max_new_tokens=3, progress=False)


def read(kind: str, folder: Path) -> list[dict[str, Any]]:
    if kind == "corpus":
        return [row for path in finished_parts(folder) for row in read_rows(path)]
    found: list[dict[str, Any]] = read_responses(folder, include=EVERY).to_list()
    return found


# Kills


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_time_and_started_again(
    server: subprocess.Popen[str], corpus: Path, tmp_path: Path, kind: str
) -> None:
    start(server, kind, tmp_path / "whole", corpus)
    assert wait(server) == 0
    expected = read(kind, tmp_path / "whole")
    assert len({row["id"] for row in expected}) == len(expected) == 90
    chance = random.Random(kind)
    folder, kept, kills = tmp_path / "broken", dict[str, int](), 0
    for attempt in range(KILLS):
        child = start(server, kind, folder, corpus)
        # At its start, between parts and, most of the time, somewhere within one.
        goal = len(kept) + chance.choice([0, 0, 1, 1, 2, 4])
        while attempt and len(parts(folder)) < min(goal, PARTS):
            time.sleep(0.0005)
        time.sleep(chance.random() * (0.2 if not attempt else 0.01))
        # It may have ended by itself; its exit status tells.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = wait(server)
        assert status in (0, -signal.SIGKILL), "it failed by itself"
        kills += status == -signal.SIGKILL
        found = parts(folder)
        assert {name: found[name] for name in kept} == kept, "a part was written twice"
        assert all(read_rows(folder / name) for name in found), "half a part is there"
        kept = found
    assert kills >= KILLS // 2
    start(server, kind, folder, corpus)
    assert wait(server) == 0
    assert read(kind, folder) == expected
    assert {name: when for name, when in parts(folder).items() if name in kept} == kept


# Full disks


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_no_half_part_and_says_what_to_do(
    student: LLM2VecGen, corpus: Path, tmp_path: Path, kind: str
) -> None:
    """The system itself refuses to write on, in the middle of the part."""
    folder = tmp_path / "v"
    write(kind, student, corpus, folder)
    (folder / "part-000001.parquet").unlink()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with files_of_at_most(700), pytest.raises(OSError, match="there is no room for it") as caught:
        write(kind, student, corpus, folder)
    assert caught.value.errno == errno.EFBIG
    assert f"{folder / 'part-000001.parquet'} could not be written" in str(caught.value)
    assert "make room and run the same command again" in str(caught.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match=r"1 of 3 parts are missing, the first is part-000001\.parquet"):
        read(kind, folder)
    write(kind, student, corpus, folder)
    assert len({row["id"] for row in read(kind, folder)}) == 24


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_only_when_it_is_flushed(
    student: LLM2VecGen, corpus: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems tell so late; of the first call not even a manifest may be left."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no room for it") as caught:
        write(kind, student, corpus, tmp_path / "v")
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "v").iterdir())
    write(kind, student, corpus, tmp_path / "v")
    assert len(read(kind, tmp_path / "v")) == 24


# Damaged files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["cut", "emptied", "swapped"])
def test_a_damaged_part_is_named_by_readers_and_written_anew_by_the_same_call(
    student: LLM2VecGen, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: str
) -> None:
    folder = tmp_path / "v"
    write(kind, student, corpus, folder)
    expected, part = read(kind, folder), folder / "part-000001.parquet"
    whole = part.read_bytes()
    if damage == "swapped":
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(part).slice(1), part)
    else:
        part.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    said = "it has 7 rows where 8 were written" if damage == "swapped" else "not a readable parquet file"
    with pytest.raises(ValueError, match=rf"part-000001\.parquet: {said}.* Delete the file and run the same command"):
        read(kind, folder)
    others = {name: when for name, when in parts(folder).items() if name != part.name}
    with caplog.at_level(logging.WARNING):
        write(kind, student, corpus, folder)
    assert f"{part}: {said}" in caplog.text
    assert "written anew" in caplog.text
    assert read(kind, folder) == expected
    assert {name: when for name, when in parts(folder).items() if name != part.name} == others


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_within_a_part_is_found_when_it_is_read(
    student: LLM2VecGen, corpus: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "v"
    write(kind, student, corpus, folder)
    expected, part = read(kind, folder), folder / "part-000002.parquet"
    column = pyarrow.parquet.read_metadata(part).row_group(0).column(0)
    place = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size // 2
    damaged = bytearray(part.read_bytes())
    damaged[place] ^= 0x10
    part.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"part-000002\.parquet: not a readable parquet file"):
        read(kind, folder)
    part.unlink()
    write(kind, student, corpus, folder)
    assert read(kind, folder) == expected


@pytest.mark.parametrize("name", ["responses.json", "corpus.json", "encoder.json"])
def test_a_damaged_manifest_is_named(student: LLM2VecGen, corpus: Path, tmp_path: Path, name: str) -> None:
    kind = "responses" if name == "responses.json" else "corpus"
    folder = tmp_path / "v"
    write(kind, student, corpus, folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    before = parts(folder)
    with pytest.raises(ValueError, match=rf"{name}: damaged .*Put it back from a copy"):
        write(kind, student, corpus, folder)
    assert parts(folder) == before


def test_two_that_begin_a_folder_at_the_same_instant_agree_or_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest appears between the look for it and the writing of it."""
    (tmp_path / "m.json").write_text('{"size": 1}')
    monkeypatch.setattr(Path, "exists", lambda _: False)
    folder = PartFolder(tmp_path, "parts")
    folder.claim("m.json", {"size": 1})
    with pytest.raises(ValueError, match="size: 1 there, 2 now"):
        folder.claim("m.json", {"size": 2})
    assert (tmp_path / "m.json").read_text() == '{"size": 1}'
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


# Clocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_that_goes_back_decides_nothing(
    student: LLM2VecGen, corpus: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "v"
    hours = itertools.count(0, -3600)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(hours))
    write(kind, student, corpus, folder)
    expected = read(kind, folder)
    (folder / "part-000001.parquet").unlink()
    for name, when in (("part-000000.parquet", 0), ("part-000002.parquet", 2**32)):
        os.utime(folder / name, (when, when))
    for path in folder.glob("*.json"):
        os.utime(path, (2**32, 2**32))
    if kind == "corpus":
        os.utime(folder.with_name("v.jsonl"), (2**32 - 1, 2**32 - 1))
    kept = parts(folder)
    write(kind, student, corpus, folder)
    assert read(kind, folder) == expected
    assert {name: when for name, when in parts(folder).items() if name in kept} == kept
