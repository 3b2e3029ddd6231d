"""Checks which Python values fit which Spark types, and converts them to one canonical form."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from strandline.errors import SchemaError

Check = Callable[[Any], Any]
"""Takes a value and returns its canonical Python form. Raises `MisfitError` if the value does not fit."""

_BITS: Final[dict[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_EXACT_DECIMAL: Final = Context(prec=76, traps=[Inexact, InvalidOperation])
_FLOAT: Final = struct.Struct("<f")


class MisfitError(Exception):
    """A value does not fit a type. `path` is its position inside a nested value (`.name`, `[3]`)."""

    def __init__(self, expected: str, value: object, path: str = "") -> None:
        super().__init__(expected, value, path)
        self.expected = expected
        self.value = value
        self.path = path

    def within(self, step: str) -> MisfitError:
        """The same misfit with a path that begins one level further out."""
        return MisfitError(self.expected, self.value, step + self.path)

    def __str__(self) -> str:
        return f"expected {self.expected}, got {shown(self.value)}"


def shown(value: object) -> str:
    """A value for an error message: its shortened repr, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def exact_types(data_type: DataType) -> frozenset[type]:
    """The Python types whose values (integers: within range) fit `data_type` unchanged; if empty, check every value."""
    match data_type:
        case ByteType() | ShortType() | IntegerType() | LongType():
            return frozenset({int})
        case DoubleType() | FloatType():
            return frozenset({float})
        case StringType():
            return frozenset({str})
        case BooleanType():
            return frozenset({bool})
        case BinaryType():
            return frozenset({bytes})
        case DateType():
            return frozenset({date})
        case _:
            return frozenset()


def python_type(data_type: DataType, nullable: bool = True) -> Any:
    """The type annotation with which msgspec decodes stored values of `data_type`."""
    plain: Any
    match data_type:
        case ByteType() | ShortType() | IntegerType() | LongType():
            half = 1 << (_BITS[type(data_type)] - 1)
            plain = Annotated[int, Meta(ge=-half, le=half - 1)]
        case DoubleType() | FloatType():
            plain = float
        case StringType():
            plain = str
        case BooleanType():
            plain = bool
        case BinaryType():
            plain = bytes
        case DateType():
            plain = date
        case TimestampType():
            plain = Annotated[datetime, Meta(tz=True)]
        case TimestampNTZType():
            plain = Annotated[datetime, Meta(tz=False)]
        case DayTimeIntervalType():
            plain = timedelta
        case DecimalType():
            plain = Decimal
        case ArrayType():
            plain = list[python_type(data_type.elementType, data_type.containsNull)]  # type: ignore[misc]  # built at run time
        case MapType():
            key = python_type(data_type.keyType, False)
            plain = dict[key, python_type(data_type.valueType, data_type.valueContainsNull)]  # type: ignore[valid-type,misc]
        case StructType():
            plain = tuple[tuple(python_type(f.dataType, f.nullable) for f in data_type.fields)]  # type: ignore[misc]
        case NullType():
            return None
        case _:
            raise SchemaError(f"state and rows of type {data_type.simpleString()} are not supported")
    return plain | None if nullable else plain


def rounds(data_type: DataType, canonical: bool = False) -> bool:
    """Whether a value, at any depth, may change to fit: decimals, 32-bit floats, and with `canonical` every float."""
    match data_type:
        case DecimalType() | FloatType():
            return True
        case DoubleType():
            return canonical
        case ArrayType():
            return rounds(data_type.elementType, canonical)
        case MapType():
            return rounds(data_type.keyType, canonical) or rounds(data_type.valueType, canonical)
        case StructType():
            return any(rounds(field.dataType, canonical) for field in data_type.fields)
        case _:
            return False


def check_for(data_type: DataType, nullable: bool = True) -> Check:
    """The check of `data_type`. It accepts lossless conversions (int for double, numpy scalars, dict for a struct).

    A timestamp without a time zone means local time, as in PySpark. Every timestamp is returned in UTC.
    """
    plain = _plain_check(data_type)
    expected = f"{data_type.simpleString()} (not null)"

    def check(value: Any) -> Any:
        if value is None:
            if nullable:
                return None
            raise MisfitError(expected, value)
        return plain(value)

    return check


