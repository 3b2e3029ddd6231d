"""The stored rows of a join: the rows of a key and a bucket of time in one entry, the head, which is read by its key.

A head, `key group | rows | 0 | key | bucket`, holds rows of both sides. If the rows of a side become too large, they
are moved to a chunk, `head | side | number`. A chunk is rewritten only if one of its rows changes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from strandline.operators.columns.lookups import found_places
from strandline.operators.timed.timed_items import TimedItems, TimedItemsCodec
from strandline.state.batch.changes import ChangeSet

SIDE: Final = 1
MATCHED: Final = 2
"""Flags of a stored row: its side (0: left, 1: right), and whether it has found a partner."""
_CODEC: Final = TimedItemsCodec([("left", "<u4"), ("right", "<u4"), ("due", "<i8")])
_COUNTERS: Final = ("left", "right")


class Heads:
    """Heads and their rows, read from state. Rows are added and changed here, and then written back.

    `headers` has, for each head, the number of chunks of each side and the time at which it is due (milliseconds).
    `known` says which heads were found in state. `items.entry` is the number of the entry that holds a row: entries are
    numbered by their place in `keys`, first the heads, then the chunks.
    """

    def __init__(self, changes: ChangeSet, keys: list[bytes], chunk_bytes: int) -> None:
        self._changes = changes
        self._chunk_bytes = chunk_bytes
        self.keys = list(keys)
        values = changes.get_many(keys)
        places = found_places(values)
        read = [value for value in values if value is not None]
        some, items = _CODEC.decode(read)
        self.size = sum(map(len, read))
        self.headers = np.zeros(len(keys), _CODEC.header)
        self.headers[places] = some
        self.known = np.zeros(len(keys), np.bool_)
        self.known[places] = True
        self.items = items.in_entries(places[items.entry])
        self.owner = np.arange(len(keys))

    def read_chunks(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Read the chunks of the heads and sides for which `wanted` is true."""
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
        places = found_places(values)
        read = [value for value in values if value is not None]
        self.size += sum(map(len, read))
        _, items = _CODEC.decode(read)
        self.items = self.items.followed_by(items.in_entries((places + len(self.keys))[items.entry]))
        self.keys += keys
        self.owner = np.concatenate((self.owner, np.array(owners, np.int64)))

    def heads_of_items(self) -> npt.NDArray[np.int64]:
        """The number of the head of each row."""
        heads: npt.NDArray[np.int64] = self.owner[self.items.entry]
        return heads

    def write(self, dirty: npt.NDArray[np.bool_]) -> None:
        """Write the entries for which `dirty` is true, with their present rows. An entry without rows is deleted.

        A head is kept while it has chunks. The number of a deleted chunk is not used again.
        """
        places = np.flatnonzero(dirty[self.items.entry])
        items = self.items.take(places[np.argsort(self.items.entry[places], kind="stable")])
        items = self._split(items)
        counts = np.bincount(items.entry, minlength=len(self.keys))
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
        coded = _CODEC.encode(headers, items.in_entries(numbers[items.entry]))
        self._changes.put_many([self.keys[at] for at in values.tolist()], coded)

    def _split(self, items: TimedItems) -> TimedItems:
        """Move the rows of a side that have become too large for their head to a new chunk."""
        heads = len(self.headers)
        groups = items.entry * 2 + (items.flags & SIDE)
        sizes = np.bincount(groups, items.sizes(), minlength=2 * heads)[: 2 * heads]
        large = np.flatnonzero(sizes > self._chunk_bytes)
        if not len(large):
            return items
        entries = items.entry.copy()
        for group in large.tolist():
            head, side = divmod(group, 2)
            number = int(self.headers[_COUNTERS[side]][head])
            entries[groups == group] = len(self.keys)
            self.keys.append(_chunk_key(self.keys[head], side, number))
            self.headers[_COUNTERS[side]][head] = number + 1
        moved = items.in_entries(entries)
        return moved.take(np.argsort(entries, kind="stable"))


def stored_rows(entries: list[bytes]) -> tuple[TimedItems, TimedItems]:
    """The rows of heads and chunks: those of the left side and those of the right side, each in the order of time."""
    _, items = _CODEC.decode(entries)
    items = items.take(np.argsort(items.time, kind="stable"))
    right = (items.flags & SIDE).astype(np.bool_)
    return items.take(np.flatnonzero(~right)), items.take(np.flatnonzero(right))


def _chunk_key(head: bytes, side: int, number: int) -> bytes:
    return head + bytes((side,)) + number.to_bytes(4, "big")
