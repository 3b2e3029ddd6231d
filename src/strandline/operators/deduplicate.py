"""The operator that removes duplicates: it passes the first row of a key, and drops the others for a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.checkpoint.steps import StepDescription
from strandline.errors import JobDefinitionError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, Output, SideRows, SubtaskInfo
from strandline.operators.columns.declared import check_time_column, column_type
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.event_times import micros, whole_millis
from strandline.operators.columns.gather import gathered
from strandline.operators.columns.lookups import found_places
from strandline.operators.columns.nulls import is_valid
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import default_time_column, lag_of, time_columns, with_time_columns
from strandline.operators.rewrite import ConvertedValues, Rewrite, state_ranges
from strandline.operators.step_change import StepChange
from strandline.operators.timed.expiry_index import NEVER, READ_KEYS, UNKNOWN, ExpiryIndex
from strandline.operators.timed.late_rows import DROP, check_late
from strandline.state.backends.base import StateBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.keys import KeyEncoder
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.handles.query import Found

SEEN: Final = "seen"
_INDEX: Final = "seen-until"
_STORED: Final = pa.schema([pa.field("expires_ms", pa.int64())])
_GRANULES: Final = 16


@dataclass(frozen=True, slots=True)
class DeduplicateLimits:
    """Bounds of the steps of a deduplication."""

    gather_rows: int = 1 << 18
    """How many rows are checked at a time."""
    least_cleaned: int = 10_000
    """A batch removes up to this many expired keys, or twice as many keys as it has rows if that is more."""
    read_keys: int = READ_KEYS
    """How many expired keys are read from the expiry index at a time."""


_DEFAULT: Final = DeduplicateLimits()


class DeduplicateOperator(Operator):
    """Passes the first row of each key, in the order of arrival, and drops the others.

    Without `time_column`, a key is remembered for `ttl_ms` of processing time after its first row, or for ever if
    `ttl_ms` is None. With `time_column`, a row is a duplicate if its time, rounded up to milliseconds, is at most
    `ttl_ms` after the time of the first row; the key is remembered until the watermark has passed that time. Late rows
    are counted. They are dropped (`late="drop"`), or go to the side output that `late` names. A row whose time is null
    counts as late, because nobody can tell how long its key should be remembered.

    Every batch removes a bounded number of keys that are no longer remembered; see `DeduplicateLimits`.
    """

    sorted_input = False

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        ttl_ms: int | None,
        time_column: str | None = None,
        limits: DeduplicateLimits = _DEFAULT,
        late: str = DROP,
    ) -> None:
        where = f"operator {uid!r}"
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.input_struct = self.output_struct = input_schema
        self.ttl_ms = ttl_ms
        self.time_column = time_column
        self.limits = limits
        self.late = late
        check_late(
            late,
            where,
            "the key of a late row may be forgotten, so nobody can tell whether the row is a duplicate; with a longer "
            "watermark_delay= fewer rows are late",
        )
        for name in self.key_columns:
            column_type(input_schema, name, where)
        if ttl_ms is not None and (type(ttl_ms) is not int or ttl_ms <= 0):
            raise JobDefinitionError(f"{where}: ttl is {ttl_ms!r} ms; it must be longer than 0")
        if time_column is None and late != DROP:
            raise JobDefinitionError(f"{where}: late={late!r} needs within=: only by event time are rows late")
        self.side_outputs = {} if late == DROP else {late: with_time_columns(input_schema, {})}
        if time_column is not None:
            check_time_column(input_schema, time_column, where)
            self.time_mode = "event"
            self.emits_on_time = False
            if ttl_ms is None:
                raise JobDefinitionError(
                    f"{where}: deduplication by the event time {time_column!r} needs ttl=, the time after a row in "
                    "which other rows of its key are duplicates"
                )
        self.time_columns = _time_columns(input_schema, time_column)
        self.default_time = default_time_column(input_schema) or time_column
        self.output_schema = arrow_schema(input_schema)
        self._input = self.output_schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        self._encoder = KeyEncoder(self._input, self.key_columns, KEY_GROUP_COLUMN)
        self._codec = ColumnCodec(_STORED)
        self._where = where
        self._index: ExpiryIndex | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the slot builds the rest again."""
        first = (self.uid, self.key_columns, self.input_struct)
        return DeduplicateOperator, (*first, self.ttl_ms, self.time_column, self.limits, self.late)

    def open(self, info: SubtaskInfo) -> None:
        """Remember the subtask, and open the expiry index."""
        self._where = info.where
        if self.ttl_ms is not None:
            self._index = ExpiryIndex(_INDEX, self.ttl_ms // _GRANULES, info, self.limits.read_keys)

    def states(self) -> list[StateDescriptor]:
        """The time until which each key is remembered, and the expiry index of these times."""
        seen = StateDescriptor(SEEN, "columns", "expires_ms long")
        return [seen] if self.ttl_ms is None else [seen, ExpiryIndex.descriptor(_INDEX)]

    def describe(self) -> StepDescription:
        """How long a key is remembered, and by which clock."""
        times = () if self.time_column is None else described_columns(self.input_struct, [self.time_column])
        keys = described_columns(self.input_struct, self.key_columns)
        return StepDescription(self.uid, "deduplicate", keys, times, {"ttl_ms": self.ttl_ms})

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """Keys that are remembered may be remembered for another time. Keys that were forgotten stay so."""
        old, new = change.before.parameters.get("ttl_ms"), self.ttl_ms
        change.explain("and nothing tells how long keys that were to be kept for ever have been known", "ttl_ms")
        if not isinstance(old, int) or not change.differs("ttl_ms"):
            return ()
        change.accept("ttl_ms")
        return (_Unlimited(),) if new is None else (_Prolonged(new - old),)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Yield the rows whose key is not remembered, then remove keys that have expired."""
        self.late_rows = 0
        count = 0
        if self._index is not None:
            self._index.begin(batch.batch_id)
        for part in gathered(rows, self._input, self.limits.gather_rows, self._where):
            count += part.num_rows
            timely, expires = self._expiry(part, batch)
            if timely is not None and not timely.all():
                self.late_rows += int(np.count_nonzero(~timely))
                if self.side_outputs:
                    yield SideRows(self.late, self._output(part.filter(pa.array(~timely))))
            first = self._first_rows(part, changes, timely, expires)
            if len(first) == part.num_rows:
                yield self._output(part)
            elif len(first):
                yield self._output(part.take(pa.array(first)))
        now = batch.processing_time_ms if self.time_column is None else batch.watermark_ms
        if self._index is not None and now is not None:
            for due in self._index.due(changes, now, max(self.limits.least_cleaned, 2 * count)):
                self._forget(due.keys, now, changes)

    def look_up(self, look: LookUp, state: str | None) -> Found:
        """Until when the key is remembered, as `expires`: None for ever."""
        self._refuse_state(state)
        entry = look.entry(SEEN)
        if entry is None:
            return None
        until = int(self._until([entry])[0])
        return ({"expires": None if until == NEVER else datetime.fromtimestamp(until / 1000, UTC)},)

    def nothing(self, state: str | None) -> None:
        """The key is not remembered."""
        self._refuse_state(state)

    def _first_rows(
        self,
        part: pa.RecordBatch,
        changes: ChangeSet,
        timely: npt.NDArray[np.bool_] | None,
        expires: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """The places of the rows that pass, in the order of arrival; remembers their keys."""
        encoded = self._encoder.encode(part)
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
        places = found_places(values)
        if len(places):
            until[places] = self._until([value for value in values if value is not None])
        now = None
        if self.ttl_ms is not None:
            # By the clock, a key expires at the end of its time. By event time, a row at that very time is a duplicate.
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
        """Which rows are not late (None: all), and the time until which each row's key would be remembered."""
        if self.ttl_ms is None:
            return None, np.full(part.num_rows, NEVER)
        if self.time_column is None:
            return None, np.full(part.num_rows, batch.processing_time_ms + self.ttl_ms)
        column = part.column(self.time_column)
        times = micros(column)
        timely = is_valid(column)
        if batch.late_watermark_ms is not None:
            timely &= times > 1000 * batch.late_watermark_ms
        return timely, whole_millis(times) + self.ttl_ms

    def _forget(self, keys: list[bytes], now: int, changes: ChangeSet) -> None:
        keys = sorted(set(keys))
        values = changes.get_many(keys)
        places = found_places(values)
        if len(places):
            # A key that expired and came again has a later time than the one that the index returned it for.
            until = self._until([value for value in values if value is not None])
            over = [keys[at] for at in places[until <= now].tolist()]
            changes.put_many(over, [None] * len(over))

    def _until(self, values: list[bytes]) -> npt.NDArray[np.int64]:
        until: npt.NDArray[np.int64] = self._codec.decode(values).column(0).to_numpy()
        return until

    def _output(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(rows.columns[:-1], schema=self.output_schema)


def _time_columns(schema: StructType, read: str | None) -> dict[str, int]:
    """The time columns of the input, with their lags behind the watermark of the step, which reads the column `read`.

    The watermark of the step is that of its input less the lag of `read`, and no row is late in this column.
    """
    own = 0 if read is None else lag_of(schema[read]) or 0
    lags = {name: max(0, lag - own) for name, lag in time_columns(schema).items()}
    return lags if read is None else {**lags, read: 0}


@dataclass(frozen=True, slots=True)
class _Prolonged(Rewrite):
    """Remembers all keys for longer, or less long, by the same time."""

    by_ms: int

    @property
    def states(self) -> tuple[str, ...]:
        return (SEEN, _INDEX)

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Rewrite the times of the keys, and the expiry index."""
        ConvertedValues(SEEN, self._prolonged).apply(backend, key_groups)
        for start, end in state_ranges(key_groups, _INDEX):
            ExpiryIndex.move(backend, start, end, self.by_ms)

    def _prolonged(self, values: list[bytes]) -> list[bytes]:
        codec = ColumnCodec(_STORED)
        return codec.encode(_times(codec.decode(values).column(0).to_numpy() + self.by_ms))


@dataclass(frozen=True, slots=True)
class _Unlimited(Rewrite):
    """Remembers all keys for ever."""

    @property
    def states(self) -> tuple[str, ...]:
        return (SEEN, _INDEX)

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Rewrite the times of the keys, and delete the expiry index."""
        codec = ColumnCodec(_STORED)
        never = ConvertedValues(SEEN, lambda values: codec.encode(_times(np.full(len(values), NEVER))))
        never.apply(backend, key_groups)
        for start, end in state_ranges(key_groups, _INDEX):
            backend.delete_between(start, end)


def _passing(
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    now: npt.NDArray[np.int64] | None,
    expires: npt.NDArray[np.int64],
    until: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The rows that pass, in the order of arrival, and the keys that they renew; updates `until`.

    `order` has the rows, sorted by key, and `starts` the places in it at which keys begin. A row passes if its time in
    `now` is after the time in `until` of its key. `now` is None if keys are remembered for ever. Several rows of a key
    may pass if they are far apart in time; each turn of the loop finds one of them.
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
