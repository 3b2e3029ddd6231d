"""Schema evolution: which changes to a step and its states a restore accepts, and what of its state is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pyspark.sql.types import StructType

from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.steps import StepDescription
from strandline.decoding import converted
from strandline.errors import IncompatibleCheckpointError, JobDefinitionError, SchemaError
from strandline.operators.base import Operator
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.rewrite import ConvertedValues, ConvertMany, Rewrite, state_ranges
from strandline.operators.step_change import StepChange
from strandline.state.backends.base import StateBackend
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.conversion import Convert, NotConvertibleError, conversion
from strandline.state.coding.ddl import parse_schema, type_text
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.timers import TIMES
from strandline.state.handles.ttl import STAMP_BYTES

_DECLARED: Final = frozenset({"value", "list", "map", "reducing", "aggregating", "columns"})
"""The kinds of state whose schema the user declares. Vectorised operators derive their schemas themselves."""

_rows_of: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class StateChanges:
    """The changes that make the restored state of an operator match the operator."""

    dropped: tuple[StateDescriptor, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.rewrites)

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Delete the entries of dropped states, and rewrite the entries of changed ones.

        Call it once, when all entries of the old declarations are in `backend` and no entry of the new ones is.
        """
        for state in self.dropped:
            for name in (state.name, TIMES) if state.kind == "timers" else (state.name,):
                for start, end in state_ranges(key_groups, name):
                    if next(backend.scan(start, end), None) is not None:
                        backend.delete_between(start, end)
        for rewrite in self.rewrites:
            rewrite.apply(backend, key_groups)


def check_step(
    operator: Operator,
    declared: Iterable[StateDescriptor],
    step: StepDescription | None,
    durable: SubtaskState | None,
    allow_non_restored: bool,
) -> StateChanges:
    """The changes that make a restored state match the operator and what it declares now.

    `step` is the description of the step in the checkpoint. Checkpoints of earlier releases have none; then only the
    states are compared. Raises `IncompatibleCheckpointError` if they cannot match.
    """
    if durable is None:
        return StateChanges()
    stored = {state.name: state for state in read_states(operator.uid, durable.states)}
    rewrites: tuple[Rewrite, ...] = ()
    if step is not None:
        change = StepChange(step, operator.describe(), stored)
        try:
            rewrites = operator.carry_over(change) if change.same_kind else ()
        except RecursionError as error:
            raise IncompatibleCheckpointError(
                f"operator {operator.uid}: the checkpoint describes types that are nested too deeply. Restore from "
                "another checkpoint."
            ) from error
        change.check()
    deleted, rewritten = operator.deleted_states, {name for one in rewrites for name in one.states}
    by_states = state_changes(
        operator.uid,
        (state for state in stored.values() if state.name not in rewritten),
        declared,
        lambda name: allow_non_restored or name in deleted,
    )
    return StateChanges(by_states.dropped, (*by_states.rewrites, *rewrites))


def state_changes(
    operator: str,
    before: Iterable[StateDescriptor],
    now: Iterable[StateDescriptor],
    may_drop: Callable[[str], bool],
) -> StateChanges:
    """The changes from the states of a checkpoint to those that the operator declares.

    A new state begins empty. A state that the operator does not declare is dropped if `may_drop`. In a state that user
    code declares, columns may be removed, reordered and widened, nullable columns may be added, and the time-to-live
    may have another length. Raises `IncompatibleCheckpointError` for any other change.
    """
    declared = {state.name: state for state in now}
    dropped: list[StateDescriptor] = []
    rewrites: list[Rewrite] = []
    for known in before:
        state = declared.get(known.name)
        if state is None:
            if not may_drop(known.name):
                raise _not_declared(operator, known)
            dropped.append(known)
        elif state != known:
            try:
                convert = _conversion(known, state)
            except NotConvertibleError as error:
                raise _refused(operator, known, state, str(error)) from None
            except RecursionError:
                raise _refused(operator, known, state, "its types are nested too deeply") from None
            if convert is not None:
                rewrites.append(ConvertedValues(state.name, convert))
    return StateChanges(tuple(dropped), tuple(rewrites))


def read_states(operator: str, described: Iterable[Mapping[str, Any]]) -> list[StateDescriptor]:
    """The states that the metadata of a checkpoint describes; raises `IncompatibleCheckpointError` if one is wrong."""
    try:
        return converted(list(described), list[StateDescriptor])
    except (msgspec.ValidationError, JobDefinitionError) as error:
        raise IncompatibleCheckpointError(
            f"operator {operator}: the checkpoint describes a state that cannot exist: {error}. Restore from another "
            "checkpoint."
        ) from error


