"""The worker's side of a comparison: jobs come as JSON lines, one answer each; time and peak memory are taken here.

This file and those it needs run in the environment of the system that is measured, so it imports nothing but torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")

Job = Callable[..., dict[str, Any]]


def measured(action: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Run something once.

    Args:
        action: What to run.

    Returns:
        ``seconds``, ``start_mb`` and ``peak_mb``, the resident memory of this process before and the largest meanwhile
        (weights and libraries included), and what the action gave.
    """
    # Linux then starts to look for the largest resident size anew.
    _CLEAR.write_text("5")
    before = _memory_mb("VmRSS")
    start = time.perf_counter()
    found = action()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "start_mb": before, "peak_mb": _memory_mb("VmHWM")}, found


def _memory_mb(kind: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) / 1024


def serve(jobs: dict[str, Job]) -> None:
    """Answer jobs until the input ends.

    Args:
        jobs: Name to function; it takes the job's arguments and gives a dictionary that JSON can hold.
    """
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = jobs[job.pop("job")](**job)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
