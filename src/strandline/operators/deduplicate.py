"""Deduplication: of the rows of a key only the first passes, for as long as the key is remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import JobDefinitionError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.columns import (
    check_time_column,
    column_type,
    found,
    gathered,
    is_valid,
    micros,
    whole_millis,
)
from strandline.operators.columns.rows import arrow_schema
from strandline.operators.timed.expiry import NEVER, UNKNOWN, ExpiryIndex
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.keys import KeyEncoder
from strandline.state.descriptors import StateDescriptor

SEEN: Final = "seen"
_INDEX: Final = "seen-until"
_STORED: Final = pa.schema([pa.field("expires_ms", pa.int64())])
_GATHER_ROWS: Final = 1 << 18
_LEAST_CLEANED: Final = 10_000
_GRANULES: Final = 16


class DeduplicateOperator(Operator):
    """Passes the first row of each key, in the order of arrival, and drops the others.

    Without `time_column` a key is remembered for `ttl_ms` of processing time after its first row, or for ever. With it
    a row is a duplicate if its time, in whole milliseconds (rounded up), is at most `ttl_ms` after that of the first
    one, and a key is kept until the watermark has passed that; rows that are late, or have no time, are dropped and
    counted. What is no longer remembered is removed in the background, up to twice as many keys per batch as rows came
    in.
    """

    sorted_input = False

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        ttl_ms: int | None,
        time_column: str | None = None,
    ) -> None:
        where = f"operator {uid!r}"
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.input_struct = self.output_struct = input_schema
        self.ttl_ms = ttl_ms
        self.time_column = time_column
        for name in self.key_columns:
            column_type(input_schema, name, where)
        if ttl_ms is not None and (type(ttl_ms) is not int or ttl_ms <= 0):
            raise JobDefinitionError(f"{where}: ttl is {ttl_ms!r} ms; it must be a duration above zero")
        if time_column is not None:
            check_time_column(input_schema, time_column, where)
            self.time_mode = "event"
            if ttl_ms is None:
                raise JobDefinitionError(
                    f"{where}: deduplication by the event time {time_column!r} needs a ttl: how long after a row "
                    "others of its key count as duplicates"
                )
        self.output_schema = arrow_schema(input_schema)
        self._input = self.output_schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        self._encoder = KeyEncoder(self._input, self.key_columns, KEY_GROUP_COLUMN)
        self._codec = ColumnCodec(_STORED)
        self._where = where
        self._index: ExpiryIndex | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what it was made of travels to the slots."""
        return DeduplicateOperator, (self.uid, self.key_columns, self.input_struct, self.ttl_ms, self.time_column)

    def open(self, info: SubtaskInfo) -> None:
        """Remember where this runs."""
        self._where = f"operator {info.uid!r}, subtask {info.subtask}"
        self._index = None if self.ttl_ms is None else ExpiryIndex(_INDEX, self.ttl_ms // _GRANULES, info)

    def states(self) -> list[StateDescriptor]:
        """When each key is forgotten, and the index of those times."""
        seen = StateDescriptor(SEEN, "columns", "expires_ms long")
        return [seen] if self.ttl_ms is None else [seen, ExpiryIndex.descriptor(_INDEX)]

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose key is not known yet, then forget keys whose time is over."""
        self.late_rows = 0
        count = 0
        if self._index is not None:
            self._index.begin(batch.batch_id)
        for part in gathered(rows, self._input, _GATHER_ROWS, self._where):
            count += part.num_rows
            first = self._first_rows(part, changes, batch)
            if len(first) == part.num_rows:
                yield self._output(part)
            elif len(first):
                yield self._output(part.take(pa.array(first)))
        now = batch.processing_time_ms if self.time_column is None else batch.watermark_ms
        if self._index is not None and now is not None:
            for due in self._index.due(changes, now, max(_LEAST_CLEANED, 2 * count)):
                self._forget(due.keys, now, changes)

    def _first_rows(self, part: pa.RecordBatch, changes: ChangeSet, batch: BatchInfo) -> npt.NDArray[np.int64]:
        """The places of the rows that pass, in the order of arrival; their keys are known from now on."""
        encoded = self._encoder.encode(part)
        timely, expires = self._expiry(part, batch)
        order = encoded.order()
        if timely is not None:
            order = order[timely[order]]
        if len(order) == 0:
            return order
        distinct = encoded.take(order)
        starts = distinct.starts()
        stored = distinct.take(starts).stored(SEEN) if len(starts) < len(order) else distinct.stored(SEEN)
        values = changes.get_many(stored)
        until = np.full(len(stored), UNKNOWN)
        places = found(values)
        if len(places):
            until[places] = self._until([value for value in values if value is not None])
        now = None
        if self.ttl_ms is not None:
            # By the clock a key is forgotten at the end of its time; an event at that very moment is a duplicate.
            now = expires - self.ttl_ms + (1 if self.time_column is None else 0)
        passing, changed = _passing(order, starts, now, expires, until)
        renewed = np.flatnonzero(changed)
        stored, times = [stored[at] for at in renewed.tolist()], until[renewed]
        changes.put_many(stored, self._codec.encode(_times(times)))
        if self._index is not None:
            self._index.add(changes, stored, times)
        return passing

    def _expiry(
        self, part: pa.RecordBatch, batch: BatchInfo
    ) -> tuple[npt.NDArray[np.bool_] | None, npt.NDArray[np.int64]]:
        """Which rows are not late (None: all), and until when a key is remembered for each row."""
        if self.ttl_ms is None:
            return None, np.full(part.num_rows, NEVER)
        if self.time_column is None:
            return None, np.full(part.num_rows, batch.processing_time_ms + self.ttl_ms)
        column = part.column(self.time_column)
        times = micros(column)
        timely = is_valid(column)
        if batch.late_watermark_ms is not None:
            timely &= times > 1000 * batch.late_watermark_ms
        self.late_rows += part.num_rows - int(timely.sum())
        return timely, whole_millis(times) + self.ttl_ms

    def _forget(self, keys: list[bytes], now: int, changes: ChangeSet) -> None:
        keys = sorted(set(keys))
        values = changes.get_many(keys)
        places = found(values)
        if len(places):
            # A key that was forgotten and came again has a later time than the index knew of.
            until = self._until([value for value in values if value is not None])
            over = [keys[at] for at in places[until <= now].tolist()]
            changes.put_many(over, [None] * len(over))

    def _until(self, values: list[bytes]) -> npt.NDArray[np.int64]:
        until: npt.NDArray[np.int64] = self._codec.decode(values).column(0).to_numpy()
        return until

    def _output(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(rows.columns[:-1], schema=self.output_schema)


def _passing(
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    now: npt.NDArray[np.int64] | None,
    expires: npt.NDArray[np.int64],
    until: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The rows that pass, in the order of arrival, and which keys they renew; `until` is brought up to date.

    `order` are the rows, those of a key next to each other from `starts` on. A row passes if its time, `now`, is after
    that until which its key is remembered; None where keys are remembered for ever. Rows of a key that are far apart
    in time may pass one after the other, each in a turn of the loop.
    """
    key = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    open_rows = until[key] == UNKNOWN if now is None else now[order] > until[key]
    passing: list[npt.NDArray[np.int64]] = []
    changed = np.zeros(len(starts), np.bool_)
    while open_rows.any():
        rows, keys = order[open_rows], key[open_rows]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        firsts, whose = np.minimum.reduceat(rows, begins), keys[begins]
        passing.append(firsts)
        changed[whose] = True
        until[whose] = expires[firsts]
        if now is None:
            break
        after = np.full(len(starts), -1)
        after[whose] = firsts
        open_rows &= (order > after[key]) & (now[order] > until[key])
    return np.sort(np.concatenate(passing)) if passing else order[:0], changed


def _times(times: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(times)], schema=_STORED)
