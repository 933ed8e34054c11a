"""Several processes train one student: as one process would, with one of them writing, and going on after a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.testing import saved_base

from .tiny import rows

pytestmark = pytest.mark.slow

TESTS = str(Path(__file__).parent.parent)
# Both stages, both ridge regressions, a teacher, and held-out queries: what the built-in models' recipe does.
RECIPE = {
    "thought_tokens": 4, "compression_tokens": 4, "learning_rate": 1e-3, "warmup_steps": 0, "epochs": 100,
    "max_steps": 8, "dtype": "float32", "logging_steps": 1, "save_steps": 4, "max_seq_length": 128,
    "max_response_tokens": 24, "init": "ridge", "recon_weight": 0.0, "recon_steps": 3, "ridge_refit": True,
    "held_out": 8, "eval_steps": 4,
}  # fmt: skip

# Runs the public command, perhaps stops, and keeps what each process has in memory and writes.
SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from transformers import TrainerCallback
from llm2vec_gen_st.training import run as run_module, trainer as trainer_module
from safetensors.torch import save_file

rank = os.environ.get("RANK", "0")
out = Path({out!r})
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if {stop} and state.global_step == {stop} and "whole" in args.output_dir:
            os._exit(9)

init = trainer_module.StudentTrainer.__init__
def with_stop(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self.add_callback(Stop())
trainer_module.StudentTrainer.__init__ = with_stop
train = run_module.train
def kept(*args, **kwargs):
    model = train(*args, **kwargs)
    trained = {{n: p.detach().contiguous() for n, p in model.named_parameters() if "llm" not in n or "lora_" in n}}
    save_file(trained, out.parent / f"{{out.name}}-{{rank}}.safetensors")
    return model
import llm2vec_gen_st.training
llm2vec_gen_st.training.train = kept
opened = open(out.parent / f"{{out.name}}-written-{{rank}}", "a")
def audit(event, args):
    # Renames and removals as well as writes; sqlite, the shared cache, opens its file itself.
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and str(out) in str(args[0]):
        opened.write(str(args[0]) + chr(10)); opened.flush()
    if event in ("os.rename", "os.remove", "shutil.rmtree", "os.rmdir") and str(out) in str(args[0]):
        opened.write(str(args[0]) + chr(10)); opened.flush()
sys.addaudithook(audit)
from llm2vec_gen_st.cli import app
app(["train", {data!r}, "--output", {out!r}, "--base", {base!r}, "--teacher", "self", "--recipe", {recipe!r},
     "--set", "batch_size={batch}", *{more!r}])
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, data and a recipe in files."""
    folder = tmp_path_factory.mktemp("work")
    saved_base(folder / "base")
    data = rows(48).remove_columns("label")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    return folder


