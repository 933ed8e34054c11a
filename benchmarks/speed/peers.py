"""The authors' research package beside ours: an environment of its own, one model for both, workers that take turns.

    python benchmarks/speed/peers.py [WORK]      # only makes what the comparisons need

``llm2vec-gen`` needs transformers 4, and pins packages that it can do without, so it is installed without its
dependencies into a virtual environment in WORK. The model is the built-in student, written in the authors' format.
Each system runs in a process of its own; only one of them works at a time. Linux only, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Self

HERE = Path(__file__).resolve().parent
DEFAULT_WORK = Path.home() / ".cache" / "llm2vec-gen-benchmarks"
PACKAGES = ("torch==2.13.0", "transformers==4.57.6", "peft==0.21.2", "huggingface_hub<1.0", "pyyaml", "numpy==2.4.6")
AUTHORS = "llm2vec-gen==0.1.3"
# Threads of the last one wait busily for a moment; the next one shall not share the cores with them.
_PAUSE_S = 0.5


class Worker:
    """A process that holds one system and runs jobs for it.

    Args:
        python: Interpreter of the system's environment.
        script: File in this folder that serves the jobs.
        work: Where its log goes.
        name: What the log is called.
        threads: Threads it may use.
    """

    def __init__(self, python: str | Path, script: str, work: Path, name: str, threads: int) -> None:
        self._log = work / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
            "RAYON_NUM_THREADS": str(threads),
        }
        with open(self._log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [str(python), str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Have a job done.

        Args:
            job: Its name.
            **arguments: Its arguments.

        Returns:
            The answer.

        Raises:
            RuntimeError: If it failed; holds the worker's own traceback or names its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The worker ended during the job {job!r}; see {self._log}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"The job {job!r} failed in its worker:\n{answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Peers:
    """Workers of both packages on the same model.

    Args:
        work: Folder for environment, model and logs; made ready if it is not.
        threads: Threads of each worker.
    """

    def __init__(self, work: Path, threads: int) -> None:
        self.work = work
        self.threads = threads
        work.mkdir(parents=True, exist_ok=True)
        self._python = work / "venv" / "bin" / "python"
        self.base, self.checkpoint = work / "base", work / "checkpoint"
        installed, written = work / "installed", work / "written"
        if not installed.exists():
            venv.create(work / "venv", with_pip=True, clear=True)
            install = [str(self._python), "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, *PACKAGES], check=True)
            subprocess.run([*install, "--no-deps", AUTHORS], check=True)
            installed.touch()
        if not written.exists():
            with self.ours("export") as worker:
                worker.ask("export", base=str(self.base), checkpoint=str(self.checkpoint))
            written.touch()

    def ours(self, name: str) -> Worker:
        """A worker of this package and its host."""
        return Worker(sys.executable, "worker_ours.py", self.work, name, self.threads)

    def theirs(self, name: str) -> Worker:
        """A worker of the authors' package."""
        return Worker(self._python, "worker_theirs.py", self.work, name, self.threads)


def arguments(description: str, name: str, *, repeats: int = 5) -> argparse.ArgumentParser:
    """What every comparison takes.

    Args:
        description: Of the script.
        name: Of its results.
        repeats: How often each system runs.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for environment, model and logs")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system")
    parser.add_argument("--output", type=Path, default=HERE / "results" / name, help="without .md and .json")
    return parser


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say what was measured, without the places on this machine."""
    return {key: value for key, value in vars(given).items() if not isinstance(value, Path)}


def in_turns(systems: Mapping[str, Callable[[], dict[str, Any]]], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Run every system once, then every system again, so that all see the same machine.

    Args:
        systems: Name to one measured run.
        repeats: Runs of each.

    Returns:
        Name to its runs.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(repeats):
        for name, run in systems.items():
            time.sleep(_PAUSE_S)
            runs[name].append(run())
            print(f"{number + 1}/{repeats} {name}: {runs[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return runs


def median(runs: Sequence[Mapping[str, Any]], key: str = "seconds") -> float:
    """Median of one value over the runs of a system."""
    return statistics.median(run[key] for run in runs)


def peak(runs: Sequence[Mapping[str, Any]]) -> float:
    """Largest resident memory over the runs of a system, in MB."""
    return max(run["peak_mb"] for run in runs)


def start(runs: Sequence[Mapping[str, Any]]) -> float:
    """Resident memory before the first run of a system, in MB: libraries and weights."""
    return float(runs[0]["start_mb"])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def target(what: str, measured: float, bound: float, *, at_most: bool) -> list[str]:
    """A row that holds a target against what was measured; see :func:`targets`."""
    met = measured <= bound if at_most else measured >= bound
    return [what, f"{'≤' if at_most else '≥'} {bound:g}", f"{measured:.2f}", "yes" if met else "no"]


def targets(rows: Sequence[Sequence[str]]) -> str:
    """A table of targets."""
    return table(["target", "bound", "measured", "met"], rows)


def report(output: Path, parts: Sequence[str], raw: Mapping[str, Any]) -> None:
    """Print the text and write it with the raw measurements.

    Args:
        output: Path without ending.
        parts: Paragraphs and tables.
        raw: Everything that the text was made of.
    """
    text = "\n\n".join(parts) + "\n"
    print(text)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    output.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_WORK
    Peers(place, threads=len(os.sched_getaffinity(0)))
    print(place)
