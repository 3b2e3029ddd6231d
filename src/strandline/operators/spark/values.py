"""Converts values between the forms that PySpark's states accept and return, and the forms that are stored."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final

import numpy as np
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from strandline.operators.columns.row_reader import row_factory

_WIDE: Final = Context(prec=76)


Convert = Callable[[Any], Any]


_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None), Decimal, date, datetime})


def plain_value(value: Any) -> Any:
    """The Python value of a numpy or pandas scalar, at any depth."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value] if isinstance(value, list) else tuple(map(plain_value, value))
    if isinstance(value, dict):
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    for method in ("to_pytimedelta", "to_pydatetime"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _taker(data_type: DataType) -> Convert | None:
    """A function that converts a value that Spark accepts to one that a state of `data_type` accepts; None if no need.

    The value is not null. A value that does not fit is returned unchanged; the state refuses it.
    """
    match data_type:
        case StringType():
            return _text
        case DateType():
            return lambda value: value.date() if isinstance(value, datetime) else value
        case TimestampNTZType():
            return lambda value: value.replace(tzinfo=None) if isinstance(value, datetime) else value
        case DecimalType():
            step = Decimal(1).scaleb(-data_type.scale)
            return lambda value: (
                value.quantize(step, ROUND_HALF_UP, _WIDE)
                if isinstance(value, Decimal) and value.is_finite()
                else value
            )
        case ArrayType():
            element = _optional(_taker(data_type.elementType))
            return element and (lambda value: [element(item) for item in value] if _listed(value) else value)
        case MapType():
            key, item = _taker(data_type.keyType), _optional(_taker(data_type.valueType))
            if key is None and item is None:
                return None
            key, item = key or _same, item or _same
            return lambda value: {key(k): item(v) for k, v in value.items()} if isinstance(value, dict) else value
        case StructType():
            return _struct_taker(data_type)
        case _:
            return None


def _struct_taker(struct: StructType) -> Convert:
    names = struct.fieldNames()
    takers = [_optional(_taker(field.dataType)) or _same for field in struct.fields]

    def take(value: Any) -> Any:
        if isinstance(value, dict):
            value = tuple(map(value.get, names))
        elif not _listed(value) and hasattr(value, "__dict__"):
            value = tuple(plain_value(vars(value).get(name)) for name in names)
        if not _listed(value) or len(value) != len(names):
            return value
        return tuple(one(item) for one, item in zip(takers, value, strict=True))

    return take


def _text(value: Any) -> Any:
    """The value as a string, in Java's spelling."""
    if isinstance(value, str):
        return str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _same(value: Any) -> Any:
    return value


def _optional(convert: Convert | None) -> Convert | None:
    return convert and (lambda value: None if value is None else convert(value))


def giver(struct: StructType) -> Convert | None:
    """A function that converts a stored row to the one that PySpark returns; None if they are the same.

    Nested structs become rows, and timestamps become local time without a time zone.
    """
    givers = [_optional(_giver(field.dataType)) for field in struct.fields]
    if not any(givers):
        return None
    return lambda row: tuple(v if give is None else give(v) for give, v in zip(givers, row, strict=True))


def _giver(data_type: DataType) -> Convert | None:
    match data_type:
        case TimestampType():
            return lambda value: value.astimezone().replace(tzinfo=None)
        case ArrayType():
            element = _optional(_giver(data_type.elementType))
            return element and (lambda value: [element(item) for item in value])
        case MapType():
            key, item = _giver(data_type.keyType), _optional(_giver(data_type.valueType))
            if key is None and item is None:
                return None
            key, item = key or _same, item or _same
            return lambda value: {key(k): item(v) for k, v in value.items()}
        case StructType():
            make, inner = row_factory(data_type), giver(data_type)
            return lambda value: make(value if inner is None else inner(value))
        case _:
            return None


def _has_times(data_type: DataType) -> bool:
    match data_type:
        case TimestampType() | TimestampNTZType():
            return True
        case ArrayType():
            return _has_times(data_type.elementType)
        case MapType():
            return _has_times(data_type.keyType) or _has_times(data_type.valueType)
        case StructType():
            return any(_has_times(field.dataType) for field in data_type.fields)
        case _:
            return False