def launched(
    work: Path, name: str, processes: int, batch: int, *, stop: int = 0, more: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    script = work / f"{name}.py"
    script.write_text(
        SCRIPT.format(
            tests=TESTS, out=str(work / name), data=str(work / "rows.jsonl"), base=str(work / "base"),
            recipe=str(work / "recipe.json"), batch=batch, stop=stop, more=list(more),
        )
    )  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # Nothing else is set: what the README says has to be enough.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    return subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), str(script)],
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def parameters(work: Path, name: str, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(work / f"{name}-{rank}.safetensors")
    return found


def log(work: Path, name: str) -> list[dict[str, Any]]:
    lines = (work / name / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def one(work: Path) -> str:
    """The run of one process, of twice the batch."""
    done = launched(work, "one", 1, 8)
    assert done.returncode == 0, done.stderr[-3000:]
    return "one"


@pytest.fixture(scope="module")
def two(work: Path) -> tuple[str, str]:
    """The run of two processes, and what it printed."""
    done = launched(work, "two", 2, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    return "two", done.stdout


def test_two_processes_end_alike_and_as_one(work: Path, one: str, two: tuple[str, str]) -> None:
    """C4, through the command line: ridge starts, both stages and the refit included."""
    first, second, alone = parameters(work, two[0], 0), parameters(work, two[0], 1), parameters(work, one, 0)
    assert {"0.suffix", "1.mlp_recon.weight", "1.mlp_align.weight"} <= first.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for name in ("0.suffix", "1.mlp_recon.weight"):
        torch.testing.assert_close(first[name], alone[name], atol=1e-4, rtol=1e-3, msg=name)
    text = ["where do polar bears live?", "wax"]
    models = [LLM2VecGen(str(work / name)) for name in (one, two[0])]
    np.testing.assert_allclose(models[0].encode(text), models[1].encode(text), atol=2e-3)
    for key in ("alignment", "reconstruction"):
        found = [[row[key] for row in log(work, name) if key in row] for name in (one, two[0])]
        assert len(found[0]) == {"alignment": 8, "reconstruction": 3}[key]
        np.testing.assert_allclose(found[0], found[1], atol=2e-3)


def test_held_out_queries_are_scored_during_training_by_all_processes(
    work: Path, one: str, two: tuple[str, str]
) -> None:
    key = "eval_held_out_0_relative_distance"
    found = [[row[key] for row in log(work, name) if key in row] for name in (one, two[0])]
    assert len(found[0]) == 2, "after steps 4 and 8"
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)


def test_one_process_writes_and_speaks(work: Path, two: tuple[str, str]) -> None:
    written = [(work / f"two-written-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert any("suffix.safetensors" in path for path in written[0])
    # The host keeps each process's random state, processes share the teacher's cache, and whichever is first says how
    # the run is made.
    shared = ("rng_state_1", "labels.sqlite", ".recipe.json.")
    others = [path for path in written[1] if not any(name in path for name in shared)]
    assert not others
    for line in ("Trainable parameters", "student saved", "Ridge start", "Ridge end"):
        assert two[1].count(line) == 1, two[1]
    record = json.loads((work / "two" / "training" / "recipe.json").read_text())
    assert record["processes"] == 2


def test_two_processes_stopped_go_on_as_if_they_had_not_been(work: Path, two: tuple[str, str]) -> None:
    """C2 with two processes, killed behind step 6; and another number of processes is refused."""
    stopped = launched(work, "stopped", 2, 4, stop=6)
    assert stopped.returncode != 0
    checkpoint = work / "stopped" / "training" / "checkpoints" / "whole" / "checkpoint-4"
    assert (checkpoint / "rng_state_1.pth").is_file()
    alone = launched(work, "stopped", 1, 4)
    assert alone.returncode == 1
    assert "(processes: 2 there, 1 now)" in alone.stderr
    again = launched(work, "stopped", 2, 4)
    assert again.returncode == 0, again.stderr[-3000:]
    for key in ("alignment", "reconstruction"):
        found, expected = ([row[key] for row in log(work, name) if key in row] for name in ("stopped", two[0]))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for name, value in parameters(work, two[0], 0).items():
        torch.testing.assert_close(parameters(work, "stopped", 0)[name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_two_processes_train_lora_layers_as_one(work: Path) -> None:
    more = ("--set", "lora_rank=2", "--set", "recon_weight=1", "--set", "recon_steps=0", "--set", "max_steps=3")
    for name, processes, batch in (("lora-one", 1, 8), ("lora-two", 2, 4)):
        done = launched(work, name, processes, batch, more=more)
        assert done.returncode == 0, done.stderr[-3000:]
    first, second, alone = (
        parameters(work, "lora-two", 0),
        parameters(work, "lora-two", 1),
        parameters(work, "lora-one", 0),
    )
    assert any("lora_B" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        if "lora_" in name:
            torch.testing.assert_close(value, alone[name], atol=3e-4, rtol=1e-2, msg=name)


def test_a_head_that_no_loss_reaches_stops_nobody(work: Path) -> None:
    more = ("align_weight=0", "recon_weight=1", "recon_steps=0", "init=random", "ridge_refit=false", "max_steps=3")
    done = launched(work, "recon", 2, 4, more=tuple(part for setting in more for part in ("--set", setting)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len([row for row in log(work, "recon") if "reconstruction" in row]) == 3
    first, second = parameters(work, "recon", 0), parameters(work, "recon", 1)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
