"""The expiry index: finds the stored keys that have expired, without reading the others.

Design note 010 compares it with the other time indexes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.operators.base import SubtaskInfo
from strandline.operators.timed.timed_items import TimedItems, TimedItemsCodec
from strandline.state.backends.base import StateBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.key_ranges import prefix_end

NEVER: Final = (1 << 63) - 1
UNKNOWN: Final = -(1 << 63)
_SCHEMA: Final = "expires_ms long, entry binary"
READ_KEYS: Final = 1 << 15
"""How many expired keys `ExpiryIndex.due` returns at a time."""


@dataclass(frozen=True, slots=True)
class Due:
    """Keys that are due: the stored keys, and the times that they were added with."""

    keys: list[bytes]
    times: npt.NDArray[np.int64]


class ExpiryIndex:
    """Remembers when each stored key expires, and returns the keys that are due.

    The keys of one key group that expire within the same `granule_ms` share an index entry, `key group | name | 0 |
    earliest time | batch | number`. One index entry per key would double the writes of a batch. The caller must check a
    returned key against its own state entry, because the key may have been renewed since it was added.
    """

    def __init__(self, name: str, granule_ms: int, info: SubtaskInfo, read_keys: int = READ_KEYS) -> None:
        self._name = name
        self._read_keys = read_keys
        self._granule = max(1, granule_ms)
        self._codec = TimedItemsCodec([])
        self._groups = key_group_range(info.subtask, info.parallelism, info.max_parallelism)
        # A lower bound of the earliest time in each key group. `_earliest` includes the current batch's writes,
        # `_committed` does not.
        self._earliest = np.full(len(self._groups), UNKNOWN, np.int64)
        self._committed = self._earliest.copy()
        self._batch: int | None = None
        self._written = 0

    @staticmethod
    def descriptor(name: str) -> StateDescriptor:
        """The descriptor of the state that holds an index of this name."""
        return StateDescriptor(name, "index", _SCHEMA)

    @staticmethod
    def move(backend: StateBackend, start: bytes, end: bytes, by_ms: int) -> None:
        """Move all times of an index by the same time. `start` and `end` are the range of its keys in a key group."""
        codec = TimedItemsCodec([])
        # All entries are read before the first one is written, because they move within the range of the scan.
        entries = list(backend.scan(start, end))
        _, items = codec.decode([value for _, value in entries])
        moved = replace(items, time=items.time + by_ms)
        keys = [start + _time_bytes(_time_of(key, len(start)) + by_ms) + key[len(start) + 8 :] for key, _ in entries]
        backend.apply([key for key, _ in entries], [None] * len(entries))
        backend.apply(keys, codec.encode(np.zeros(len(entries), codec.header), moved))

    def begin(self, batch_id: int) -> None:
        """Start a batch. The same batch id again means that the writes of the last try were discarded."""
        if batch_id == self._batch:
            self._earliest = self._committed.copy()
        else:
            self._committed = self._earliest.copy()
        self._batch = batch_id
        self._written = 0

    def add(self, changes: ChangeSet, keys: list[bytes], times: npt.NDArray[np.int64]) -> None:
        """Remember that the stored keys expire at the given times, in milliseconds."""
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
        items = TimedItems(np.cumsum(new) - 1, times[order], np.zeros(len(keys), np.uint8), data.take(pa.array(order)))
        suffixes = []
        for group in groups[new].tolist():
            suffixes.append((group, self._batch_suffix()))
        self._write(changes, suffixes, items)

    def due(self, changes: ChangeSet, now_ms: int, limit: int = NEVER) -> Iterator[Due]:
        """Remove and yield the keys that are due by `now_ms`, in portions: all, or slightly more than `limit`."""
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
                time = _time_of(key, len(prefix))
                if time > now_ms or total >= limit:
                    self._earliest[place] = min(int(self._earliest[place]), time)
                    break
                held.append((key, value))
                size = int.from_bytes(value[:4], "little")
                count, total = count + size, total + size
                if count >= self._read_keys:
                    yield self._taken(changes, held, now_ms)
                    held, count = [], 0
        if held:
            yield self._taken(changes, held, now_ms)

    def next_ms(self, changes: ChangeSet) -> int | None:
        """The earliest time at which a key expires; None if the index is empty."""
        for _ in self.due(changes, UNKNOWN):
            pass  # no key is due this early, but the call finds the earliest time of key groups that were not read yet
        earliest = int(self._earliest.min())
        return None if earliest == NEVER else earliest

    def _taken(self, changes: ChangeSet, held: list[tuple[bytes, bytes]], now_ms: int) -> Due:
        _, items = self._codec.decode([value for _, value in held])
        changes.put_many([key for key, _ in held], [None] * len(held))
        due = items.time <= now_ms
        later = items.take(np.flatnonzero(~due))
        if len(later):
            entries, numbers = np.unique(later.entry, return_inverse=True)
            names = [held[entry][0] for entry in entries.tolist()]
            suffixes = [(name[0] << 8 | name[1], name[-12:]) for name in names]
            self._write(changes, suffixes, later.in_entries(numbers))
        return Due(items.data.filter(pa.array(due)).to_pylist(), items.time[due])

    def _write(self, changes: ChangeSet, entries: list[tuple[int, bytes]], items: TimedItems) -> None:
        starts = np.flatnonzero(np.diff(items.entry, prepend=-1))
        times = np.minimum.reduceat(items.time, starts)
        groups = np.array([group for group, _ in entries]) - self._groups.start
        np.minimum.at(self._earliest, groups, times)
        keys = [
            state_prefix(group, self._name) + _time_bytes(time) + suffix
            for (group, suffix), time in zip(entries, times.tolist(), strict=True)
        ]
        changes.put_many(keys, self._codec.encode(np.zeros(len(entries), self._codec.header), items))

    def _batch_suffix(self) -> bytes:
        self._written += 1
        return (self._batch or 0).to_bytes(8, "big") + self._written.to_bytes(4, "big")


def _time_of(key: bytes, at: int) -> int:
    return int.from_bytes(key[at : at + 8], "big") + UNKNOWN


def _time_bytes(time_ms: int) -> bytes:
    """The time as eight bytes that sort in the order of time."""
    return (time_ms - UNKNOWN).to_bytes(8, "big")
