"""Windows of event time: rows of a key are aggregated by the time at which they happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from strandline.errors import JobDefinitionError
from strandline.operators.aggregate.aggregates import Aggregate, AggregatePlan
from strandline.operators.aggregate.grouping import flat, gathered
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, Output, SideRows, SubtaskInfo
from strandline.operators.columns.columns import column_type
from strandline.operators.columns.rows import arrow_schema
from strandline.operators.windows.panes import PaneWindows
from strandline.operators.windows.sessions import SessionWindows
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, WindowSpec, session, sliding, tumbling
from strandline.operators.windows.state import TIME_COLUMN, Emit, WindowRows, WindowSettings, WindowState
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range
from strandline.state.descriptors import StateDescriptor

__all__ = ["SessionWindow", "SlidingWindow", "WindowOperator", "WindowSpec", "session", "sliding", "tumbling"]

WINDOW_COLUMNS: Final = ("window_start", "window_end")


class WindowOperator(Operator):
    """Emits the key columns, `window_start`, `window_end` (its first moment after) and the aggregates of a window.

    With `emit="close"` a window is emitted once, when the watermark reaches its end. With allowed lateness its state is
    kept for that much longer, and rows that come meanwhile emit it again, updated, in the batch that they come in. With
    `emit="update"` every batch emits the windows that changed in it, and none when it closes; a session that was merged
    into another is not taken back: the longer one, with another start, comes after it.

    A row is late when all its windows are over, allowed lateness included, by the watermark of the batch before; for a
    session that is the one that the row alone would make. Late rows are counted, and dropped (`late="drop"`) or given
    to the side output that `late` names, with all input columns. Rows without a time belong to no window: they are
    dropped, as in Spark, and not counted as late.
    """

    sorted_input = False
    time_mode = "event"

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        spec: WindowSpec,
        time_column: str,
        aggregates: Mapping[str, Aggregate],
        allowed_lateness_ms: int = 0,
        emit: Emit = "close",
        late: str = "drop",
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.input_struct = input_schema
        self.spec = spec
        self.time_column = time_column
        self.aggregates = dict(aggregates)
        self.allowed_lateness_ms = allowed_lateness_ms
        self.emit = emit
        self.late = late
        where = f"operator {uid!r}"
        _check_options(where, spec, allowed_lateness_ms, emit, late)
        time = _time_field(where, input_schema, time_column)
        _check_names(where, self.key_columns, self.aggregates)
        plan = AggregatePlan(where, input_schema, self.key_columns, self.aggregates)
        settings = WindowSettings(where, plan, input_schema, self.key_columns, allowed_lateness_ms, emit)
        self._state: WindowState = (
            SessionWindows(settings, spec) if isinstance(spec, SessionWindow) else PaneWindows(settings, spec)
        )
        window = [StructField(name, time.dataType, nullable=False) for name in WINDOW_COLUMNS]
        keys = [input_schema[name] for name in self.key_columns]
        self.output_struct = StructType([*keys, *window, *plan.fields])
        self.output_schema = arrow_schema(self.output_struct)
        self.side_outputs = {} if late == "drop" else {late: input_schema}
        used = input_schema.names if late != "drop" else (*self.key_columns, time_column, *plan.input_columns)
        self.needed_columns = tuple(dict.fromkeys(used))
        """The input columns that the operator reads: all of them where it gives out late rows."""
        whole = arrow_schema(input_schema)
        self._late_schema = whole
        self._input = pa.schema([whole.field(name) for name in self.needed_columns]).append(
            pa.field(KEY_GROUP_COLUMN, pa.int32())
        )
        self._plan = plan
        self._where = where

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what it was made of travels to the slots."""
        made_of = (self.uid, self.key_columns, self.input_struct, self.spec, self.time_column, self.aggregates)
        return WindowOperator, (*made_of, self.allowed_lateness_ms, self.emit, self.late)

    def open(self, info: SubtaskInfo) -> None:
        """Remember where this runs."""
        self._where = f"operator {info.uid!r}, subtask {info.subtask}"
        self._state.open(self._where, key_group_range(info.subtask, info.parallelism, info.max_parallelism))

    def states(self) -> list[StateDescriptor]:
        """What is kept for windows that are not over, and at which times there are such."""
        return self._state.states()

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Add the batch's rows to their windows, then emit what is due or changed."""
        self.late_rows = 0
        windows = self._state.begin(changes, batch)
        numbered_in = batch.batch_id if self._plan.numbers_arrivals else None
        for table in gathered(rows, self._input, self._where, numbered_in):
            timely, late = self._split(table, batch.late_watermark_ms)
            if late is not None and self.side_outputs:
                yield SideRows(self.late, late)
            if timely.num_rows:
                windows.add(timely)
        for made in windows.finish():
            if len(made.starts):
                yield self._output(made)
        self.next_timer_ms = self._state.next_timer_ms

    def _split(self, rows: pa.Table, watermark_ms: int | None) -> tuple[pa.Table, pa.RecordBatch | None]:
        """The rows that belong to open windows, with their times, and the late ones."""
        column = flat(rows.column(self.time_column)).view(pa.int64())
        if column.null_count:
            rows = rows.filter(column.is_valid()).combine_chunks()
            column = column.drop_null()
        times = column.to_numpy()
        rows = rows.append_column(TIME_COLUMN, column)
        late = None if watermark_ms is None else self._state.late(times, watermark_ms)
        if late is None or not late.any():
            return rows, None
        self.late_rows += int(np.count_nonzero(late))
        refused = rows.filter(pa.array(late)).combine_chunks()
        columns = [flat(refused.column(name)) for name in self._late_schema.names] if self.side_outputs else []
        late_rows = pa.RecordBatch.from_arrays(columns, schema=self._late_schema) if self.side_outputs else None
        return rows.filter(pa.array(~late)).combine_chunks(), late_rows

    def _output(self, made: WindowRows) -> pa.RecordBatch:
        kind = self.output_schema.field("window_start").type
        times = [pa.array(times).view(kind) for times in (made.starts, made.ends)]
        by_name = dict(zip(made.states.schema.names, made.states.columns, strict=True))
        shown = [show(by_name) for show in self._plan.shown]
        return pa.RecordBatch.from_arrays([*made.keys, *times, *shown], schema=self.output_schema)


def _check_options(where: str, spec: object, lateness_ms: int, emit: str, late: str) -> None:
    if not isinstance(spec, SlidingWindow | SessionWindow):
        raise JobDefinitionError(f"{where}: {spec!r} is no window such as sl.tumbling('1m')")
    if lateness_ms < 0:
        raise JobDefinitionError(f"{where}: an allowed lateness of {lateness_ms} ms cannot be negative")
    if emit not in ("close", "update"):
        raise JobDefinitionError(f"{where}: emit={emit!r}; it takes 'close' or 'update'")
    if not late:
        raise JobDefinitionError(f"{where}: late={late!r}; it takes 'drop' or the name of a side output")


def _time_field(where: str, schema: StructType, name: str) -> StructField:
    kind = column_type(schema, name, where, "time column")
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise JobDefinitionError(
            f"{where}: the time column {name!r} is of type {kind.simpleString()}; it must be a timestamp"
        )
    return schema[name]


def _check_names(where: str, key_columns: Sequence[str], aggregates: Mapping[str, Aggregate]) -> None:
    for name in WINDOW_COLUMNS:
        if name in key_columns:
            raise JobDefinitionError(f"{where}: the key column {name!r} has the name of a window's own; rename it")
        if name in aggregates:
            raise JobDefinitionError(
                f"{where}: {name!r} is a window's own column; give {aggregates[name]} another name"
            )
