"""The combiner of running aggregates: rows of a key become one row of partial results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.aggregate.accumulators import Accumulator, CountRows, OverflowInSumError
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.aggregate.grouping import Grouping
from strandline.operators.aggregate.limits import DEFAULT_LIMITS
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.combined_rows import input_of, with_additional
from strandline.operators.combining import ROWS_COLUMN, Combined, Combiner

ROWS: Final = CountRows(ROWS_COLUMN.removeprefix("__sl_"), None)
"""Counts the rows that a combined row stands for."""


class AggregateCombiner(Combiner):
    """Combines the rows of each key."""

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        aggregates: Mapping[str, Aggregate],
        plan: AggregatePlan | None = None,
    ) -> None:
        self._arguments = uid, tuple(key_columns), input_schema, dict(aggregates)
        plan = plan or AggregatePlan(uid, input_schema, key_columns, aggregates)
        self._parts = Parts(uid, plan, input_schema, key_columns, more=[ROWS])
        self._input = input_columns(input_schema, [*key_columns, *plan.input_columns])
        self._known = known_columns(input_schema)
        self.schema = self._parts.schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the task builds the rest again."""
        return AggregateCombiner, self._arguments

    def combine(self, rows: pa.Table, late_watermark_ms: int | None) -> Combined:
        """Combine the rows of each key."""
        known = input_of(rows, self._input) if rows.num_rows else None
        made = None if known is None else self._parts.of(known)
        return Combined(None, rows) if made is None else Combined(with_additional(made, rows, self._known), None)


class Parts:
    """Partial results of a table of rows, if these are the same whatever rows come together."""

    def __init__(
        self,
        where: str,
        plan: AggregatePlan,
        input_schema: StructType,
        key_columns: Sequence[str],
        leading: Sequence[str] = (),
        more: Sequence[Accumulator] = (),
    ) -> None:
        """`leading` and `more` are columns by which rows are grouped beside the key, and further accumulators."""
        self._accumulators = plan.accumulators
        self._grouping = Grouping(where, plan.extended(*more), input_schema, key_columns, leading, DEFAULT_LIMITS)
        self.schema = self._grouping.schema

    def of(self, rows: pa.Table) -> pa.Table | None:
        """One row for each key; None if the rows cannot be combined exactly."""
        for accumulator in self._accumulators:
            if not accumulator.exact([contiguous(rows.column(name)) for name in accumulator.columns]):
                return None
        try:
            return self._grouping.partial(rows)
        except OverflowInSumError:
            return None


def input_columns(input_schema: StructType, names: Sequence[str]) -> pa.Schema:
    """Those columns of the input that a step or its combiner reads, each once; the key group is the last one."""
    whole = arrow_schema(input_schema)
    fields = [whole.field(name) for name in dict.fromkeys(names)]
    return pa.schema([*fields, pa.field(KEY_GROUP_COLUMN, pa.int32())])


def known_columns(input_schema: StructType) -> frozenset[str]:
    """The columns of rows that are not additional."""
    return frozenset((*input_schema.names, KEY_GROUP_COLUMN))
