"""Many readers or one writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """A lock that any number of readers share, and a writer has alone; a waiting writer goes before new readers.

    Example:
        >>> lock = ReadWriteLock()
        >>> with lock.reading(), lock.reading():
        ...     pass
        >>> with lock.writing():
        ...     pass
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._waiting_writers = 0
        self._held = threading.local()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock together with other readers."""
        depth = getattr(self._held, "depth", 0)
        with self._condition:
            # A thread that reads already must not wait for a writer that waits for it.
            while self._writing or (self._waiting_writers and not depth):
                self._condition.wait()
            self._readers += 1
        self._held.depth = depth + 1
        try:
            yield
        finally:
            self._held.depth = depth
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._condition:
            self._waiting_writers += 1
            try:
                while self._writing or self._readers:
                    self._condition.wait()
            finally:
                self._waiting_writers -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()
