"""Slices: how many keys are read from state and written back at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strandline.operators.aggregate.limits import GroupingLimits


class Slices:
    """Cuts `count` keys into slices of up to `most` keys, by default up to `limits.slice_rows`.

    The first slice is short. The next ones grow, unless the values of a slice take too many bytes.
    """

    def __init__(self, count: int, limits: GroupingLimits, most: int | None = None) -> None:
        self._count = count
        self._most = limits.slice_rows if most is None else most
        self._bytes = limits.slice_bytes
        self.size = min(self._most, limits.first_slice_rows)

    def __iter__(self) -> Iterator[slice]:
        start = 0
        while start < self._count:
            stop = min(start + self.size, self._count)
            yield slice(start, stop)
            start = stop

    def adapt(self, values: Sequence[bytes | None]) -> None:
        """Choose the size of the next slice; `values` are those of the last one."""
        size = sum(map(len, filter(None, values)))
        if size > self._bytes:
            self.size = max(1, self.size * self._bytes // size)
        elif size < self._bytes // 8:
            self.size = min(self._most, self.size * 4)
