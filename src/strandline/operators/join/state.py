"""The state of a join: the rows of a key and a span of time in one value, so that they are read by key and not scanned.

A head, `key group | rows | 0 | key | bucket`, holds the rows of both sides. What grows beyond a limit is moved, a side
at a time, to chunks `head | side | number` that are not rewritten any more unless one of their rows changes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strandline.operators.columns.columns import found
from strandline.operators.timed.packs import Items, PackCodec
from strandline.state.batch.changes import ChangeSet

SIDE: Final = 1
MATCHED: Final = 2
"""Flags of a stored row: which side it is of (0: left, 1: right), whether it found a partner."""
_CHUNK_BYTES: Final = 32 << 10
_CODEC: Final = PackCodec([("left", "<u4"), ("right", "<u4"), ("due", "<i8")])
_LARGEST_PLACE: Final = 1 << 62
_COUNTERS: Final = ("left", "right")


class Heads:
    """Some heads with the rows that were read of them; rows are added and changed here and then written back.

    `headers` has for each head the number of chunks on each side and when it is due next (milliseconds); `known` says
    which were there. A row's number in `items.pack` is that of its value: a head, or one of the chunks after them.
    """

    def __init__(self, changes: ChangeSet, keys: list[bytes]) -> None:
        self._changes = changes
        self.keys = list(keys)
        values = changes.get_many(keys)
        places = found(values)
        read = [value for value in values if value is not None]
        some, items = _CODEC.decode(read)
        self.size = sum(map(len, read))
        self.headers = np.zeros(len(keys), _CODEC.header)
        self.headers[places] = some
        self.known = np.zeros(len(keys), np.bool_)
        self.known[places] = True
        self.items = items.in_packs(places[items.pack])
        self.owner = np.arange(len(keys))

    def read_chunks(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Read the chunks too, where `wanted` (head by side) says so."""
        counts = np.stack([self.headers[name] for name in _COUNTERS], axis=1)
        heads, sides = np.nonzero((counts > 0) & wanted)
        if not len(heads):
            return
        keys, owners = [], []
        for head, side in zip(heads.tolist(), sides.tolist(), strict=True):
            for number in range(int(counts[head, side])):
                keys.append(_chunk_key(self.keys[head], side, number))
                owners.append(head)
        values = self._changes.get_many(keys)
        places = found(values)
        read = [value for value in values if value is not None]
        self.size += sum(map(len, read))
        _, items = _CODEC.decode(read)
        self.items = self.items.followed_by(items.in_packs((places + len(self.keys))[items.pack]))
        self.keys += keys
        self.owner = np.concatenate((self.owner, np.array(owners, np.int64)))

    def heads_of_items(self) -> npt.NDArray[np.int64]:
        """The number of the head that each row belongs to."""
        heads: npt.NDArray[np.int64] = self.owner[self.items.pack]
        return heads

    def write(self, dirty: npt.NDArray[np.bool_]) -> None:
        """Write the values that `dirty` names, as their rows are now; one without rows is deleted.

        A head stays while it has a chunk; chunks that are deleted leave their numbers unused.
        """
        places = np.flatnonzero(dirty[self.items.pack])
        items = self.items.take(places[np.argsort(self.items.pack[places], kind="stable")])
        items = self._split(items)
        counts = np.bincount(items.pack, minlength=len(self.keys))
        kept = counts > 0
        kept[: len(self.headers)] |= (self.headers["left"] > 0) | (self.headers["right"] > 0)
        dirty = np.concatenate((dirty, np.ones(len(self.keys) - len(dirty), np.bool_)))
        gone = [self.keys[at] for at in np.flatnonzero(dirty & ~kept).tolist()]
        self._changes.put_many(gone, [None] * len(gone))
        values = np.flatnonzero(dirty & kept)
        numbers = np.empty(len(self.keys), np.int64)
        numbers[values] = np.arange(len(values))
        headers = np.zeros(len(values), _CODEC.header)
        is_head = values < len(self.headers)
        headers[is_head] = self.headers[values[is_head]]
        coded = _CODEC.encode(headers, items.in_packs(numbers[items.pack]))
        self._changes.put_many([self.keys[at] for at in values.tolist()], coded)

    def _split(self, items: Items) -> Items:
        """Move the rows of a side that have become too many for a head to a chunk of their own."""
        heads = len(self.headers)
        groups = items.pack * 2 + (items.flags & SIDE)
        sizes = np.bincount(groups, items.sizes(), minlength=2 * heads)[: 2 * heads]
        large = np.flatnonzero(sizes > _CHUNK_BYTES)
        if not len(large):
            return items
        packs = items.pack.copy()
        for group in large.tolist():
            head, side = divmod(group, 2)
            number = int(self.headers[_COUNTERS[side]][head])
            packs[groups == group] = len(self.keys)
            self.keys.append(_chunk_key(self.keys[head], side, number))
            self.headers[_COUNTERS[side]][head] = number + 1
        moved = items.in_packs(packs)
        return moved.take(np.argsort(packs, kind="stable"))


def _chunk_key(head: bytes, side: int, number: int) -> bytes:
    return head + bytes((side,)) + number.to_bytes(4, "big")


def matching(
    keys: npt.NDArray[np.int64],
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
    target_keys: npt.NDArray[np.int64],
    target_times: npt.NDArray[np.int64],
) -> Matches:
    """Which targets have the key of a query and a time from its `low` to its `high`."""
    if not len(keys) or not len(target_keys):
        nothing = np.zeros(len(keys), np.int64)
        return Matches(np.arange(len(target_keys)), nothing, nothing)
    first, last = int(target_times.min()), int(target_times.max())
    if (max(int(keys.max()), int(target_keys.max())) + 1) * (last - first + 2) < _LARGEST_PLACE:
        low, high = np.clip(low, first, last + 1) - first, np.clip(high + 1, first, last + 1) - first
        ranks, span = target_times - first, last - first + 2
    else:
        times = np.unique(target_times)
        low, high = np.searchsorted(times, low), np.searchsorted(times, high, side="right")
        ranks, span = np.searchsorted(times, target_times), len(times) + 1
    # A target's place tells its key and then its time; those of a query are next to each other.
    places = target_keys * span + ranks
    order = np.argsort(places, kind="stable")
    places = places[order]
    return Matches(order, np.searchsorted(places, keys * span + low), np.searchsorted(places, keys * span + high))


class Matches:
    """Pairs of queries and targets: for each query a range of the targets in `order`."""

    def __init__(self, order: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> None:
        self._order = order
        self._begin = begin
        self._counts = np.maximum(end - begin, 0)
        self._totals = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._totals[-1]) if len(self._totals) else 0

    def queries(self) -> npt.NDArray[np.bool_]:
        """Which queries found a target."""
        found_one: npt.NDArray[np.bool_] = self._counts > 0
        return found_one

    def targets(self) -> npt.NDArray[np.bool_]:
        """Which targets were found."""
        steps = np.zeros(len(self._order) + 1, np.int64)
        np.add.at(steps, self._begin, self._counts > 0)
        np.add.at(steps, self._begin + self._counts, -(self._counts > 0).astype(np.int64))
        met = np.zeros(len(self._order), np.bool_)
        met[self._order] = np.cumsum(steps)[:-1] > 0
        return met

    def pairs(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The pairs from number `start` to `stop`, as places of queries and of targets."""
        numbers = np.arange(start, min(stop, len(self)))
        queries = np.searchsorted(self._totals, numbers, side="right")
        within: Any = numbers - (self._totals[queries] - self._counts[queries])
        return queries, self._order[self._begin[queries] + within]
