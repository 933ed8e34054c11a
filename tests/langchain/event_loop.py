"""How long an event loop is kept from going round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import numpy as np


async def rounds(work: Awaitable[object]) -> np.ndarray:
    """Seconds of each round of the event loop while some work goes on."""
    task, seconds = asyncio.ensure_future(work), []
    while not task.done():
        start = time.perf_counter()
        await asyncio.sleep(0)
        seconds.append(time.perf_counter() - start)
        await asyncio.sleep(0.002)
    await task
    return np.array(seconds)


def check_goes_on(seconds: np.ndarray, work: float) -> None:
    """On a busy machine single rounds may come late; work on the loop itself would make one as long as the work.

    Args:
        seconds: Of each round.
        work: Seconds of the longest piece of work, which would be one round.
    """
    assert np.quantile(seconds, 0.95) < 0.05
    assert seconds.max() < 0.75 * work
