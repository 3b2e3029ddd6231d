"""Which tables the state of a step is: processors show the states they declare, other steps what they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.checkpoint.steps import Column, StepDescription
from strandline.errors import IncompatibleCheckpointError, JobDefinitionError, SchemaError, StrandlineError
from strandline.operators.aggregate.functions import Aggregate, Function
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.deduplicate import SEEN
from strandline.operators.schema_evolution import read_states
from strandline.operators.windows.pane_windows import PANES
from strandline.operators.windows.session_keys import SESSIONS
from strandline.operators.windows.specs import SlidingWindow
from strandline.operators.windows.window_operator import WINDOW_COLUMNS
from strandline.pyspark_releases import spark_schema
from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.timers import TIMERS, TIMES
from strandline.state_reader.layouts import (
    AggregateLayout,
    ColumnsLayout,
    JoinLayout,
    Layout,
    ListLayout,
    MapLayout,
    SeenLayout,
    SessionLayout,
    Show,
    TimerLayout,
    ValueLayout,
)

KEY_GROUP: Final = "key_group"
_ACCUMULATORS: Final = "accumulators"
_ROWS: Final = "rows"
_PANE_COLUMNS: Final = ("pane_start", "pane_end")
_TIME_BYTES: Final = 9
_SIDES: Final = ("left", "right")


@dataclass(frozen=True, slots=True)
class Table:
    """A state as a table: the columns, and how rows are made of stored entries."""

    operator: str
    name: str
    kind: str
    keys: StructType
    stored: str
    """The name of the state in stored keys."""
    make_layout: Callable[[], Layout]
    """A layout for one scan."""
    schema: pa.Schema
    ttl_ms: int | None = None

    @property
    def key_names(self) -> list[str]:
        """The key columns, which are the first columns of the table."""
        return self.keys.fieldNames()


def tables_of(metadata: CheckpointMetadata) -> Iterator[Table]:
    """All tables of a checkpoint, step by step. Raises `SchemaError` if a step cannot be read."""
    for uid in metadata.operators:
        yield from tables_of_step(metadata, uid)


def find_table(metadata: CheckpointMetadata, operator: str | None, state: str | None, where: str) -> Table:
    """The table of a state. `operator` and `state` may be None if there is a single one.

    Raises `StrandlineError` that names the known ones if there is no such step or state.
    """
    known = ", ".join(metadata.operators) or "none"
    if operator is None:
        if len(metadata.operators) != 1:
            raise StrandlineError(f"{where} has {len(metadata.operators)} operators; name one of them: {known}")
        operator = metadata.operators[0]
    if operator not in metadata.operators:
        raise StrandlineError(f"{where} has no operator {operator!r}; it has: {known}")
    tables = {table.name: table for table in tables_of_step(metadata, operator)}
    known = ", ".join(tables) or "none"
    if state is None:
        if len(tables) == 1:
            return next(iter(tables.values()))
        raise StrandlineError(f"operator {operator!r} of {where} has several states; name one: {known}")
    if state == TIMERS and state not in tables:
        state = "timers"
    if state not in tables:
        raise StrandlineError(f"operator {operator!r} of {where} has no state {state!r}; it has: {known}")
    return tables[state]


def tables_of_step(metadata: CheckpointMetadata, uid: str) -> list[Table]:
    """The tables of one step. Raises `IncompatibleCheckpointError` if the step is not described as it is stored."""
    try:
        return _tables_of_step(metadata, uid)
    except (KeyError, IndexError, ValueError, SchemaError, JobDefinitionError) as error:
        raise IncompatibleCheckpointError(
            f"operator {uid!r}: the checkpoint describes a step that cannot exist: {error}. Read another checkpoint."
        ) from error


def _tables_of_step(metadata: CheckpointMetadata, uid: str) -> list[Table]:
    step = next((step for step in metadata.steps if step.operator == uid), None)
    subtask = next((state for state in metadata.subtasks if state.operator == uid), None)
    if subtask is None:
        return []
    if step is None:
        raise IncompatibleCheckpointError(
            f"operator {uid!r}: the checkpoint does not say which key columns the step has, because an early release "
            "wrote it. Start the job from it with this release, and read the next checkpoint."
        )
    keys = _struct(step.keys)
    states = {state.name: state for state in read_states(uid, subtask.states)}
    made: list[Table] = []

    def add(name: str, kind: str, stored: str, make: Callable[[], Layout], ttl_ms: int | None = None) -> None:
        fields = [*arrow_schema(keys), pa.field(KEY_GROUP, pa.int32()), *make().schema]
        made.append(Table(uid, name, kind, keys, stored, make, _distinct(fields), ttl_ms))

    match step.kind:
        case "process" | "spark" | "arrow":
            for state in states.values():
                if state.kind == "timers":
                    add("timers" if "timers" not in states else TIMERS, "timers", TIMES, TimerLayout)
                else:
                    add(state.name, state.kind, state.name, _processor_layout(state), state.ttl_ms)
        case "aggregate":
            stored, show, shown = _aggregates(step, states[_ACCUMULATORS])
            add("aggregates", "aggregate", _ACCUMULATORS, lambda: AggregateLayout(stored, show, shown))
        case "window":
            stored, show, shown = _aggregates(step, states[PANES])
            spec = SlidingWindow(_number(step, "size_ms"), _number(step, "slide_ms"), _number(step, "offset_ms"))
            tumbling = spec.pane_ms == spec.size_ms
            times = _times(step, WINDOW_COLUMNS if tumbling else _PANE_COLUMNS)
            add(
                "windows" if tumbling else "panes",
                "window",
                PANES,
                lambda: AggregateLayout(stored, show, shown, times, spec.pane_ms, _TIME_BYTES),
            )
        case "session":
            stored, show, shown = _aggregates(step, states[SESSIONS])
            gap, times = _number(step, "gap_ms"), _times(step, WINDOW_COLUMNS)
            add("windows", "session", SESSIONS, lambda: SessionLayout(stored, show, shown, times, gap))
        case "deduplicate":
            add(SEEN, "seen", SEEN, SeenLayout)
        case "join":
            for side, name in enumerate(_SIDES):
                add(name, "join", _ROWS, _join_layout(step, side, states[_ROWS]))
    return made


def _processor_layout(state: StateDescriptor) -> Callable[[], Layout]:
    match state.kind:
        case "value" | "reducing" | "aggregating":
            return lambda: ValueLayout(state)
        case "list":
            return lambda: ListLayout(state)
        case "map":
            return lambda: MapLayout(state)
        case "columns":
            return lambda: ColumnsLayout(state)
        case _:
            raise SchemaError(f"state {state.name!r} is of kind {state.kind}, which cannot be read as a table")


def _aggregates(step: StepDescription, state: StateDescriptor) -> tuple[pa.Schema, Show, pa.Schema]:
    """The stored accumulators, and how the aggregates follow from them: by their names in the job, if these are known.

    The state of a user's `ArrowAggregate` is shown as it is stored, because its code is not part of the checkpoint. So
    are all accumulators of a checkpoint that does not know the names of its aggregates.
    """
    plan = _plan(step)
    known = {} if plan is None else {field.name: field.type for field in plan.stored}
    described = arrow_schema(parse_schema(state.schema))
    if plan is not None:
        needed = {(one.name, one.type) for one in arrow_schema(spark_schema(plan.stored))}
        if not needed <= {(one.name, one.type) for one in described}:
            raise SchemaError(f"the state {state.name!r} does not hold what the aggregates need")
    stored = pa.schema([pa.field(one.name, known.get(one.name, one.type)) for one in described])
    beside = 0 if state.name != SESSIONS else _span_columns()
    raw = [field for field in list(stored)[beside:] if field.name not in known]
    results = [] if plan is None else list(arrow_schema(StructType(plan.fields)))

    def show(states: pa.RecordBatch) -> list[Any]:
        by_name = dict(zip(states.schema.names, states.columns, strict=True))
        made = [] if plan is None else [one(by_name) for one in plan.shown]
        return [*made, *(by_name[field.name] for field in raw)]

    return stored, show, pa.schema([pa.field(one.name, one.type) for one in [*results, *raw]])


def _span_columns() -> int:
    from strandline.operators.windows.session_entries import SPAN_COLUMNS

    return SPAN_COLUMNS


def _plan(step: StepDescription) -> AggregatePlan | None:
    """The plan of the aggregates of a step, without those of user code; None if there are none."""
    built_in = [one for one in step.results if one.function != "user"]
    unknown = [one.function for one in built_in if one.function not in get_args(Function)]
    if unknown:
        raise SchemaError(f"there is no aggregate {unknown[0]!r}")
    if not built_in:
        return None
    columns = {one.column: one.type for one in built_in if one.column is not None}
    struct = _struct((*step.keys, *(column for column in columns.items() if column[0] not in dict(step.keys))))
    aggregates = {
        one.name: Aggregate(one.function, one.column, ignore_nulls=one.ignore_nulls)  # type: ignore[arg-type]  # checked above
        for one in built_in
    }
    try:
        return AggregatePlan(f"operator {step.operator!r}", struct, [name for name, _ in step.keys], aggregates)
    except JobDefinitionError as error:
        raise IncompatibleCheckpointError(f"the checkpoint describes aggregates that cannot exist: {error}") from error


def _join_layout(step: StepDescription, side: int, state: StateDescriptor) -> Callable[[], Layout]:
    fields = parse_schema(state.schema).fields
    right_keys = [name for name, _ in step.columns.get("right keys", ())]
    shared = sum(one == other for (one, _), other in zip(step.keys, right_keys, strict=True))
    left = shared + sum(field.name.startswith("__sl_l_") for field in fields)
    own = fields[:left] if side == 0 else fields[left:]
    inputs = [name for name, _ in step.columns.get(_SIDES[side], ())]
    names: list[str | None] = [None] * shared
    names += [inputs[int(field.name.rpartition("_")[2])] for field in own[shared:]]
    return lambda: JoinLayout(side, StructType(own), names, f"operator {step.operator!r}")


def _times(step: StepDescription, names: tuple[str, ...]) -> pa.Schema:
    """The columns of the times of windows; they have the type of the event time."""
    kind = arrow_schema(_struct(step.times[:1])).field(0).type
    return pa.schema([pa.field(name, kind) for name in names])


def _number(step: StepDescription, name: str) -> int:
    value = step.parameters.get(name)
    if not isinstance(value, int):
        raise IncompatibleCheckpointError(f"operator {step.operator!r}: the checkpoint does not say its {name}")
    return value


def _struct(columns: tuple[Column, ...]) -> StructType:
    """The struct of described columns."""
    return StructType([StructField(name, parse_schema(f"value {kind}")[0].dataType) for name, kind in columns])


def _distinct(fields: list[pa.Field]) -> pa.Schema:
    """The columns with distinct names: a name that is taken gets a number. Spark does not tell cases apart."""
    taken: set[str] = set()
    named = []
    for one in fields:
        name, number = one.name, 1
        while name.lower() in taken:
            number += 1
            name = f"{one.name}_{number}"
        taken.add(name.lower())
        named.append(pa.field(name, one.type))
    return pa.schema(named)
