"""One warning a call for all texts that were cut, however many batches the call had."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger(__name__)

_cut: ContextVar[list[int] | None] = ContextVar("cut", default=None)


def count_cut(texts: int) -> None:
    """Note that some texts were cut; outside :func:`warn_once_if_cut` this warns at once."""
    counter = _cut.get()
    if counter is not None:
        counter[0] += texts
    elif texts:
        logger.warning("Texts longer than the limit were cut: %d.", texts)


@contextmanager
def warn_once_if_cut(limit: int, setting: str = "model.max_seq_length") -> Iterator[None]:
    """Collect the counts of a block and warn once at its end.

    Args:
        limit: Text tokens that are kept, named in the warning.
        setting: What would have to be raised to keep more.
    """
    if _cut.get() is not None:
        yield
        return
    counter = [0]
    token = _cut.set(counter)
    try:
        yield
    finally:
        _cut.reset(token)
        if counter[0]:
            logger.warning(
                "%d of the inputs were longer than %d tokens and were cut; raise %s to keep more.",
                counter[0],
                limit,
                setting,
            )
