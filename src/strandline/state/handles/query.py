"""Reads the committed state of one key from a backend, without an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError
from strandline.pyspark_releases import arrow_schema
from strandline.state.backends.base import StateBackend
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import KeyEncoder
from strandline.state.coding.values import shown
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.timers import time_of, times_prefix
from strandline.state.handles.ttl import STAMP_BYTES, stamp_of
from strandline.state.key_ranges import prefix_end

_GROUP: Final = "key group"
KEY_GROUP_BYTES: Final = 2
"""How many bytes of a stored key say its key group."""

Found: TypeAlias = "tuple[Any] | None"
"""What was found, in a tuple of one; None if there is nothing."""


def encode_key(key_schema: StructType, key: Sequence[Any], key_group: int) -> bytes:
    """Key group and key bytes of one key, for `read_state`. Raises `SchemaError` if the key does not fit its schema."""
    schema = arrow_schema(key_schema)
    if len(key) != len(schema):
        raise SchemaError(f"a key has {len(schema)} values ({', '.join(schema.names)}), got {len(key)}: {tuple(key)!r}")
    columns = []
    for value, field, column in zip(key, schema, key_schema.fields, strict=True):
        try:
            columns.append(pa.array([value], field.type))
        except (pa.ArrowException, OverflowError, UnicodeError):
            kind = column.dataType.simpleString()
            raise SchemaError(f"key column {column.name!r}: expected {kind}, got {shown(value)}") from None
    row = pa.RecordBatch.from_arrays([*columns, pa.array([key_group], pa.int32())], names=[*schema.names, _GROUP])
    return KeyEncoder(schema, schema.names, _GROUP).encode(row).one(0)


def read_state(backend: StateBackend, state: StateDescriptor, key: bytes, now_ms: int) -> Any:
    """What `find_state` finds, else `nothing_in(state)`."""
    found = find_state(backend, state, key, now_ms)
    return nothing_in(state) if found is None else found[0]


def nothing_in(state: StateDescriptor) -> Any:
    """What a query gives for a key of which `state` holds nothing."""
    return [] if state.kind == "list" else {} if state.kind == "map" else None


def find_state(backend: StateBackend, state: StateDescriptor, key: bytes, now_ms: int) -> Found:
    """The content of `state` for `key` (see `encode_key`) after the last commit, without expired values.

    A value state returns its value, a list state a list, a map state a dict, and a reducing state its value. An
    aggregating state returns its accumulator, because only the processor knows the function that makes the result.
    """
    where = f"state {state.name!r}"
    stored = key[:2] + state.name.encode() + b"\0" + key[2:]
    codec = ValueCodec(parse_schema(state.schema), where)
    match state.kind:
        case "value" | "reducing" | "aggregating":
            data = backend.get(stored)
            found = [] if data is None else [(stored, data)]
            return next(((codec.decode(value),) for _, value in _living(iter(found), state, now_ms)), None)
        case "list":
            entries = _living(backend.scan(stored, prefix_end(stored)), state, now_ms)
            values = [value for _, data in entries for value in codec.decode_list(data)]
            return (values,) if values else None
        case "map":
            key_codec = ValueCodec(parse_schema(state.key_schema or ""), f"{where}, map key", canonical=True)
            entries = _living(backend.scan(stored, prefix_end(stored)), state, now_ms)
            pairs = {_hashable(key_codec.decode(at[len(stored) :])): codec.decode(data) for at, data in entries}
            return (pairs,) if pairs else None
        case _:
            raise StrandlineError(f"{where} is of kind {state.kind}, which cannot be read for one key")


def read_timers(backend: StateBackend, key: bytes) -> list[int]:
    """The times of the key's timers after the last commit, ascending."""
    prefix = times_prefix(key)
    return [time_of(stored[len(prefix) :]) for stored, _ in backend.scan(prefix, prefix_end(prefix))]


def _living(
    entries: Iterator[tuple[bytes, bytes]], state: StateDescriptor, now_ms: int
) -> Iterator[tuple[bytes, bytes]]:
    if state.ttl_ms is None:
        return entries
    now = stamp_of(now_ms)
    return ((key, data[STAMP_BYTES:]) for key, data in entries if data[:STAMP_BYTES] > now)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
