"""Conversion of stored values to a changed type: which changes lose nothing, and what becomes of the bytes.

The rules are those of Spark's states in Avro, where they lose nothing: columns may come, go and change places, and
numbers may become wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any, Final

import msgspec
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from strandline.state.coding.ddl import type_text
from strandline.state.coding.values import python_type

Convert = Callable[[msgspec.Raw], bytes | msgspec.Raw]
"""Takes the bytes of a stored value and returns those of the converted value."""

_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)
_EXACT_IN_FLOAT: Final = (ByteType, ShortType)
_EXACT_IN_DOUBLE: Final = (ByteType, ShortType, IntegerType)
_NULL: Final = msgspec.Raw(b"\xc0")
_DIGITS: Final = Context(prec=38)
"""Spark's decimals have up to 38 digits; Python's own context has 28."""

_encode: Final = msgspec.msgpack.Encoder().encode
_parts_of: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_integer_of: Final = msgspec.msgpack.Decoder(int).decode
_decimal_of: Final = msgspec.msgpack.Decoder(Decimal).decode


class NotConvertibleError(Exception):
    """A change of a type that could lose values. The message is a part of a sentence: what changed."""


def struct_places(old: StructType, new: StructType) -> list[int | None]:
    """For each column of `new`, its place among the columns of `old`; None for a new column.

    Raises `NotConvertibleError` if a new column is not nullable, or if no column is left.
    """
    known = {name: at for at, name in enumerate(old.fieldNames())}
    places = [known.get(field.name) for field in new.fields]
    for field, place in zip(new.fields, places, strict=True):
        if place is None and not field.nullable:
            raise NotConvertibleError(f"the new column {field.name!r} is not nullable")
    if all(place is None for place in places):
        raise NotConvertibleError("none of the columns is left")
    return places


def column_conversion(old: StructField, new: StructField) -> Convert | None:
    """The conversion of the values of a column; None if their bytes stay. Raises `NotConvertibleError`."""
    if old.nullable and not new.nullable:
        raise NotConvertibleError(f"{new.name!r} was nullable and is not any more")
    try:
        return conversion(old.dataType, new.dataType)
    except NotConvertibleError as error:
        raise NotConvertibleError(f"{new.name!r}: {error}") from None


def conversion(old: DataType, new: DataType) -> Convert | None:
    """The conversion of stored values of a type; None if their bytes stay. Raises `NotConvertibleError`."""
    match old, new:
        case StructType(), StructType():
            return _struct(old, new)
        case ArrayType(), ArrayType():
            _check_nulls(old.containsNull, new.containsNull)
            element = conversion(old.elementType, new.elementType)
            return element and _nullable(lambda data: _array(map(element, _parts_of(data))))
        case MapType(), MapType() if type_text(old.keyType) == type_text(new.keyType):
            _check_nulls(old.valueContainsNull, new.valueContainsNull)
            return _map(old, conversion(old.valueType, new.valueType))
        case _ if type_text(old) == type_text(new):
            return None
        case (FloatType(), DoubleType()):
            return None
        case _ if isinstance(new, _INTEGERS) and isinstance(old, _INTEGERS[: _INTEGERS.index(type(new))]):
            return None
        case (_, DoubleType()) if isinstance(old, _EXACT_IN_DOUBLE):
            return _nullable(lambda data: _encode(float(_integer_of(data))))
        case (_, FloatType()) if isinstance(old, _EXACT_IN_FLOAT):
            return _nullable(lambda data: _encode(float(_integer_of(data))))
        case DecimalType(), DecimalType() if new.scale >= old.scale and (
            new.precision - new.scale >= old.precision - old.scale
        ):
            step = Decimal(1).scaleb(-new.scale)
            return _nullable(lambda data: _encode(_decimal_of(data).quantize(step, context=_DIGITS)))
    raise NotConvertibleError(f"{type_text(old)} cannot become {type_text(new)} without loss")


def _struct(old: StructType, new: StructType) -> Convert | None:
    places = struct_places(old, new)
    changes = [
        None if place is None else column_conversion(old.fields[place], field)
        for place, field in zip(places, new.fields, strict=True)
    ]
    if not any(changes) and places == list(range(len(old.fields))):
        return None
    width = len(old.fields)

    def convert(data: msgspec.Raw) -> bytes:
        columns = _parts_of(data)
        if len(columns) != width:
            raise ValueError(f"{len(columns)} columns instead of {width}")
        return _row(columns, places, changes)

    return _nullable(convert)


def _row(columns: Sequence[msgspec.Raw], places: Sequence[int | None], changes: Sequence[Convert | None]) -> bytes:
    row = []
    for place, change in zip(places, changes, strict=True):
        column = _NULL if place is None else columns[place]
        row.append(column if change is None else change(column))
    return _array(row)


def _map(old: MapType, change: Convert | None) -> Convert | None:
    if change is None:
        return None
    key: Any = python_type(old.keyType, nullable=False)
    items_of = msgspec.msgpack.Decoder(dict[key, msgspec.Raw]).decode

    def convert(data: msgspec.Raw) -> bytes:
        return _encode({name: msgspec.Raw(bytes(change(item))) for name, item in items_of(data).items()})

    return _nullable(convert)


def _nullable(convert: Convert) -> Convert:
    return lambda data: data if data == _NULL else convert(data)


def _array(parts: Any) -> bytes:
    return _encode([part if isinstance(part, msgspec.Raw) else msgspec.Raw(part) for part in parts])


def _check_nulls(before: bool, now: bool) -> None:
    if before and not now:
        raise NotConvertibleError("its elements may have been null")
