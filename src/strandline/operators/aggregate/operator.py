"""Running aggregates per key, computed on Arrow columns and never row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.aggregate.aggregates import (
    Aggregate,
    AggregatePlan,
    approx_count_distinct,
    avg,
    collect_list,
    count,
    first,
    last,
    max,
    min,
    sum,
)
from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
from strandline.operators.aggregate.grouping import Grouping, Partials, flat, gathered
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.rows import arrow_schema
from strandline.pyspark_releases import spark_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.descriptors import StateDescriptor

__all__ = [
    "Aggregate",
    "AggregateOperator",
    "AggregatePlan",
    "ArrowAggregate",
    "approx_count_distinct",
    "avg",
    "collect_list",
    "count",
    "first",
    "last",
    "max",
    "min",
    "sum",
]

STATE_NAME: Final = "accumulators"


class AggregateOperator(Operator):
    """Emits, for every batch, one row per key that changed: the key columns, then the running values."""

    sorted_input = False

    def __init__(
        self, uid: str, key_columns: Sequence[str], input_schema: StructType, aggregates: Mapping[str, Aggregate]
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.aggregates = dict(aggregates)
        self.input_struct = input_schema
        plan = AggregatePlan(f"operator {uid!r}", input_schema, self.key_columns, self.aggregates)
        self.output_struct = StructType([*(input_schema[name] for name in self.key_columns), *plan.fields])
        self.output_schema = arrow_schema(self.output_struct)
        self.needed_columns = tuple(dict.fromkeys((*self.key_columns, *plan.input_columns)))
        """The input columns that the operator reads."""
        whole = arrow_schema(input_schema)
        self._input = pa.schema([whole.field(name) for name in self.needed_columns]).append(
            pa.field(KEY_GROUP_COLUMN, pa.int32())
        )
        self._grouping = Grouping(f"operator {uid!r}", plan, input_schema, self.key_columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what it was made of travels to the slots."""
        return AggregateOperator, (self.uid, self.key_columns, self.input_struct, self.aggregates)

    def open(self, info: SubtaskInfo) -> None:
        """Remember where this runs."""
        self._grouping.where = f"operator {info.uid!r}, subtask {info.subtask}"

    def states(self) -> list[StateDescriptor]:
        """The one state that holds all accumulators of a key."""
        return [StateDescriptor(STATE_NAME, "aggregate", spark_schema(self._grouping.plan.stored).json())]

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Aggregate the batch, lay it over the state and yield one row per key of the batch."""
        grouping = self._grouping
        partials = Partials(grouping.merge)
        folded: list[pa.Table] = []
        numbered_in = batch.batch_id if grouping.plan.numbers_arrivals else None
        for table in gathered(rows, self._input, grouping.where, numbered_in):
            full = partials.add(grouping.partial(table))
            if full is not None:
                folded += (keys for keys, _ in grouping.fold(full, STATE_NAME, changes))
        rest = partials.rest()
        if rest is not None:
            reread = bool(folded)
            for keys, running in grouping.fold(rest, STATE_NAME, changes):
                if reread:
                    folded.append(keys)
                else:
                    yield self._output(keys, running)
        if folded:
            for keys, running in grouping.reread(grouping.distinct(folded), STATE_NAME, changes):
                yield self._output(keys, running)

    def _output(self, keys: pa.Table, running: pa.RecordBatch) -> pa.RecordBatch:
        columns = [flat(keys.column(name)) for name in self.key_columns]
        return pa.RecordBatch.from_arrays([*columns, *self._grouping.shown(running)], schema=self.output_schema)
