"""The operator that computes running aggregates per key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.checkpoint.steps import StepDescription
from strandline.operators.aggregate.aggregate_combiner import AggregateCombiner, input_columns
from strandline.operators.aggregate.changes import carried_columns, converted_states
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.aggregate.grouping import Grouping
from strandline.operators.aggregate.input_tables import input_tables
from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits
from strandline.operators.aggregate.partials import Partials
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.base import BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import default_time_column, time_columns
from strandline.operators.combined_rows import raw_rows
from strandline.operators.combining import Combiner
from strandline.operators.rewrite import Rewrite
from strandline.operators.step_change import StepChange
from strandline.pyspark_releases import spark_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.handles.query import Found

STATE_NAME: Final = "accumulators"


class AggregateOperator(Operator):
    """Emits one row for every key of a batch: the key columns, then the values of the aggregates so far."""

    sorted_input = False

    def __init__(
        self,
        uid: str,
        key_columns: Sequence[str],
        input_schema: StructType,
        aggregates: Mapping[str, Aggregate],
        limits: GroupingLimits = DEFAULT_LIMITS,
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.aggregates = dict(aggregates)
        self.input_struct = input_schema
        self.limits = limits
        plan = AggregatePlan(f"operator {uid!r}", input_schema, self.key_columns, self.aggregates, limits)
        self.output_struct = StructType([*(input_schema[name] for name in self.key_columns), *plan.fields])
        self.output_schema = arrow_schema(self.output_struct)
        # A row comes out in the batch that has rows of its key, so its key is not further behind than theirs.
        self.time_columns = time_columns(StructType([input_schema[name] for name in self.key_columns]))
        self.default_time = default_time_column(self.output_struct)
        self.needed_columns = tuple(dict.fromkeys((*self.key_columns, *plan.input_columns)))
        """The input columns that the operator reads."""
        self._input = input_columns(input_schema, self.needed_columns)
        self._grouping = Grouping(f"operator {uid!r}", plan, input_schema, self.key_columns, limits=limits)
        combiner = self.combiner()
        self._combined = None if combiner is None else combiner.schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the slot builds the rest again."""
        return AggregateOperator, (self.uid, self.key_columns, self.input_struct, self.aggregates, self.limits)

    def open(self, info: SubtaskInfo) -> None:
        """Remember the subtask, for errors."""
        self._grouping.where = info.where

    def states(self) -> list[StateDescriptor]:
        """One state, with all accumulators of a key in one entry."""
        return [StateDescriptor(STATE_NAME, "aggregate", spark_schema(self._grouping.plan.stored).json())]

    def describe(self) -> StepDescription:
        """The accumulators and their inputs. The names of the output columns do not matter."""
        keys = described_columns(self.input_struct, self.key_columns)
        plan = self._grouping.plan
        return StepDescription(
            self.uid, "aggregate", keys, columns={"aggregates": plan.described}, results=plan.results
        )

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """Aggregates may go and change places. The others go on."""
        columns = carried_columns(change, self._grouping.plan, STATE_NAME)
        return () if columns is None else (converted_states(STATE_NAME, columns, self._grouping.codec),)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Aggregate the batch, merge the result into the state, and yield one row per key of the batch."""
        grouping = self._grouping
        partials = Partials(grouping.merge, self.limits)
        folded: list[pa.Table] = []

        def add(part: pa.Table, distinct: bool = False) -> None:
            full = partials.add(part.select(grouping.schema.names), distinct)
            if full is not None:
                folded.extend(keys for keys, _ in grouping.fold(full, STATE_NAME, changes))

        raw = raw_rows(rows, self._combined, grouping.where, add)
        numbered_in = batch.batch_id if grouping.plan.numbers_arrivals else None
        for table in input_tables(raw, self._input, grouping.where, numbered_in, self.limits):
            add(*grouping.part(table))
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

    def combiner(self) -> Combiner | None:
        """A combiner per key, unless an aggregate depends on the order of the rows or is the user's code."""
        plan = self._grouping.plan
        if not plan.combinable:
            return None
        return AggregateCombiner(self.uid, self.key_columns, self.input_struct, self.aggregates, plan)

    def look_up(self, look: LookUp, state: str | None) -> Found:
        """The values of the aggregates by their names."""
        self._refuse_state(state)
        entry = look.entry(STATE_NAME)
        if entry is None:
            return None
        shown = self._grouping.shown(self._grouping.codec.decode([entry]))
        return ({name: column[0].as_py() for name, column in zip(self.aggregates, shown, strict=True)},)

    def nothing(self, state: str | None) -> None:
        """No values."""
        self._refuse_state(state)

    def _output(self, keys: pa.Table, running: pa.RecordBatch) -> pa.RecordBatch:
        columns = [contiguous(keys.column(name)) for name in self.key_columns]
        return pa.RecordBatch.from_arrays([*columns, *self._grouping.shown(running)], schema=self.output_schema)
