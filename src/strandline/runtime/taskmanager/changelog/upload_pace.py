"""Decides how long a try of an upload may take before another one begins beside it."""

from __future__ import annotations

FIRST_GUESS = 8 << 20
"""Bytes per second, until an upload has shown the rate."""
TELLING_BYTES = 1 << 20
"""The time of a smaller upload is latency, and says nothing about the rate."""
_MARGIN = 2.0
_LARGEST_DROP = 4.0
_MOST_LATENCY = 4.0
"""Latency counts up to so many time-outs, because a batch waits for several tries."""


class UploadPace:
    """The patience with an upload grows with its size, and follows the uploads that succeeded last.

    It knows no clock and no thread; the caller tells it what happened.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout` is the least patience, in seconds."""
        self._timeout = timeout
        self._latency = 0.0
        self._rate = float(FIRST_GUESS)

    def patience(self, size: int) -> float:
        """The seconds that a try with `size` bytes may take."""
        return self._timeout + _MARGIN * (self._latency + size / self._rate)

    def stored(self, size: int, seconds: float) -> None:
        """Note that a try with `size` bytes succeeded after `seconds`, however late."""
        if size >= TELLING_BYTES:
            # A single upload that hung for a while must not make the next ones wait for hours.
            self._rate = max(size / max(seconds, 1e-3), self._rate / _LARGEST_DROP)
        else:
            self._latency = min(seconds, _MOST_LATENCY * self._timeout)
