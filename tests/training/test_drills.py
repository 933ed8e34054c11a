"""Training that ends badly goes on: killed anywhere, with a full disk, a damaged file, or a clock that goes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm2vec_gen_st.host_checkpoints import check_checkpoint, last_checkpoint
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train
from llm2vec_gen_st.training.trainer import StudentTrainer

from .tiny import TINY, rows

KILLED = (
    "teacher", "ridge start", "step", "optimizer file", "state file", "rotation", "ridge end", "log",
    "half a student", "clock goes back",
)  # fmt: skip
FULL = ("no room for weights", "no room for the optimizer", "no room for the student")


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every drill, in one process that forks."""
    folder = tmp_path_factory.mktemp("drills")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "drill_worker.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    assert results["straight"]["first"] == [0, ""], results["straight"]["first"][1]
    return folder, results


def values(folder: Path, key: str) -> list[float]:
    lines = (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def assert_like_the_straight_run(folder: Path, place: str) -> None:
    for key, count in (("alignment", 8), ("reconstruction", 4), ("held_out_0_relative_distance", 1)):
        found, expected = values(folder / place, key), values(folder / "straight", key)
        assert len(expected) == count
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"{place}: {key}")
    left = {path.name for path in (folder / place / "training").iterdir()}
    assert left == {"labels.sqlite", "log.jsonl", "loss.png", "recipe.json", "ridge_end.json", "ridge_start.json"}
    assert not list((folder / place).rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("place", KILLED)
def test_a_killed_run_goes_on_as_if_it_had_not_been(drilled: tuple[Path, dict[str, Any]], place: str) -> None:
    folder, results = drilled
    assert results[place]["first"][0] == -9, results[place]["first"][1]
    assert results[place]["second"] == [0, ""], results[place]["second"][1]
    assert_like_the_straight_run(folder, place)


@pytest.mark.slow
def test_a_clock_that_goes_back_does_not_cost_the_newest_checkpoint(drilled: tuple[Path, dict[str, Any]]) -> None:
    left = drilled[1]["clock goes back"]["left"]
    assert [Path(path).name for path in left] == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.slow
@pytest.mark.parametrize("place", FULL)
def test_a_full_disk_is_said_and_nothing_before_it_is_lost(drilled: tuple[Path, dict[str, Any]], place: str) -> None:
    folder, results = drilled
    code, message = results[place]["first"]
    assert code == 3, message
    assert "make room" in message
    assert "repeat the command" in message
    kept = [Path(path).name for path in results[place]["left"]]
    if place == "no room for the student":
        assert "could not be saved" in message
        assert "checkpoint-8" in kept
    else:
        assert "checkpoint-4 could not be written" in message
        assert "go on from checkpoint-2" in message
        assert kept == ["checkpoint-2"]
    assert results[place]["second"] == [0, ""], results[place]["second"][1]
    assert_like_the_straight_run(folder, place)


def _stopped(folder: Path) -> Path:
    """A run that stopped behind its fifth step; returns the folder of its checkpoints."""
    step, done = StudentTrainer.training_step, []

    def stopping(self: StudentTrainer, *args: Any, **kwargs: Any) -> Any:
        done.append(1)
        if len(done) > 5:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StudentTrainer, "training_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            _go(folder)
    return folder / "training" / "checkpoints" / "whole"


def _go(folder: Path) -> None:
    train(rows(), folder, base=tiny_backbone(), recipe=TINY, max_steps=6, save_steps=2, progress=False)


def test_a_damaged_file_of_a_checkpoint_is_named_with_the_way_on(tmp_path: Path) -> None:
    checkpoints = _stopped(tmp_path)
    newest = last_checkpoint(checkpoints)
    assert newest is not None
    assert newest.name == "checkpoint-4"
    check_checkpoint(newest)
    for path in sorted(newest.rglob("*")):
        if path.suffix not in (".pt", ".pth", ".safetensors"):
            continue
        whole = path.read_bytes()
        middle = len(whole) // 2
        damages = {"cut": whole[:middle], "empty": b""}
        if path.name == "optimizer.pt":
            # Inside a tensor; small files are padding for the most part, and safetensors files have no checksums.
            damages["flipped"] = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
        for damage in damages.values():
            path.write_bytes(damage)
            with pytest.raises(
                CheckpointError, match=r"Delete the folder .*checkpoint-4 .*go on from checkpoint-2"
            ) as told:
                check_checkpoint(newest)
            assert str(path) in str(told.value)
        path.write_bytes(whole)
    (newest / "optimizer.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is damaged"):
        _go(tmp_path)
    for path in newest.rglob("*"):
        if path.is_file():
            path.unlink()
    _go(tmp_path)
    _go(tmp_path / "straight")
    np.testing.assert_allclose(values(tmp_path, "loss"), values(tmp_path / "straight", "loss"), atol=1e-4)


def test_the_first_damaged_checkpoint_leaves_the_beginning(tmp_path: Path) -> None:
    checkpoints = _stopped(tmp_path)
    (checkpoints / "checkpoint-4" / "trainer_state.json").write_text('{"global_step"')
    only = checkpoints / "checkpoint-2"
    assert last_checkpoint(checkpoints) == only, "one whose state was not written to its end does not count"
    (only / "rng_state.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match="start from the beginning of this stage"):
        check_checkpoint(only)


def test_a_damaged_cache_of_the_teacher_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "labels.sqlite"
    cache.write_bytes(b"not a database at all" * 100)
    with pytest.raises(OSError, match=r"labels\.sqlite.*delete it"):
        teacher_embeddings(["wax"], "self", backbone=tiny_backbone(), cache=cache, progress=False)
