"""The combiner of windows: rows of a key and a pane, or of a piece of a session, become one row of partial results.

A piece of a session lies within one of the spans of time that are as long as the gap. So its rows belong together, and
grouping by key and span finds it without sorting. The slot joins the pieces of a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from strandline.operators.aggregate.accumulators import Greatest, Least
from strandline.operators.aggregate.aggregate_combiner import ROWS, Parts, input_columns, known_columns
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.gather import contiguous
from strandline.operators.combined_rows import input_of, numbers_of, with_additional
from strandline.operators.combining import LATE_COLUMN, ROWS_COLUMN, Combined, Combiner
from strandline.operators.windows.specs import SessionWindow, WindowSpec
from strandline.operators.windows.window_state import LAST, PANE, START, TIME_COLUMN

_SPAN: Final = "__sl_span"
_WORTHWHILE_SESSIONS: Final = 0.8
"""Finding sessions costs the slot several times as much as finding pieces of them costs the task."""
_TIMES: Final = tuple(
    make(label.removeprefix("__sl_"), TIME_COLUMN, pa.int64()) for make, label in ((Least, START), (Greatest, LAST))
)

Bools = npt.NDArray[np.bool_]


class WindowCombiner(Combiner):
    """Combines the rows of each key and pane, or of each key and piece of a session.

    Late rows, and rows without a time, are only counted: one row for each key group, which belongs to no window, stands
    for them. If late rows are kept for a side output, they are left raw.
    """

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        spec: WindowSpec,
        time_column: str,
        aggregates: Mapping[str, Aggregate],
        lateness_ms: int,
        keep_late: bool,
        plan: AggregatePlan | None = None,
    ) -> None:
        first = (uid, tuple(key_columns), input_schema, spec, time_column, dict(aggregates))
        self._arguments = (*first, lateness_ms, keep_late)
        self._spec = spec
        self._time_column = time_column
        self._lateness = lateness_ms
        self._keep_late = keep_late
        plan = plan or AggregatePlan(uid, input_schema, key_columns, aggregates)
        session = isinstance(spec, SessionWindow)
        leading, more = ([_SPAN], [ROWS, *_TIMES]) if session else ([PANE], [ROWS])
        self._parts = Parts(uid, plan, input_schema, key_columns, leading, more)
        self._input = input_columns(input_schema, [*key_columns, time_column, *plan.input_columns])
        self._known = known_columns(input_schema)
        if session:
            self.worthwhile = _WORTHWHILE_SESSIONS
        fields = [field for field in self._parts.schema if field.name != _SPAN]
        self.schema = pa.schema([*fields, pa.field(LATE_COLUMN, pa.int64())])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the task builds the rest again."""
        return WindowCombiner, self._arguments

    def combine(self, rows: pa.Table, late_watermark_ms: int | None) -> Combined:
        """Combine the rows of each key and pane, or piece of a session."""
        known = input_of(rows, self._input) if rows.num_rows else None
        if known is None:
            return Combined(None, rows)
        column = contiguous(known.column(self._time_column)).view(pa.int64())
        late = self._late(column, late_watermark_ms)
        whole, raw = rows, None
        if late is not None and self._keep_late:
            timely, raw = pa.array(~late), rows.filter(pa.array(late))
            rows, known, column, late = rows.filter(timely), known.filter(timely), column.filter(timely), None
            if rows.num_rows == 0:
                return Combined(None, raw)
        void = late
        if column.null_count:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            void = missing if late is None else missing | late
        made = self._made(known, column, void)
        if made is None:
            return Combined(None, whole)
        if void is not None:
            made = pa.concat_tables([made, self._counted(numbers_of(known, KEY_GROUP_COLUMN), void, late)])
        return Combined(with_additional(made.combine_chunks(), rows, self._known), raw)

    def _late(self, times: Any, watermark_ms: int | None) -> Bools | None:
        """Which rows are late; None if there are none. A row without a time is not late."""
        edges = pc.min_max(times).as_py()
        if watermark_ms is None or edges["min"] is None:
            return None
        # The greatest time counts, too: beyond the end of 64 bits, the end of a window is in the past, as in the slot.
        outer = np.array([edges["min"], edges["max"]])
        if not self._spec.late(outer, self._lateness, watermark_ms).any():
            return None
        late = self._spec.late(pc.fill_null(times, edges["max"]).to_numpy(), self._lateness, watermark_ms)
        return late & times.is_valid().to_numpy(zero_copy_only=False) if times.null_count else late

    def _made(self, rows: pa.Table, times: Any, void: Bools | None) -> pa.Table | None:
        """The combined rows of those rows that are not void; None if they cannot be combined exactly."""
        if void is not None:
            timely = pa.array(~void)
            rows, times = rows.filter(timely), times.filter(timely)
        if rows.num_rows == 0:
            return self.schema.empty_table()
        if isinstance(self._spec, SessionWindow):
            spans = self._spec.spans_of(times.to_numpy())
            rows = rows.append_column(TIME_COLUMN, times).append_column(_SPAN, pa.array(spans))
        else:
            rows = rows.append_column(PANE, pa.array(self._spec.panes_of(times.to_numpy())))
        made = self._parts.of(rows.combine_chunks())
        if made is None:
            return None
        made = made.append_column(LATE_COLUMN, pa.array(np.zeros(made.num_rows, np.int64)))
        return made.select(self.schema.names)

    def _counted(self, groups: npt.NDArray[np.int32], void: Bools, late: Bools | None) -> pa.Table:
        """A row for each key group that has void rows."""
        rows = np.bincount(groups[void])
        found = np.flatnonzero(rows)
        lost = np.zeros_like(rows) if late is None else np.bincount(groups[late], minlength=len(rows))
        told = {KEY_GROUP_COLUMN: found.astype(np.int32), ROWS_COLUMN: rows[found], LATE_COLUMN: lost[found]}
        columns = [
            pa.array(told[field.name]) if field.name in told else pa.nulls(len(found), field.type)
            for field in self.schema
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)