def _plain_check(data_type: DataType) -> Check:
    match data_type:
        case ByteType() | ShortType() | IntegerType() | LongType():
            return _integer(data_type.simpleString(), _BITS[type(data_type)])
        case DoubleType() | FloatType():
            return _float(isinstance(data_type, FloatType))
        case StringType():
            return _instance("string", str)
        case BooleanType():
            return _boolean
        case BinaryType():
            return _binary
        case DateType():
            return _date
        case TimestampType():
            return _timestamp
        case TimestampNTZType():
            return _timestamp_ntz
        case DayTimeIntervalType():
            return _instance("interval", timedelta)
        case DecimalType():
            return _decimal(data_type)
        case ArrayType():
            return _array(data_type)
        case MapType():
            return _map(data_type)
        case StructType():
            return _struct(data_type)
        case NullType():
            return _void
        case _:
            raise SchemaError(f"state and rows of type {data_type.simpleString()} are not supported")


def _void(value: Any) -> Any:
    raise MisfitError("void (only null)", value)


def _instance(expected: str, wanted: type) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, wanted):
            return value
        raise MisfitError(expected, value)

    return check


def _integer(expected: str, bits: int) -> Check:
    half = 1 << (bits - 1)

    def check(value: Any) -> int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            if -half <= value < half:
                return int(value)
            raise MisfitError(f"{expected} ({bits} bit)", value)
        raise MisfitError(expected, value)

    return check


def _float(single: bool) -> Check:
    def check(value: Any) -> float:
        if not isinstance(value, float | int | np.floating | np.integer) or isinstance(value, bool):
            raise MisfitError("float" if single else "double", value)
        try:
            number = float(value)
            return float(_FLOAT.unpack(_FLOAT.pack(number))[0]) if single else number
        except OverflowError as error:
            raise MisfitError("float (32 bit)" if single else "double (64 bit)", value) from error

    return check


def _boolean(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise MisfitError("boolean", value)


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise MisfitError("binary", value)


def _date(value: Any) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    raise MisfitError("date", value)


def _timestamp(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise MisfitError("timestamp", value)
    try:
        return value.astimezone(UTC)
    except (OverflowError, ValueError) as error:
        raise MisfitError("timestamp (years 1 to 9999 in UTC)", value) from error


def _timestamp_ntz(value: Any) -> datetime:
    if isinstance(value, datetime) and value.tzinfo is None:
        return value
    raise MisfitError("timestamp_ntz (a datetime without a time zone)", value)


def _decimal(data_type: DecimalType) -> Check:
    expected = data_type.simpleString()
    step = Decimal(1).scaleb(-data_type.scale)
    digits = data_type.precision

    def check(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, Decimal | int):
            raise MisfitError(expected, value)
        try:
            exact = Decimal(value).quantize(step, context=_EXACT_DECIMAL)
        except (Inexact, InvalidOperation) as error:
            raise MisfitError(f"{expected}, without rounding", value) from error
        if exact.is_finite() and len(exact.as_tuple().digits) <= digits:
            return exact
        raise MisfitError(expected, value)

    return check


def _array(data_type: ArrayType) -> Check:
    element = check_for(data_type.elementType, data_type.containsNull)
    expected = data_type.simpleString()

    def check(value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise MisfitError(expected, value)
        checked = []
        for at, item in enumerate(value):
            try:
                checked.append(element(item))
            except MisfitError as misfit:
                raise misfit.within(f"[{at}]") from None
        return checked

    return check


def _map(data_type: MapType) -> Check:
    key_check = check_for(data_type.keyType, False)
    value_check = check_for(data_type.valueType, data_type.valueContainsNull)
    expected = data_type.simpleString()

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise MisfitError(expected, value)
        checked = {}
        for key, item in value.items():
            try:
                checked[key_check(key)] = value_check(item)
            except MisfitError as misfit:
                raise misfit.within(f"[{key!r}]") from None
        return checked

    return check


def _struct(data_type: StructType) -> Check:
    names = data_type.fieldNames()
    checks = [check_for(field.dataType, field.nullable) for field in data_type.fields]
    expected = data_type.simpleString()

    def check(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Mapping):
            if not value.keys() <= set(names):
                raise MisfitError(expected, value)
            value = tuple(value.get(name) for name in names)
        if not isinstance(value, tuple | list) or len(value) != len(names):
            raise MisfitError(expected, value)
        checked = []
        for name, field_check, item in zip(names, checks, value, strict=True):
            try:
                checked.append(field_check(item))
            except MisfitError as misfit:
                raise misfit.within(f".{name}") from None
        return tuple(checked)

    return check
