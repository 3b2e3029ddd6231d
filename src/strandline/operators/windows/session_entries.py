"""The state entry of a key's sessions: the time of the next look at the key, and one row per session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.operators.columns.binary import binary_content, binary_spans
from strandline.state.coding.codec import ColumnCodec

_SPAN: Final = (pa.field("start", pa.int64()), pa.field("last", pa.int64()), pa.field("changed", pa.int64()))
"""The times of a session's first and last row in microseconds, and the batch that changed it last."""
SPAN_COLUMNS: Final = len(_SPAN)

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of several keys, sorted by key and start; `owners` has the number of each session's key."""

    owners: Int64s
    starts: Int64s
    lasts: Int64s
    changed: Int64s
    states: pa.RecordBatch

    def filter(self, mask: Bools) -> Sessions:
        """The sessions for which the mask is true."""
        if mask.all():
            return self
        states = self.states.filter(pa.array(mask))
        return Sessions(self.owners[mask], self.starts[mask], self.lasts[mask], self.changed[mask], states)


class SessionCodec:
    """Encodes and decodes the state entries of keys; `stored` has the columns of the accumulators."""

    def __init__(self, stored: pa.Schema) -> None:
        self._stored = stored
        self._rows = ColumnCodec(pa.schema([*_SPAN, *stored]))
        self.schema = self._rows.schema

    def encode(self, looks: Int64s, sessions: Sessions) -> list[bytes]:
        """The entry of each key; every key has at least one session."""
        spans = [pa.array(sessions.starts), pa.array(sessions.lasts), pa.array(sessions.changed)]
        rows = pa.RecordBatch.from_arrays([*spans, *sessions.states.columns], schema=self.schema)
        encoded = pa.array(self._rows.encode(rows), pa.binary())
        lengths = pc.binary_length(encoded).to_numpy().astype("<u4")
        offsets, data = binary_content(join_bytes(fixed_bytes(lengths), encoded))
        edges = np.searchsorted(sessions.owners, np.arange(len(looks) + 1))
        joined = join_bytes(fixed_bytes(looks.astype("<i8")), binary_spans(data, offsets[edges]))
        entries: list[bytes] = joined.to_pylist()
        return entries

    def decode(self, entries: list[bytes]) -> tuple[Int64s, Sessions]:
        """The time of the next look at each key, and the sessions."""
        data = b"".join(entries)
        sizes = np.fromiter(map(len, entries), np.int64, len(entries))
        ends = np.cumsum(sizes)
        begins = ends - sizes
        everything = np.frombuffer(data, np.uint8)
        looks = _unfixed(everything, begins, "<i8").astype(np.int64)
        at, owners = begins + 8, np.arange(len(entries))
        found: list[tuple[Int64s, Int64s, Int64s]] = []
        while len(at):
            lengths = _unfixed(everything, at, "<u4").astype(np.int64)
            found.append((owners, at + 4, at + 4 + lengths))
            at = at + 4 + lengths
            more = at < ends[owners]
            at, owners = at[more], owners[more]
        owned, first, last = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else [owners] * 3
        order = np.argsort(owned, kind="stable")
        spans = zip(first[order].tolist(), last[order].tolist(), strict=True)
        rows = self._rows.decode([data[a:b] for a, b in spans])
        starts, lasts, changed = (column.to_numpy() for column in rows.columns[:3])
        states = pa.RecordBatch.from_arrays(rows.columns[3:], schema=self._stored)
        return looks, Sessions(owned[order], starts, lasts, changed, states)


def touching(owners: Int64s, starts: Int64s, lasts: Int64s, gap: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Join the spans of time of an owner that are at most `gap` apart.

    Returns the number of the joined span for each span; numbers are in the order of owners and starts. Then, for each
    joined span: one of its spans, its start and its last moment.
    """
    order = np.lexsort((starts, owners))
    owned, begins, ends = owners[order], starts[order], lasts[order]
    # The latest moment so far of each owner: a running maximum of ranks, raised above the ranks of earlier owners.
    moments, ranks = np.unique(ends, return_inverse=True)
    owner_changes = np.concatenate(([True], owned[1:] != owned[:-1]))
    lift = (np.cumsum(owner_changes) - 1) * len(moments)
    latest = moments[np.maximum.accumulate(ranks + lift) - lift]
    fresh = owner_changes
    fresh[1:] |= begins[1:] - latest[:-1] > gap
    first = np.flatnonzero(fresh)
    ids = np.empty(len(order), np.int64)
    ids[order] = np.cumsum(fresh) - 1
    return ids, order[first], begins[first], latest[np.append(first[1:], len(order)) - 1]


def join_bytes(*parts: Any) -> Any:
    """Binary columns and scalars, joined row by row."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def fixed_bytes(numbers: npt.NDArray[Any]) -> Any:
    """A binary column with the bytes of each number."""
    offsets = np.arange(len(numbers) + 1) * numbers.dtype.itemsize
    return binary_spans(pa.py_buffer(np.ascontiguousarray(numbers)), offsets)


def _unfixed(data: npt.NDArray[np.uint8], at: Int64s, kind: str) -> npt.NDArray[Any]:
    """The numbers that begin at the places `at`."""
    width = np.dtype(kind).itemsize
    return np.ascontiguousarray(data[at[:, None] + np.arange(width)]).view(kind).ravel()
