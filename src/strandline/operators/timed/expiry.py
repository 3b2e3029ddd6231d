"""The expiry index: which stored entries end when, kept as state in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.operators.base import SubtaskInfo
from strandline.operators.timed.packs import Items, PackCodec
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.key_ranges import prefix_end

NEVER: Final = (1 << 63) - 1
UNKNOWN: Final = -(1 << 63)
_SCHEMA: Final = "expires_ms long, entry binary"
_READ_ENTRIES: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Due:
    """Entries whose time has come: their stored keys and the times they were put down for."""

    keys: list[bytes]
    times: npt.NDArray[np.int64]


class ExpiryIndex:
    """Gives back stored keys when their time has come, without a look at any other.

    Keys of one group that end within the same `granule_ms` share an entry, `key group | name | 0 | earliest time |
    batch | number`: an entry per key would double the writes of a batch. What the index gives back must be checked
    against the entry itself, which may have been renewed since.
    """

    def __init__(self, name: str, granule_ms: int, info: SubtaskInfo) -> None:
        self._name = name
        self._granule = max(1, granule_ms)
        self._packs = PackCodec([])
        self._groups = key_group_range(info.subtask, info.parallelism, info.max_parallelism)
        # Not after the earliest entry of each group. It holds what the batch in hand wrote, `_committed` does not.
        self._earliest = np.full(len(self._groups), UNKNOWN, np.int64)
        self._committed = self._earliest.copy()
        self._batch: int | None = None
        self._written = 0

    @staticmethod
    def descriptor(name: str) -> StateDescriptor:
        """An index of that name as a state."""
        return StateDescriptor(name, "index", _SCHEMA)

    def begin(self, batch_id: int) -> None:
        """Start a batch; the same one again means that what was written in it is void."""
        if batch_id == self._batch:
            self._earliest = self._committed.copy()
        else:
            self._committed = self._earliest.copy()
        self._batch = batch_id
        self._written = 0

    def add(self, changes: ChangeSet, keys: list[bytes], times: npt.NDArray[np.int64]) -> None:
        """Put stored keys down for their times, in milliseconds."""
        if not keys:
            return
        data = pa.array(keys, pa.large_binary())
        starts = np.frombuffer(data.buffers()[1], np.int64, len(keys))
        content = np.frombuffer(data.buffers()[2], np.uint8)
        groups = content[starts].astype(np.int64) << 8 | content[starts + 1]
        cells = times // self._granule
        order = np.lexsort((cells, groups))
        groups, cells = groups[order], cells[order]
        new = np.concatenate(([True], (groups[1:] != groups[:-1]) | (cells[1:] != cells[:-1])))
        items = Items(np.cumsum(new) - 1, times[order], np.zeros(len(keys), np.uint8), data.take(pa.array(order)))
        suffixes = []
        for group in groups[new].tolist():
            suffixes.append((group, self._batch_suffix()))
        self._write(changes, suffixes, items)

    def due(self, changes: ChangeSet, now_ms: int, limit: int = NEVER) -> Iterator[Due]:
        """Take out, in portions, what is due by `now_ms`: all of it, or a little more than `limit` keys."""
        held: list[tuple[bytes, bytes]] = []
        count = total = 0
        visit = np.flatnonzero(self._earliest <= now_ms)
        for place in visit[np.argsort(self._earliest[visit])].tolist():
            if total >= limit:
                break
            prefix = state_prefix(self._groups[place], self._name)
            begin = prefix + _time_bytes(int(self._earliest[place]))
            self._earliest[place] = NEVER
            for key, value in changes.scan_range(begin, prefix_end(prefix)):
                time = int.from_bytes(key[len(prefix) : len(prefix) + 8], "big") + UNKNOWN
                if time > now_ms or total >= limit:
                    self._earliest[place] = min(int(self._earliest[place]), time)
                    break
                held.append((key, value))
                size = int.from_bytes(value[:4], "little")
                count, total = count + size, total + size
                if count >= _READ_ENTRIES:
                    yield self._taken(changes, held, now_ms)
                    held, count = [], 0
        if held:
            yield self._taken(changes, held, now_ms)

    def next_ms(self, changes: ChangeSet) -> int | None:
        """The earliest time for which a key is put down."""
        for _ in self.due(changes, UNKNOWN):
            pass  # nothing is due; groups that were not looked at yet are now
        earliest = int(self._earliest.min())
        return None if earliest == NEVER else earliest

    def _taken(self, changes: ChangeSet, held: list[tuple[bytes, bytes]], now_ms: int) -> Due:
        _, items = self._packs.decode([value for _, value in held])
        changes.put_many([key for key, _ in held], [None] * len(held))
        due = items.time <= now_ms
        later = items.take(np.flatnonzero(~due))
        if len(later):
            packs, numbers = np.unique(later.pack, return_inverse=True)
            names = [held[pack][0] for pack in packs.tolist()]
            suffixes = [(name[0] << 8 | name[1], name[-12:]) for name in names]
            self._write(changes, suffixes, later.in_packs(numbers))
        return Due(items.data.filter(pa.array(due)).to_pylist(), items.time[due])

    def _write(self, changes: ChangeSet, packs: list[tuple[int, bytes]], items: Items) -> None:
        starts = np.flatnonzero(np.diff(items.pack, prepend=-1))
        times = np.minimum.reduceat(items.time, starts)
        groups = np.array([group for group, _ in packs]) - self._groups.start
        np.minimum.at(self._earliest, groups, times)
        keys = [
            state_prefix(group, self._name) + _time_bytes(time) + suffix
            for (group, suffix), time in zip(packs, times.tolist(), strict=True)
        ]
        changes.put_many(keys, self._packs.encode(np.zeros(len(packs), self._packs.header), items))

    def _batch_suffix(self) -> bytes:
        self._written += 1
        return (self._batch or 0).to_bytes(8, "big") + self._written.to_bytes(4, "big")


def _time_bytes(time_ms: int) -> bytes:
    """Eight bytes that sort as the times do."""
    return (time_ms - UNKNOWN).to_bytes(8, "big")
