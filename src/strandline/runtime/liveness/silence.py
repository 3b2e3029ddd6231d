"""How long somebody has been silent, as far as this process can tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_STEP = 3.0
"""The most that the time between two looks counts, in seconds."""


class Silence:
    """Counts the seconds since the last sign of life, while somebody looks every now and then.

    The time between two looks counts at most `LONGEST_STEP` seconds. So a process that was itself stopped for a minute,
    or whose host was suspended, does not take everybody else for silent when it goes on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._seconds = 0.0
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Note a sign of life."""
        with self._lock:
            self._seconds = 0.0
            self._looked = self._clock()

    def seconds(self) -> float:
        """Look: for how long has there been no sign of life?"""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._looked, LONGEST_STEP)
            self._looked = now
            return self._seconds
