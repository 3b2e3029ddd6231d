"""The operator that aggregates the rows of a key by windows of event time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField, StructType

from strandline.checkpoint.steps import StepDescription
from strandline.errors import JobDefinitionError, StrandlineError
from strandline.operators.aggregate.aggregate_combiner import input_columns
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.aggregate.input_tables import input_tables
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.base import BatchInfo, Operator, Output, SideRows, SubtaskInfo
from strandline.operators.columns.declared import check_time_column
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import with_time_columns
from strandline.operators.combined_rows import numbers_of, raw_rows
from strandline.operators.combining import LATE_COLUMN, Combiner
from strandline.operators.rewrite import Rewrite
from strandline.operators.step_change import StepChange
from strandline.operators.timed.late_rows import DROP, check_late
from strandline.operators.windows.limits import DEFAULT_WINDOW_LIMITS, WindowLimits
from strandline.operators.windows.pane_changes import carry_over_panes
from strandline.operators.windows.pane_windows import PaneWindows
from strandline.operators.windows.session_changes import carry_over_sessions
from strandline.operators.windows.session_windows import SessionWindows
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, WindowSpec
from strandline.operators.windows.window_combiner import WindowCombiner
from strandline.operators.windows.window_state import TIME_COLUMN, Emit, WindowRows, WindowSettings, WindowState
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.handles.query import Found

WINDOW_COLUMNS: Final = ("window_start", "window_end", "window_time")


class WindowOperator(Operator):
    """Emits the key columns, `window_start`, `window_end`, `window_time` and the aggregates.

    `window_end` is the first moment after the window. `window_time`, the event time of the row, is the last microsecond
    of the window, as in Spark: so a window belongs to the longer window of a next step that covers it.

    With `emit="close"` a window is emitted once, when the watermark reaches its end. With allowed lateness, its state
    is kept for that much longer, and a batch that has more rows of the window emits it again. With `emit="update"`
    every batch emits the windows that changed in it, and a window is not emitted when it closes. A session that was
    merged into another is not withdrawn: the longer session, with another start, is emitted after it.

    A row is late if all its windows, with allowed lateness, were over at the watermark of the batch before. For
    sessions, that is the session of this row alone. Late rows are counted. They are dropped (`late="drop"`), or go with
    all input columns to the side output that `late` names. A row whose time is null belongs to no window: it is
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
        limits: WindowLimits = DEFAULT_WINDOW_LIMITS,
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
        self.limits = limits
        where = f"operator {uid!r}"
        _check_options(where, spec, allowed_lateness_ms, emit)
        check_late(late, where, "the windows of a late row are closed; allowed_lateness= keeps windows open for longer")
        check_time_column(input_schema, time_column, where)
        _check_names(where, self.key_columns, self.aggregates)
        plan = AggregatePlan(where, input_schema, self.key_columns, self.aggregates, limits.grouping)
        settings = WindowSettings(where, plan, input_schema, self.key_columns, allowed_lateness_ms, emit, limits)
        self._state: WindowState = (
            SessionWindows(settings, spec) if isinstance(spec, SessionWindow) else PaneWindows(settings, spec)
        )
        time_type = input_schema[time_column].dataType
        window = [StructField(name, time_type, nullable=False) for name in WINDOW_COLUMNS]
        keys = [input_schema[name] for name in self.key_columns]
        self.output_struct = StructType([*keys, *window, *plan.fields])
        self.output_schema = arrow_schema(self.output_struct)
        self.time_columns, self.unfit_times = _times(spec, allowed_lateness_ms)
        self.default_time = "window_time"
        self.side_outputs = {} if late == DROP else {late: with_time_columns(input_schema, {})}
        used = input_schema.names if late != DROP else (*self.key_columns, time_column, *plan.input_columns)
        self.needed_columns = tuple(dict.fromkeys(used))
        """The input columns that the operator reads: all of them if late rows go to a side output."""
        self._late_schema = arrow_schema(input_schema)
        self._input = input_columns(input_schema, self.needed_columns)
        self._plan = plan
        self._where = where
        combiner = self.combiner()
        self._combined = None if combiner is None else combiner.schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the slot builds the rest again."""
        first = (self.uid, self.key_columns, self.input_struct, self.spec, self.time_column, self.aggregates)
        return WindowOperator, (*first, self.allowed_lateness_ms, self.emit, self.late, self.limits)

    def open(self, info: SubtaskInfo) -> None:
        """Remember the subtask and its key groups."""
        self._where = info.where
        self._state.open(self._where, key_group_range(info.subtask, info.parallelism, info.max_parallelism))

    def states(self) -> list[StateDescriptor]:
        """The states of the windows, and of their time index."""
        return self._state.states()

    def describe(self) -> StepDescription:
        """The window, what it computes, and what decides how long it is kept and when it is emitted."""
        spec = self.spec
        cut: dict[str, int | str | None] = (
            {"gap_ms": spec.gap_ms}
            if isinstance(spec, SessionWindow)
            else {"size_ms": spec.size_ms, "slide_ms": spec.slide_ms, "offset_ms": spec.offset_ms}
        )
        return StepDescription(
            self.uid,
            "session" if isinstance(spec, SessionWindow) else "window",
            described_columns(self.input_struct, self.key_columns),
            described_columns(self.input_struct, [self.time_column]),
            {**cut, "allowed_lateness_ms": self.allowed_lateness_ms, "emit": self.emit},
            {"aggregates": self._plan.described},
            self._plan.results,
        )

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """Accept the differences that the state of the windows allows."""
        if isinstance(self._state, PaneWindows):
            return carry_over_panes(change, self._state)
        assert isinstance(self._state, SessionWindows)
        return carry_over_sessions(change, self._state)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Add the batch's rows to their windows, then yield the windows that are due or changed."""
        self.late_rows = 0
        windows = self._state.begin(changes, batch)
        numbered_in = batch.batch_id if self._plan.numbers_arrivals else None

        def add(combined: pa.Table) -> None:
            timely = self._timely(combined, batch.late_watermark_ms)
            if timely.num_rows:
                windows.add_combined(timely)

        raw = raw_rows(rows, self._combined, self._where, add)
        for table in input_tables(raw, self._input, self._where, numbered_in, self.limits.grouping):
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
        """The rows of open windows, with their times in `TIME_COLUMN`, and the late rows."""
        column = contiguous(rows.column(self.time_column)).view(pa.int64())
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
        columns = [contiguous(refused.column(name)) for name in self._late_schema.names] if self.side_outputs else []
        late_rows = pa.RecordBatch.from_arrays(columns, schema=self._late_schema) if self.side_outputs else None
        return rows.filter(pa.array(~late)).combine_chunks(), late_rows

    def _timely(self, combined: pa.Table, watermark_ms: int | None) -> pa.Table:
        """The combined rows that belong to a window. Those that belong to none count late rows."""
        self.late_rows += pc.sum(combined.column(LATE_COLUMN)).as_py()
        void = combined.column(self._state.place).is_null()
        if pc.any(void).as_py():
            combined = combined.filter(pc.invert(void))
        times = numbers_of(combined, self._state.place) * self._state.place_us
        if watermark_ms is not None and self._state.late(times, watermark_ms).any():
            raise StrandlineError(
                f"{self._where}: combined rows are late, which their combiner did not know; "
                "this is a bug, please report it"
            )
        return combined

    def combiner(self) -> Combiner | None:
        """A combiner per key and pane or session, unless an aggregate depends on the order or is the user's code."""
        if not self._plan.combinable:
            return None
        first = (self.uid, self.key_columns, self.input_struct, self.spec, self.time_column, self.aggregates)
        return WindowCombiner(*first, self.allowed_lateness_ms, self.late != DROP, self._plan)

    def look_up(self, look: LookUp, state: str | None) -> Found:
        """The windows that the step keeps for the key, by their starts: the output columns without those of the key."""
        self._refuse_state(state)
        made = self._state.look_up(look)
        if made is None:
            return None
        columns = list(self.output_schema)[: len(self.key_columns)]
        rows = self._output(replace(made, keys=[pa.nulls(len(made.starts), column.type) for column in columns]))
        return (rows.select(rows.schema.names[len(columns) :]).to_pylist(),)

    def nothing(self, state: str | None) -> list[Any]:
        """No windows."""
        self._refuse_state(state)
        return []

    def _output(self, made: WindowRows) -> pa.RecordBatch:
        kind = self.output_schema.field("window_start").type
        times = [pa.array(times).view(kind) for times in (made.starts, made.ends, made.ends - 1)]
        by_name = dict(zip(made.states.schema.names, made.states.columns, strict=True))
        shown = [show(by_name) for show in self._plan.shown]
        return pa.RecordBatch.from_arrays([*made.keys, *times, *shown], schema=self.output_schema)


