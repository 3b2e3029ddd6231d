"""Values as JSON, in the form that Spark's `from_json` reads back with the schema of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

Convert = Callable[[Any], Any]

_encode = msgspec.json.Encoder(decimal_format="number").encode
_PLAIN = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
)
"""Types whose Python values the encoder knows: binary values become base64, durations ISO 8601."""


def json_rows(columns: Sequence[pa.Array], names: Sequence[str]) -> list[bytes]:
    """One JSON object per row, with a field for each column."""
    values = [_values(column) for column in columns]
    return [_encode(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]


def json_values(column: pa.Array) -> list[bytes | None]:
    """One JSON value per row, and None for null."""
    return [None if value is None else _encode(value) for value in _values(column)]


def json_text(value: Any) -> bytes:
    """One plain value as JSON."""
    return _encode(value)


def has_json(kind: pa.DataType) -> bool:
    """Whether values of the type can be written as JSON."""
    if pa.types.is_struct(kind):
        return all(has_json(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_map(kind):
        return has_json(kind.key_type) and has_json(kind.item_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return has_json(kind.value_type)
    return pa.types.is_floating(kind) or pa.types.is_timestamp(kind) or any(check(kind) for check in _PLAIN)


def _values(column: pa.Array) -> list[Any]:
    """The values of a column as the encoder takes them."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        text = pc.replace_substring(column.cast(pa.timestamp("us")).cast(pa.string()), " ", "T")
        values: list[Any] = (pc.binary_join_element_wise(text, "Z", "") if kind.tz is not None else text).to_pylist()
        return values
    if pa.types.is_floating(kind) and pc.all(pc.is_finite(column)).as_py() is not False:
        return list(column.to_pylist())
    convert = _converter(kind)
    values = column.to_pylist()
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _converter(kind: pa.DataType) -> Convert | None:
    """Makes values of a type what the encoder takes; None if they are that already."""
    if pa.types.is_floating(kind):
        return _number
    if pa.types.is_timestamp(kind):
        return _time
    if pa.types.is_struct(kind):
        return _of_struct({field.name: _nullable(_converter(field.type)) for field in kind})
    if pa.types.is_map(kind):
        return _of_map(_nullable(_converter(kind.key_type)), _nullable(_converter(kind.item_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _converter(kind.value_type)
        return None if item is None else _of_list(_nullable(item))
    return None


def _nullable(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _of_struct(fields: dict[str, Convert]) -> Convert:
    return lambda value: {name: convert(value[name]) for name, convert in fields.items()}


def _of_map(key: Convert, item: Convert) -> Convert:
    def convert(pairs: Any) -> dict[str, Any]:
        return {_name(key(one)): item(value) for one, value in pairs}

    return convert


def _of_list(item: Convert) -> Convert:
    return lambda values: [item(value) for value in values]


def _name(key: Any) -> str:
    """A key of a map as the name of a field."""
    return key if isinstance(key, str) else _encode(key).decode().strip('"')


def _number(value: float) -> float | str:
    """JSON has no infinite numbers. Spark reads and writes these words for them."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _time(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat(timespec="microseconds")
    return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
