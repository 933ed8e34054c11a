"""Trains tiny students in forked processes that end badly at a given place, then once more from what is left.

``python drill_worker.py FOLDER`` leaves a run in ``FOLDER/PLACE`` for each place, and ``results.json``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.host_checkpoints import KeepNewest
from llm2vec_gen_st.teachers.sources import SelfTeacher
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import Recipe, run, train
from llm2vec_gen_st.training.trainer import StudentTrainer

DRILL = Recipe(
    thought_tokens=4, compression_tokens=4, learning_rate=1e-3, recon_learning_rate=1e-3, warmup_steps=0, epochs=100,
    max_steps=8, batch_size=4, dtype="float32", logging_steps=1, save_steps=2, max_seq_length=128,
    max_response_tokens=24, init="ridge", recon_weight=0.0, recon_steps=4, ridge_refit=True, held_out=4,
)  # fmt: skip


def go(folder: Path) -> LLM2VecGen:
    words = [(subject, verb) for subject in ("bears", "bees", "rivers", "seals") for verb in ("make", "carry", "hunt")]
    data = {
        "query": [f"What do {subject} {verb}? ({number})" for number in (1, 2) for subject, verb in words],
        "response": [f"{subject} {verb} {number} things." for number in (1, 2) for subject, verb in words],
    }
    return train(Dataset.from_dict(data), folder, base=tiny_backbone(), teacher="self", recipe=DRILL, progress=False)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def replaced(owner: Any, name: str, behind: Callable[..., Any], *, before: bool = False) -> None:
    """Let something happen after (or instead of) a function, which gets that function's arguments."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = None if before else original(*args, **kwargs)
        behind(*args, **kwargs)
        return found

    setattr(owner, name, changed)


def at_step(step: int, act: Callable[[Any], None]) -> None:
    class At(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and "whole" in args.output_dir:
                act(Path(args.output_dir))

    replaced(StudentTrainer, "__init__", lambda self, *args, **kwargs: self.add_callback(At()))


def half_optimizer(self: StudentTrainer, folder: str) -> None:
    if self.state.global_step == 4:
        path = Path(folder) / "optimizer.pt"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        kill()


def half_state(self: TrainerState, path: str) -> None:
    if self.global_step == 4:
        whole = Path(path).read_text()
        Path(path).write_text(whole[: len(whole) // 2])
        kill()


def half_student(self: LLM2VecGen, path: str, *args: Any, **kwargs: Any) -> None:
    if "checkpoint" not in path:
        (Path(path) / "modules.json").unlink()
        kill()


def clock_goes_back(self: StudentTrainer, *args: Any, **kwargs: Any) -> None:
    for folder in Path(str(self.args.output_dir)).glob("checkpoint-*"):
        then = 1_000_000_000 - 1000 * int(folder.name.rpartition("-")[2])
        os.utime(folder, (then, then))


def at_the_third(self: KeepNewest, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == 6:
        kill()


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def backwards() -> None:
    replaced(StudentTrainer, "_save_checkpoint", clock_goes_back)
    at_step(7, lambda _: kill())


KILLED: dict[str, Callable[[], None]] = {
    "teacher": lambda: replaced(SelfTeacher, "embed", lambda *_: kill()),
    "ridge start": lambda: replaced(run, "ridge_heads", lambda *_, **__: kill()),
    "step": lambda: at_step(5, lambda _: kill()),
    "optimizer file": lambda: replaced(StudentTrainer, "_save_optimizer_and_scheduler", half_optimizer),
    "state file": lambda: replaced(TrainerState, "save_to_json", half_state),
    "rotation": lambda: replaced(KeepNewest, "on_save", at_the_third, before=True),
    "ridge end": lambda: replaced(run, "ridge_alignment", lambda *_, **__: kill()),
    "log": lambda: replaced(run, "write_log", lambda *_: kill()),
    "half a student": lambda: replaced(LLM2VecGen, "save_pretrained", half_student),
    "clock goes back": backwards,
}  # fmt: skip
FULL: dict[str, Callable[[], None]] = {
    "no room for weights": lambda: at_step(3, lambda _: limit_files(4_000)),
    "no room for the optimizer": lambda: at_step(3, lambda _: limit_files(40_000)),
    "no room for the student": lambda: replaced(run, "wait_for_all", lambda: limit_files(1_000)),
}


def forked(place: str, folder: Path) -> tuple[int, str]:
    """Exit code, and the message of what was raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            torch.set_num_threads(1)
            (KILLED | FULL).get(place, lambda: None)()
            go(folder)
            code = 0
        except OSError as error:
            os.write(writing, str(error).encode()[:4000])
            code = 3
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
            code = 1
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), message


def main(folder: Path) -> None:
    results: dict[str, Any] = {"straight": {"first": forked("", folder / "straight")}}
    for place in (*KILLED, *FULL):
        first = forked(place, folder / place)
        left = sorted(str(path.relative_to(folder / place)) for path in (folder / place).rglob("checkpoint-*"))
        results[place] = {"first": first, "left": left, "second": forked("", folder / place)}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
