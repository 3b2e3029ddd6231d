"""Schema evolution: which changes to a state a restore accepts, and how stored entries are migrated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pyspark.sql.types import StructField

from strandline.checkpoint.metadata import SubtaskState
from strandline.errors import DamagedFileError, IncompatibleCheckpointError, JobDefinitionError
from strandline.operators.base import Operator
from strandline.operators.columns.row_codec import RowCodec
from strandline.state.backends.base import StateBackend
from strandline.state.chunks import chunked
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.timers import TIMES
from strandline.state.handles.ttl import STAMP_BYTES
from strandline.state.key_ranges import prefix_end

Convert = Callable[[list[bytes]], list[bytes]]

_DECLARED: Final = frozenset({"value", "list", "map", "reducing", "aggregating", "columns"})
"""The kinds of state whose schema the user declares. Vectorised operators derive their schemas themselves."""

_encode: Final = msgspec.msgpack.Encoder().encode
_columns_of: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_rows_of: Final = msgspec.msgpack.Decoder(list[list[msgspec.Raw]]).decode


@dataclass(frozen=True, slots=True)
class Widened:
    """A state that has more columns than in the checkpoint; the new columns are nullable."""

    before: StateDescriptor
    now: StateDescriptor
    places: tuple[int, ...]
    """The places of the old columns among the new ones."""

    def conversion(self) -> Convert:
        """A function that converts stored values from the old columns to the new ones; added columns are null."""
        old, new = parse_schema(self.before.schema), parse_schema(self.now.schema)
        if self.now.kind == "columns":
            narrow, wide = (RowCodec(struct, f"state {self.now.name!r}") for struct in (old, new))
            return lambda values: narrow.widened(values, wide, self.places)
        nulls: list[msgspec.Raw | None] = [None] * len(new.fields)

        def wider(columns: Sequence[msgspec.Raw]) -> bytes:
            row = nulls.copy()
            for place, column in zip(self.places, columns, strict=True):
                row[place] = column
            return _encode(row)

        def one(data: bytes) -> bytes:
            if self.now.kind == "list":
                return ValueCodec.join(list(map(wider, _rows_of(data))))
            return wider(_columns_of(data))

        if self.now.ttl_ms is None:
            return lambda values: list(map(one, values))
        return lambda values: [data[:STAMP_BYTES] + one(data[STAMP_BYTES:]) for data in values]


@dataclass(frozen=True, slots=True)
class StateChanges:
    """The changes that make the restored state of an operator match the states that the operator declares."""

    dropped: tuple[StateDescriptor, ...] = ()
    widened: tuple[Widened, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.widened)

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Delete the entries of dropped states, and rewrite the entries of widened states with their new columns.

        Call it once, when all entries of the old declarations are in `backend` and no entry of the new ones is.
        """
        for state in self.dropped:
            for name in (state.name, TIMES) if state.kind == "timers" else (state.name,):
                for start, end in _ranges(key_groups, name):
                    if next(backend.scan(start, end), None) is not None:
                        backend.delete_between(start, end)
        for one in self.widened:
            convert = one.conversion()
            for start, end in _ranges(key_groups, one.now.name):
                for keys, values in chunked(backend.scan(start, end)):
                    try:
                        backend.apply(keys, convert(values))
                    except (msgspec.DecodeError, ValueError) as error:
                        raise DamagedFileError(
                            f"state {one.now.name!r}: a stored value does not have the columns that the checkpoint "
                            f"declares: {error}. Restore from another checkpoint."
                        ) from error


