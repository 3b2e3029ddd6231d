"""Timed items: many small items with a time, stored together in one state entry.

State is then read and written once per entry, not once per item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import SchemaError

_RECORD: Final = np.dtype([("time", "<i8"), ("flags", "u1"), ("length", "<u4")])
_EMPTY: Final = pa.array([], pa.large_binary())


@dataclass(frozen=True, slots=True)
class TimedItems:
    """Items as columns: the number of the item's entry, its time, its flags and its bytes (large binary)."""

    entry: npt.NDArray[np.int64]
    time: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]
    data: Any

    def __len__(self) -> int:
        return len(self.entry)

    @classmethod
    def none(cls) -> TimedItems:
        """An empty collection."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8), _EMPTY)

    def take(self, places: npt.NDArray[np.int64]) -> TimedItems:
        """The items at `places`."""
        return TimedItems(self.entry[places], self.time[places], self.flags[places], self.data.take(pa.array(places)))

    def in_entries(self, entries: npt.NDArray[np.int64]) -> TimedItems:
        """The same items, assigned to other entries."""
        return TimedItems(entries, self.time, self.flags, self.data)

    def flagged(self, flags: npt.NDArray[np.uint8]) -> TimedItems:
        """The same items with new flags."""
        return TimedItems(self.entry, self.time, flags, self.data)

    def followed_by(self, other: TimedItems) -> TimedItems:
        """These items, followed by those of `other`."""
        if not len(self) or not len(other):
            return self if len(self) else other
        return TimedItems(
            np.concatenate((self.entry, other.entry)),
            np.concatenate((self.time, other.time)),
            np.concatenate((self.flags, other.flags)),
            pa.concat_arrays([self.data, other.data]),
        )

    def sizes(self) -> npt.NDArray[np.int64]:
        """The number of bytes of each item."""
        sizes: npt.NDArray[np.int64] = pc.binary_length(self.data).to_numpy()
        return sizes


class TimedItemsCodec:
    """Encodes entries: a header (the number of items, and `fields`), then a record per item, then their bytes."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self.header = np.dtype([("count", "<u4"), *fields])

    def encode(self, headers: npt.NDArray[Any], items: TimedItems) -> list[bytes]:
        """The bytes of each entry, one per header; `items` must be sorted by entry."""
        counts = np.bincount(items.entry, minlength=len(headers))
        headers = headers.copy()
        headers["count"] = counts
        edges = np.concatenate(([0], np.cumsum(counts)))
        records = np.empty(len(items), _RECORD)
        records["time"], records["flags"], records["length"] = items.time, items.flags, items.sizes()
        offsets = np.concatenate(([0], np.cumsum(records["length"], dtype=np.int64)))
        first = np.frombuffer(items.data.buffers()[1], np.int64, 1, items.data.offset * 8)[0] if len(items) else 0
        parts = [
            _binary(np.arange(len(headers) + 1) * self.header.itemsize, headers),
            _binary(edges * _RECORD.itemsize, records),
            _binary(offsets[edges] + first, items.data.buffers()[2] or b""),
        ]
        joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
        values: list[bytes] = joined.to_pylist()
        return values

    def decode(self, values: list[bytes]) -> tuple[npt.NDArray[Any], TimedItems]:
        """The headers and items of stored entries; raises `SchemaError` if the bytes have another format."""
        if not values:
            return np.zeros(0, self.header), TimedItems.none()
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        starts = np.cumsum(lengths) - lengths
        if lengths.min() < self.header.itemsize:
            raise _unreadable()
        data = b"".join(values)
        everything = np.frombuffer(data, np.uint8)
        headers = _records(everything, starts, self.header)
        counts = headers["count"].astype(np.int64)
        entries = np.repeat(np.arange(len(values)), counts)
        within = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
        records_at = starts + self.header.itemsize
        contents_at = records_at + counts * _RECORD.itemsize
        if (contents_at > starts + lengths).any():
            raise _unreadable()
        records = _records(everything, records_at[entries] + within * _RECORD.itemsize, _RECORD)
        ends = np.cumsum(records["length"], dtype=np.int64)
        sizes = np.diff(np.concatenate(([0], ends))[np.concatenate(([0], np.cumsum(counts)))])
        if not np.array_equal(contents_at + sizes, starts + lengths):
            raise _unreadable()
        begins = ends - records["length"] + np.repeat(contents_at - (np.cumsum(sizes) - sizes), counts)
        spans = np.empty(2 * len(entries) + 1, np.int64)
        spans[0:-1:2], spans[1::2], spans[-1] = begins, begins + records["length"], len(data)
        contents = _binary(spans, data).take(pa.array(np.arange(0, 2 * len(entries), 2)))
        return headers, TimedItems(entries, records["time"].copy(), records["flags"].copy(), contents)


def _records(everything: Any, places: npt.NDArray[np.int64], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    gathered: npt.NDArray[Any] = everything[places[:, None] + np.arange(kind.itemsize)]
    return gathered.view(kind).reshape(len(places))


def _binary(offsets: npt.NDArray[np.int64], data: Any) -> Any:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _unreadable() -> SchemaError:
    return SchemaError(
        "a stored entry of timed items cannot be read: another kind of step wrote it under the same uid; "
        "give this step another uid"
    )
