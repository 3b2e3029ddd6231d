"""The time index: at which times a key group has state, so that due state is found without a scan of the rest.

Design note 010 compares it with the other time indexes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import state_prefix

TIME_BYTES: Final = 9
"""The length of a time in a stored key. `KeyEncoder` writes a number that is not null in the same way."""
_BIAS: Final = 1 << 63
Int64s = npt.NDArray[np.int64]


def time_bytes(time: int) -> bytes:
    """The bytes of a time in a stored key; they sort in the order of time."""
    return b"\x01" + (time + _BIAS).to_bytes(8, "big")


def time_of(key: bytes, at: int) -> int:
    """The time that begins at byte `at` of a stored key."""
    return int.from_bytes(key[at + 1 : at + TIME_BYTES], "big") - _BIAS


class TimeIndex:
    """A set of pairs (time, key group), held in memory and stored as one small entry per pair.

    If a batch is run again, the changes of its last run are undone first.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._groups: dict[int, set[int]] = {}
        self._batch: int | None = None
        self._added: list[tuple[int, int]] = []
        self._removed: list[tuple[int, int]] = []

    def begin(self, changes: ChangeSet, batch_id: int, key_groups: Iterable[int]) -> None:
        """Start a batch. The same batch id again means that the writes of the last try were discarded."""
        if self._batch is None:
            for group in key_groups:
                prefix = state_prefix(group, self._state)
                for key, _ in changes.scan(prefix):
                    self._groups.setdefault(time_of(key, len(prefix)), set()).add(group)
        elif self._batch == batch_id:
            for time, group in self._added:
                self._drop(time, group)
            for time, group in self._removed:
                self._groups.setdefault(time, set()).add(group)
        self._batch = batch_id
        self._added, self._removed = [], []

    def add(self, groups: Int64s, times: Int64s, changes: ChangeSet) -> None:
        """Add pairs of key group and time."""
        if len(groups) == 0:
            return
        known = self._groups
        fresh = []
        starts = _run_starts(groups, times)
        distinct, codes = np.unique(times[starts], return_inverse=True)
        pairs = np.unique(codes << 16 | groups[starts])
        for time, group in zip(distinct[pairs >> 16].tolist(), (pairs & 0xFFFF).tolist(), strict=True):
            if group not in known.setdefault(time, set()):
                known[time].add(group)
                fresh.append((time, group))
        self._note(self._added, self._removed, fresh)
        changes.put_many([self._key(*pair) for pair in fresh], [b""] * len(fresh))

    def has(self, groups: Int64s, times: Int64s) -> npt.NDArray[np.bool_]:
        """Which of the pairs of key group and time are in the set; fast if equal pairs are next to each other."""
        starts = np.flatnonzero(_run_starts(groups, times))
        pairs = zip(groups[starts].tolist(), times[starts].tolist(), strict=True)
        found = np.fromiter((group in self._groups.get(time, ()) for group, time in pairs), np.bool_, len(starts))
        return np.repeat(found, np.diff(starts, append=len(groups)))

    def remove(self, pairs: list[tuple[int, int]], changes: ChangeSet) -> None:
        """Remove pairs of time and key group."""
        for time, group in pairs:
            self._drop(time, group)
        self._note(self._removed, self._added, pairs)
        changes.put_many([self._key(*pair) for pair in pairs], [None] * len(pairs))

    def times(self) -> list[int]:
        """All times in the set, ascending."""
        return sorted(self._groups)

    def groups_at(self, time: int) -> set[int]:
        """The key groups that are in the set with this time."""
        return self._groups.get(time, set())

    def by_group(self, times: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """The key groups that are in the set with one of the times, ascending, each with its times."""
        found: dict[int, list[int]] = {}
        for time in times:
            for group in self.groups_at(time):
                found.setdefault(group, []).append(time)
        return iter(sorted(found.items()))

    def _drop(self, time: int, group: int) -> None:
        groups = self._groups.get(time, set())
        groups.discard(group)
        if not groups:
            self._groups.pop(time, None)

    def _key(self, time: int, group: int) -> bytes:
        return state_prefix(group, self._state) + time_bytes(time)

    @staticmethod
    def _note(to: list[tuple[int, int]], opposite: list[tuple[int, int]], pairs: list[tuple[int, int]]) -> None:
        """Append `pairs` to one undo list; a pair that is in the opposite list is removed there instead."""
        if not opposite:
            to += pairs
            return
        undone = set(opposite)
        to += [pair for pair in pairs if pair not in undone]
        taken = set(pairs)
        opposite[:] = [pair for pair in opposite if pair not in taken]


def _run_starts(groups: Int64s, times: Int64s) -> npt.NDArray[np.bool_]:
    return np.concatenate(([True], (times[1:] != times[:-1]) | (groups[1:] != groups[:-1])))[: len(groups)]