def state_changes(
    operator: str,
    before: Iterable[Mapping[str, Any]],
    now: Iterable[StateDescriptor],
    may_drop: Callable[[str], bool],
) -> StateChanges:
    """The changes from the states of a checkpoint, as its metadata describes them, to those that the operator declares.

    A new state begins empty. A state that the operator does not declare is dropped if `may_drop`. A state that user
    code declares may get more nullable columns, and another time-to-live. Raises `IncompatibleCheckpointError` for any
    other change.
    """
    declared = {state.name: state for state in now}
    dropped: list[StateDescriptor] = []
    widened: list[Widened] = []
    for described in before:
        known = _read(operator, described)
        state = declared.get(known.name)
        if state is None:
            if not may_drop(known.name):
                raise IncompatibleCheckpointError(
                    f"operator {operator}: the checkpoint has the state {known.name!r} ({_described(known)}), which "
                    "the job does not declare. If you renamed the state, give it its old name. To delete its entries "
                    "and go on without it, start with allow_non_restored_state=True."
                )
            dropped.append(known)
        elif state != known:
            places = _places(known, state)
            if places is None:
                raise _refused(operator, known, state)
            if len(places) < len(parse_schema(state.schema).fields):
                widened.append(Widened(known, state, places))
    return StateChanges(tuple(dropped), tuple(widened))


def _read(operator: str, described: Mapping[str, Any]) -> StateDescriptor:
    try:
        return msgspec.convert(described, StateDescriptor)
    except (msgspec.ValidationError, JobDefinitionError) as error:
        raise IncompatibleCheckpointError(
            f"operator {operator}: the checkpoint describes a state that cannot exist: {error}. Restore from another "
            "checkpoint."
        ) from error


def _places(before: StateDescriptor, now: StateDescriptor) -> tuple[int, ...] | None:
    """The places of a state's old columns among the new ones; None if anything changed but added nullable columns.

    The length of a time-to-live may change, because it is not stored. Whether a state has one must not change.
    """
    if now.kind not in _DECLARED or (before.kind, before.key_schema) != (now.kind, now.key_schema):
        return None
    if (before.ttl_ms is None) != (now.ttl_ms is None):
        return None
    old = parse_schema(before.schema).fields
    names = {field.name for field in old}
    places: list[int] = []
    for at, field in enumerate(parse_schema(now.schema).fields):
        if field.name in names:
            if len(places) == len(old) or not _same(old[len(places)], field):
                return None
            places.append(at)
        elif not field.nullable:
            return None
    return tuple(places) if len(places) == len(old) else None


def _same(one: StructField, other: StructField) -> bool:
    """Whether two columns store values in the same way; comments and other metadata do not matter."""
    return (one.name, one.dataType, one.nullable) == (other.name, other.dataType, other.nullable)


def _refused(operator: str, before: StateDescriptor, now: StateDescriptor) -> IncompatibleCheckpointError:
    if now.kind in _DECLARED:
        remedy = (
            "A state may get more nullable columns and a longer or shorter time-to-live, nothing else. Declare it as "
            "before, or give the new state another name."
        )
    elif now.kind == "aggregate":
        remedy = "Use the same aggregates as before, or start a new job."
    else:
        remedy = "Define the step as before, or give it another uid."
    return IncompatibleCheckpointError(
        f"operator {operator}: the checkpoint has the state {now.name!r} as {_described(before)}, the job declares "
        f"{_described(now)}. {remedy}"
    )


def _ranges(key_groups: range, state: str) -> Iterable[tuple[bytes, bytes]]:
    """The key ranges of a state, one for each key group."""
    for group in key_groups:
        prefix = state_prefix(group, state)
        end = prefix_end(prefix)
        assert end is not None  # the prefix ends with a zero byte, so there is a next prefix
        yield prefix, end


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


def check_states(
    operator: Operator, declared: Iterable[StateDescriptor], durable: SubtaskState | None, allow_non_restored: bool
) -> StateChanges:
    """The changes that make a restored state match what the operator declares now.

    Raises `IncompatibleCheckpointError` if they cannot match; see `state_changes`.
    """
    deleted = operator.deleted_states
    before = durable.states if durable is not None else ()
    return state_changes(operator.uid, before, declared, lambda name: allow_non_restored or name in deleted)
