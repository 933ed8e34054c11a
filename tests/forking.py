"""A process that forks a worker for each line it reads: importing takes longer than what a worker does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server_of_workers(script: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a script that reads what its workers are to do from its input, and ends when that is closed."""
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=60)
