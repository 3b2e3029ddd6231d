"""How each kind of state stores its rows: turns entries into the columns beside the key columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.join.heads import stored_rows
from strandline.operators.timed.expiry_index import NEVER
from strandline.operators.windows.session_entries import SPAN_COLUMNS, SessionCodec
from strandline.state.coding.codec import ColumnCodec, ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.ttl import STAMP_BYTES

Int64s = npt.NDArray[np.int64]
Show = Callable[[pa.RecordBatch], list[Any]]
"""Turns accumulators into the columns that are shown."""

INSTANT: Final = pa.timestamp("us", "UTC")
LIST_SUFFIX: Final = 12
"""A list entry ends with its batch (8 bytes) and its number in the batch (4 bytes)."""
_TIME: Final = 8
_SHIFT: Final = 1 << 63
_LATEST_MS: Final = 253_402_300_799_999
_EARLIEST_MS: Final = -62_135_596_800_000
"""The last and the first millisecond that a timestamp of Spark or Python can hold: the years 1 to 9999."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some entries of a state: their stored keys, and their values."""

    stored: list[bytes]
    head: int
    """The length of the key group and the name of the state, with which stored keys begin."""
    lead_bytes: int
    ends: list[int]
    """Where the key ends in each stored key."""
    values: list[bytes]

    @property
    def leads(self) -> Iterator[bytes]:
        """What stands between the name of the state and the key."""
        end = self.head + self.lead_bytes
        return (key[self.head : end] for key in self.stored)

    @property
    def keys(self) -> Iterator[bytes]:
        """Key group, name and key, to tell keys apart."""
        return (key[:end] for key, end in zip(self.stored, self.ends, strict=True))

    @property
    def rests(self) -> Iterator[bytes]:
        """What follows the key."""
        return (key[end:] for key, end in zip(self.stored, self.ends, strict=True))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows: their columns beside the key columns, and the entry that each row comes from; None if all entries are
    rows."""

    columns: list[Any]
    entries: Int64s | None = None


class Layout(ABC):
    """The rows of one scan of a state. `decode` is called with the chunks in the order of their stored keys."""

    lead_bytes: int = 0
    """How many bytes stand between the name of the state and the key in a stored key."""
    schema: pa.Schema
    """The columns beside the key columns and the key group."""

    @abstractmethod
    def decode(self, chunk: Chunk) -> Decoded:
        """The rows of some entries. Raises `SchemaError` if the entries have another form."""


class ValueLayout(Layout):
    """A value, reducing or aggregating state: one row per key."""

    def __init__(self, state: StateDescriptor) -> None:
        self._rows = _Rows(state)
        self.schema = self._rows.schema

    def decode(self, chunk: Chunk) -> Decoded:
        expiry, values = self._rows.split(chunk.values)
        return Decoded([*self._rows.columns(self._rows.codec.decode_list(ValueCodec.join(values))), *expiry])


class ListLayout(Layout):
    """A list state: one row per element, with its `index` in the list of its key."""

    def __init__(self, state: StateDescriptor) -> None:
        self._rows = _Rows(state)
        self.schema = pa.schema([pa.field("index", pa.int64()), *self._rows.schema])
        self._key = b""
        self._next = 0

    def decode(self, chunk: Chunk) -> Decoded:
        expiry, values = self._rows.split(chunk.values)
        lists = list(map(self._rows.codec.decode_list, values))
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        firsts = np.empty(len(lists), np.int64)
        for at, (key, count) in enumerate(zip(chunk.keys, counts.tolist(), strict=True)):
            if key != self._key:
                self._key, self._next = key, 0
            firsts[at] = self._next
            self._next += count
        entries = np.repeat(np.arange(len(lists)), counts)
        index = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[entries]
        rows = [row for one in lists for row in one]
        stamps = [column.take(pa.array(entries)) for column in expiry]
        return Decoded([pa.array(index), *self._rows.columns(rows), *stamps], entries)


class MapLayout(Layout):
    """A map state: one row per map key, whose columns stand before those of the value."""

    def __init__(self, state: StateDescriptor) -> None:
        self._rows = _Rows(state)
        keys = parse_schema(state.key_schema or "")
        self._key_schema = arrow_schema(keys)
        self._key_codec = ValueCodec(keys, f"state {state.name!r}, map key", canonical=True)
        self._key_codec.as_rows()
        self.schema = pa.schema([*self._key_schema, *self._rows.schema])

    def decode(self, chunk: Chunk) -> Decoded:
        expiry, values = self._rows.split(chunk.values)
        keys = _arrays(list(map(self._key_codec.decode, chunk.rests)), self._key_schema)
        return Decoded([*keys, *self._rows.columns(self._rows.codec.decode_list(ValueCodec.join(values))), *expiry])


class TimerLayout(Layout):
    """The timers of a processor: one row per key and `time`."""

    schema = pa.schema([pa.field("time", INSTANT)])

    def decode(self, chunk: Chunk) -> Decoded:
        times = np.fromiter((int.from_bytes(rest[:_TIME], "big") - _SHIFT for rest in chunk.rests), np.int64)
        return Decoded([instants(times)])


class ColumnsLayout(Layout):
    """The state of an `ArrowProcessor`: one row per key, as Arrow columns."""

    def __init__(self, state: StateDescriptor) -> None:
        self._codec = RowCodec(parse_schema(state.schema), f"state {state.name!r}")
        self.schema = _nullable(self._codec.schema)

    def decode(self, chunk: Chunk) -> Decoded:
        return Decoded(list(self._codec.decode(chunk.values).columns))


class SeenLayout(Layout):
    """The keys that a deduplication remembers, and until when; `expiry` is null for ever."""

    schema = pa.schema([pa.field("expiry", INSTANT)])

    def __init__(self) -> None:
        self._codec = ColumnCodec(pa.schema([pa.field("expires_ms", pa.int64())]))

    def decode(self, chunk: Chunk) -> Decoded:
        return Decoded([instants(self._codec.decode(chunk.values).column(0).to_numpy())])


@dataclass(slots=True)
class AggregateLayout(Layout):
    """The aggregates of a key, or of a key and a window of fixed length: one row per entry.

    `window_ms` is the length of the windows, whose starts stand before the keys in stored keys.
    """

    stored: pa.Schema
    show: Show
    shown: pa.Schema
    window: pa.Schema | None = None
    window_ms: int = 0
    lead_bytes: int = 0
    schema: pa.Schema = field(init=False)
    _codec: ColumnCodec = field(init=False)

    def __post_init__(self) -> None:
        self._codec = ColumnCodec(self.stored)
        self.schema = pa.schema([*(self.window or ()), *self.shown])

    def decode(self, chunk: Chunk) -> Decoded:
        columns = self.show(self._codec.decode(chunk.values))
        if self.window is None:
            return Decoded(columns)
        starts = np.fromiter((int.from_bytes(lead[1:], "big") - _SHIFT for lead in chunk.leads), np.int64)
        times = window_times(starts * 1000, (starts + self.window_ms) * 1000, self.window)
        return Decoded([*times, *columns])


@dataclass(slots=True)
class SessionLayout(Layout):
    """The sessions of keys: one row per session."""

    stored: pa.Schema
    show: Show
    shown: pa.Schema
    window: pa.Schema
    gap_ms: int
    schema: pa.Schema = field(init=False)
    _codec: SessionCodec = field(init=False)

    def __post_init__(self) -> None:
        self._codec = SessionCodec(pa.schema(list(self.stored)[SPAN_COLUMNS:]))
        self.schema = pa.schema([*self.window, *self.shown])

    def decode(self, chunk: Chunk) -> Decoded:
        _, sessions = self._codec.decode(chunk.values)
        times = window_times(sessions.starts, sessions.lasts + self.gap_ms * 1000, self.window)
        return Decoded([*times, *self.show(sessions.states)], sessions.owners)


class JoinLayout(Layout):
    """The rows that one side of a join keeps: one row each, with the columns of the side.

    `names` are the columns in the input of the side; None for a column that is part of the key.
    """

    def __init__(self, side: int, stored: StructType, names: Sequence[str | None], where: str) -> None:
        self._side = side
        self._codec = RowCodec(stored, where)
        self._shown = [at for at, name in enumerate(names) if name is not None]
        self.schema = pa.schema([pa.field(str(names[at]), self._codec.schema.field(at).type) for at in self._shown])

    def decode(self, chunk: Chunk) -> Decoded:
        items = stored_rows(chunk.values)[self._side]
        rows = self._codec.decode_array(items.data)
        return Decoded([rows.column(at) for at in self._shown], items.entry)


class _Rows:
    """Decodes the values of a state that user code declares, and their expiry times if it has a time to live."""

    def __init__(self, state: StateDescriptor) -> None:
        struct = parse_schema(state.schema)
        self.codec = ValueCodec(struct, f"state {state.name!r}")
        self.codec.as_rows()
        self._values = arrow_schema(struct)
        self._expires = state.ttl_ms is not None
        expiry = [pa.field("expiry", INSTANT)] if self._expires else []
        self.schema = pa.schema([*_nullable(self._values), *expiry])

    def split(self, values: list[bytes]) -> tuple[list[Any], list[bytes]]:
        """The expiry times as a column, if there are any, and the values without them."""
        if not self._expires:
            return [], values
        times = np.fromiter((int.from_bytes(data[:STAMP_BYTES], "big") for data in values), np.uint64, len(values))
        return [instants(np.minimum(times, np.uint64(NEVER)).astype(np.int64))], [data[STAMP_BYTES:] for data in values]

    def columns(self, rows: list[Any]) -> list[Any]:
        """The columns of decoded rows."""
        return _arrays(rows, self._values)


def instants(times_ms: Int64s) -> Any:
    """Milliseconds since the epoch as timestamps; null where a timestamp cannot hold them."""
    known = (times_ms >= _EARLIEST_MS) & (times_ms <= _LATEST_MS)
    return pa.array(np.where(known, times_ms, 0) * 1000, mask=~known).view(INSTANT)


def window_times(starts: Int64s, ends: Int64s, window: pa.Schema) -> list[Any]:
    """The columns of windows: start, end, and the last microsecond if the schema has it."""
    times = (starts, ends, ends - 1)
    return [pa.array(one).view(column.type) for one, column in zip(times, window, strict=False)]


def _arrays(rows: list[Any], schema: pa.Schema) -> list[Any]:
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    return [pa.array(values, one.type) for values, one in zip(columns, schema, strict=True)]


def _nullable(schema: pa.Schema) -> pa.Schema:
    """The columns without "not null". A reader may drop the column metadata, too."""
    return pa.schema([pa.field(one.name, one.type) for one in schema])
