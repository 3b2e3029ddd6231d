"""Partial results of a batch, held in memory until they are too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from strandline.operators.aggregate.limits import GroupingLimits


class Partials:
    """Holds the partial results of a batch, and merges them when they become too large."""

    def __init__(self, merge: Callable[[Sequence[pa.Table]], pa.Table], limits: GroupingLimits) -> None:
        self._merge = merge
        self._most_groups = limits.held_groups
        self._most_bytes = limits.held_bytes
        self._held: list[pa.Table] = []
        self._groups = self._size = 0
        self._distinct = True

    def add(self, part: pa.Table, distinct: bool = True) -> pa.Table | None:
        """Add a partial result. Returns all of them, merged, if they are too large to hold; the caller stores them.

        `distinct` says whether each key has one row in `part`.
        """
        self._held.append(part)
        self._distinct = distinct and len(self._held) == 1
        self._groups += part.num_rows
        self._size += part.nbytes
        if self._groups <= self._most_groups and self._size <= self._most_bytes:
            return None
        merged = self._merged()
        self._held, self._groups, self._size, self._distinct = [merged], merged.num_rows, merged.nbytes, True
        # Half of the limit: if merging freed less than that, it would soon be needed again.
        if self._groups <= self._most_groups // 2 and self._size <= self._most_bytes // 2:
            return None
        self._held, self._groups, self._size = [], 0, 0
        return merged

    def rest(self) -> pa.Table | None:
        """The partial results that are left at the end of the batch, merged."""
        return self._merged() if self._held else None

    def _merged(self) -> pa.Table:
        return self._held[0] if self._distinct else self._merge(self._held)