def _times(spec: WindowSpec, lateness_ms: int) -> tuple[dict[str, int], dict[str, str]]:
    """The time columns of window rows with their lags, and the column that is none, with the reason."""
    ends = {"window_time": lateness_ms, "window_end": lateness_ms}
    if isinstance(spec, SessionWindow):
        return ends, {
            "window_start": "a session may last any length of time, so its start may be any length of time ago when it "
            "comes out; use window_time"
        }
    return {**ends, "window_start": spec.size_ms + lateness_ms}, {}


def _check_options(where: str, spec: object, lateness_ms: int, emit: str) -> None:
    if not isinstance(spec, SlidingWindow | SessionWindow):
        raise JobDefinitionError(f"{where}: {spec!r} is not a window; use one such as sl.tumbling('1m')")
    if lateness_ms < 0:
        raise JobDefinitionError(f"{where}: the allowed lateness is {lateness_ms} ms; it must not be negative")
    if emit not in ("close", "update"):
        raise JobDefinitionError(f"{where}: emit={emit!r} is not valid; use 'close' or 'update'")


def _check_names(where: str, key_columns: Sequence[str], aggregates: Mapping[str, Aggregate]) -> None:
    for name in WINDOW_COLUMNS:
        if name in key_columns:
            raise JobDefinitionError(
                f"{where}: the key column {name!r} has the name of an output column of windows; rename it"
            )
        if name in aggregates:
            raise JobDefinitionError(
                f"{where}: {name!r} is an output column of windows; give {aggregates[name]} another name"
            )
