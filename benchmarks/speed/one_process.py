"""What comparisons that run in one process share."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def options(description: str, name: str, *, repeats: int = 5) -> argparse.ArgumentParser:
    """What every comparison takes.

    Args:
        description: Of the script.
        name: Of its results.
        repeats: How often each system runs.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system")
    parser.add_argument("--output", type=Path, default=RESULTS / name, help="without .md and .json")
    return parser


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long something takes, work of an accelerator included, and what it gives."""
    settled()
    start = time.perf_counter()
    found = action()
    settled()
    return time.perf_counter() - start, found


def settled() -> None:
    """Wait until the accelerator has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def percentile(values: list[float], share: float) -> float:
    """A percentile (0 to 100) of some values, the nearest of them."""
    ordered = sorted(values)
    return ordered[round(share / 100 * (len(ordered) - 1))]


def raw_arguments(given: argparse.Namespace) -> dict[str, str]:
    """Arguments as they are recorded with the results, without the path of the results."""
    return {key: str(value) for key, value in vars(given).items() if key != "output"}
