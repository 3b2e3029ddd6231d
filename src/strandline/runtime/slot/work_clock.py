"""How long at least one of several things has gone on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WorkClock:
    """Adds up the time in which somebody works. Time in which two threads work counts once. Safe for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0
        self._since = 0
        self._total = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the `with` block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        with self._lock:
            if self._working == 0:
                self._since = time.monotonic_ns()
            self._working += 1

    def end(self) -> None:
        with self._lock:
            self._working -= 1
            if self._working == 0:
                self._total += time.monotonic_ns() - self._since

    def total_ns(self) -> int:
        """Nanoseconds up to now, with those of the work that goes on."""
        with self._lock:
            return self._total + (time.monotonic_ns() - self._since if self._working else 0)
