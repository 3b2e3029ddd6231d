"""Decides how long a try of an upload may take before another one begins beside it."""

from __future__ import annotations

FIRST_GUESS = 8 << 20
"""Bytes per second, until an upload has shown the rate."""
TELLING_BYTES = 1 << 20
"""Smaller uploads say nothing about the rate: most of their time is latency."""
_MARGIN = 2.0
_LARGEST_DROP = 4.0


class UploadPace:
    """The patience with an upload grows with its size, and with the rate of the last upload that succeeded.

    It knows no clock and no thread; the caller tells it what happened.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout` is the patience with an upload of no size, in seconds."""
        self._timeout = timeout
        self._rate = float(FIRST_GUESS)

    def patience(self, size: int) -> float:
        """The seconds that a try with `size` bytes may take."""
        return self._timeout + _MARGIN * size / self._rate

    def stored(self, size: int, seconds: float) -> None:
        """Note that a try with `size` bytes succeeded after `seconds`, however late."""
        if size >= TELLING_BYTES:
            # A single upload that hung for a while must not make the next ones wait for hours.
            self._rate = max(size / max(seconds, 1e-3), self._rate / _LARGEST_DROP)