def _conversion(before: StateDescriptor, now: StateDescriptor) -> ConvertMany | None:
    """The conversion of a state's values; None if their bytes stay. Raises `NotConvertibleError`.

    The length of a time-to-live may change, because it is not stored. Whether a state has one must not change.
    """
    if before.kind != now.kind:
        raise NotConvertibleError("it is another kind of state")
    if not _same_columns(before.key_schema, now.key_schema):
        raise NotConvertibleError("its keys differ")
    if now.kind not in _DECLARED:
        if before.ttl_ms == now.ttl_ms and _same_columns(before.schema, now.schema):
            return None
        raise NotConvertibleError("it is stored in another way")
    if (before.ttl_ms is None) != (now.ttl_ms is None):
        raise NotConvertibleError("a time-to-live can be neither added nor removed")
    old, new = _struct(before.schema), _struct(now.schema)
    convert = conversion(old, new)
    if now.kind == "columns":
        return _column_conversion(now.name, old, new)
    return None if convert is None else _row_conversion(now, convert)


def _column_conversion(name: str, old: StructType, new: StructType) -> ConvertMany | None:
    if type_text(old) == type_text(new):
        return None
    before, now = (RowCodec(struct, f"state {name!r}") for struct in (old, new))
    return before.conversion_to(now)


def _row_conversion(state: StateDescriptor, convert: Convert) -> ConvertMany:
    def one(data: bytes) -> bytes:
        if state.kind == "list":
            return ValueCodec.join([bytes(convert(row)) for row in _rows_of(data)])
        return bytes(convert(msgspec.Raw(data)))

    if state.ttl_ms is None:
        return lambda values: list(map(one, values))
    return lambda values: [data[:STAMP_BYTES] + one(data[STAMP_BYTES:]) for data in values]


def _struct(schema: str) -> StructType:
    try:
        return parse_schema(schema)
    except SchemaError as error:
        raise NotConvertibleError(str(error)) from None


def _same_columns(one: str | None, other: str | None) -> bool:
    """Whether two schemas have the same columns; nullability, comments and other metadata do not matter."""
    if one is None or other is None or one == other:
        return one == other
    return type_text(_struct(one)) == type_text(_struct(other))


def _not_declared(operator: str, known: StateDescriptor) -> IncompatibleCheckpointError:
    what = f"the state {known.name!r} ({_described(known)}), which the job does not declare"
    if known.kind == "timers":
        what = "timers, and the step has no clock any more (its time_mode was another one)"
    return IncompatibleCheckpointError(
        f"operator {operator}: the checkpoint has {what}. If you renamed the state, give it its old name. To delete "
        "its entries and go on without it, start with allow_non_restored_state=True."
    )


def _refused(operator: str, before: StateDescriptor, now: StateDescriptor, why: str) -> IncompatibleCheckpointError:
    if now.kind in _DECLARED:
        remedy = (
            "In a state, columns may be removed, reordered and widened (int to long, float to double), nullable "
            "columns may be added, and a time-to-live may get longer or shorter, nothing else. Declare it as before, "
            "or give the new state another name."
        )
    elif now.kind == "aggregate":
        remedy = "Use the same aggregates as before, or start a new job."
    else:
        remedy = "Define the step as before, or give it another uid."
    return IncompatibleCheckpointError(
        f"operator {operator}: the checkpoint has the state {now.name!r} as {_described(before)}, the job declares "
        f"{_described(now)}: {why}. {remedy}"
    )


def _described(state: StateDescriptor) -> str:
    """A descriptor in words for errors: its kind and its columns."""
    parts = [f"{state.kind} state"]
    for label, schema in (("keys", state.key_schema), ("columns", state.schema)):
        if schema is not None:
            parts.append(f"{label} ({_columns(schema)})")
    if state.ttl_ms is not None:
        parts.append(f"a time-to-live of {state.ttl_ms} ms")
    return ", ".join(parts)


def _columns(schema: str) -> str:
    try:
        fields = msgspec.json.decode(schema)["fields"]
        return ", ".join(
            f"{field['name']} {_type(field['type'])}{'' if field['nullable'] else ' not null'}" for field in fields
        )
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return schema


def _type(type_: Any) -> str:
    return type_ if isinstance(type_, str) else msgspec.json.encode(type_).decode()
