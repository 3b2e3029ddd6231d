"""An index of keys in ascending order that takes new keys, few or many, at logarithmic cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

_YOUNG_KEYS: Final = 2_048
_FEW: Final = 32


class SortedRuns:
    """Sorted lists of decreasing length, merged like the digits of a binary counter.

    A single sorted list would be sorted again, or moved in memory, at every scan that follows a few puts. Here each key
    is moved log2(n) times in total, and a look-up needs one bisection per list. A few keys are first inserted into a
    short list, which is cheap. A key that is added twice is found twice.
    """

    __slots__ = ("_runs", "_young")

    def __init__(self) -> None:
        self._runs: list[list[bytes]] = []
        self._young: list[bytes] = []

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys in any order."""
        fresh = list(keys)
        young = self._young
        if len(fresh) <= _FEW:
            for key in fresh:
                insort(young, key)
            if len(young) <= _YOUNG_KEYS:
                return
            fresh = []
        run = young + fresh
        run.sort()
        runs = self._runs
        while runs and len(runs[-1]) <= 2 * len(run):
            run = runs.pop() + run
            run.sort()
        runs.append(run)
        self._young = []

    def between(self, start: bytes, end: bytes | None) -> list[bytes]:
        """The keys with start <= key < end, ascending."""
        found: list[bytes] = []
        touched = 0
        for run in (*self._runs, self._young):
            low = bisect_left(run, start)
            high = len(run) if end is None else bisect_left(run, end, low)
            if low < high:
                found += run[low:high]
                touched += 1
        if touched > 1:
            found.sort()
        return found

    def clear(self) -> None:
        """Remove all keys."""
        self._runs = []
        self._young = []
