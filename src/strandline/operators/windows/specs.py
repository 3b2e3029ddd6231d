"""Window specifications: how event time is cut into windows. As in Spark, windows are aligned to the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from strandline.config.option import because, parse_duration
from strandline.errors import JobDefinitionError

Duration: TypeAlias = str | float | timedelta
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Windows of `size_ms` that begin every `slide_ms`; tumbling windows if both are equal.

    Time is cut into panes, the longest pieces of time that every window is a sequence of. A row belongs to one pane.
    The value of a window is merged from the values of its panes.
    """

    size_ms: int
    slide_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.slide_ms <= self.size_ms:
            raise JobDefinitionError(
                f"a window of {self.size_ms} ms cannot slide by {self.slide_ms} ms; choose 0 < slide <= size"
            )

    @property
    def pane_ms(self) -> int:
        """The length of a pane."""
        return gcd(self.size_ms, self.slide_ms)

    def panes(self, times_ms: Int64s) -> Int64s:
        """The start of the pane of each time."""
        return (times_ms - self.offset_ms) // self.pane_ms * self.pane_ms + self.offset_ms

    def panes_of(self, times: Int64s) -> Int64s:
        """The start of the pane of each time (microseconds), quickly if all of them have the same pane."""
        first = int(times.min())
        least, greatest = self.panes(np.array([first, times.max()]) // 1000)
        if least == greatest:
            return np.full(len(times), least)
        if first - self.offset_ms * 1000 < np.iinfo(np.int64).min:
            return self.panes(times // 1000)
        return (times - self.offset_ms * 1000) // (self.pane_ms * 1000) * self.pane_ms + self.offset_ms

    def first_ends(self, panes: Int64s) -> Int64s:
        """The end of the first window that has the pane."""
        least = panes - self.size_ms + self.pane_ms - self.offset_ms
        return -(-least // self.slide_ms) * self.slide_ms + self.offset_ms + self.size_ms

    def last_ends(self, panes: Int64s) -> Int64s:
        """The end of the last window that has the pane."""
        return (panes - self.offset_ms) // self.slide_ms * self.slide_ms + self.offset_ms + self.size_ms

    def late(self, times: Int64s, lateness_ms: int, watermark_ms: int) -> Bools:
        """For each row time (microseconds), whether the last window of the row was over at `watermark_ms`."""
        return self.last_ends(self.panes(times // 1000)) + lateness_ms <= watermark_ms

    def end_after(self, time_ms: int) -> int:
        """The first end of a window after a time."""
        since = time_ms - self.size_ms - self.offset_ms
        return (since // self.slide_ms + 1) * self.slide_ms + self.size_ms + self.offset_ms


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Windows that end when a key has had no row for `gap_ms`."""

    gap_ms: int

    def __post_init__(self) -> None:
        if self.gap_ms <= 0:
            raise JobDefinitionError(f"the gap of a session is {self.gap_ms} ms; it must be longer than 0")

    def spans_of(self, times: Int64s) -> Int64s:
        """The number of the span of time, as long as the gap, that each time (microseconds) lies in."""
        gap = self.gap_ms * 1000
        least, greatest = int(times.min()) // gap, int(times.max()) // gap
        return np.full(len(times), least) if least == greatest else times // gap

    def late(self, times: Int64s, lateness_ms: int, watermark_ms: int) -> Bools:
        """For each row time (microseconds), whether the session of this row alone was over at `watermark_ms`."""
        return times + (self.gap_ms + lateness_ms) * 1000 <= watermark_ms * 1000


WindowSpec: TypeAlias = SlidingWindow | SessionWindow
"""Any window that `KeyedStream.window` takes."""


def tumbling(size: Duration, offset: Duration = 0) -> SlidingWindow:
    """Windows that follow each other: `tumbling("1m")`. They begin `offset` after multiples of their size."""
    size_ms = _milliseconds("size", size)
    return SlidingWindow(size_ms, size_ms, _milliseconds("offset", offset, least=0))


def sliding(size: Duration, slide: Duration, offset: Duration = 0) -> SlidingWindow:
    """Windows of `size` that begin every `slide`: `sliding("10m", "1m")`."""
    return SlidingWindow(
        _milliseconds("size", size), _milliseconds("slide", slide), _milliseconds("offset", offset, least=0)
    )


def session(gap: Duration) -> SessionWindow:
    """A window for each burst of rows of a key; it ends when no row has come for `gap`."""
    return SessionWindow(_milliseconds("gap", gap))


def _milliseconds(what: str, value: Duration, least: int = 1) -> int:
    try:
        ms = parse_duration(value) * 1000
    except ValueError as error:
        raise JobDefinitionError(
            f"{what}={value!r} of a window is no duration{because(error)}; write one such as '10s', '5 min' or '1h'"
        ) from None
    if ms < least or abs(ms - round(ms)) > 1e-6:
        raise JobDefinitionError(
            f"{what}={value!r} of a window must be a whole number of milliseconds, at least {least}"
        )
    return round(ms)
