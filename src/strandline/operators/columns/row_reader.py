"""Reads Arrow columns as the Python rows that user code gets."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import UTC, date
from functools import partial
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DayTimeIntervalType,
    MapType,
    Row,
    StructType,
    TimestampNTZType,
    TimestampType,
)

Convert = Callable[[Any], list[Any]]
"""Turns an Arrow column into Python values; raises `UnreadableValueError` if Python cannot hold one of them."""

_DAYS: Final = (date.min - date(1970, 1, 1)).days, (date.max - date(1970, 1, 1)).days
_DAY_US: Final = 86_400_000_000


class UnreadableValueError(Exception):
    """A column has a value that Python cannot hold; the text says which one."""


def row_factory(schema: StructType) -> Callable[[tuple[Any, ...]], Any]:
    """A function that makes PySpark rows from value tuples.

    The names are in a `Row` class of their own, so that a row is a single allocation.
    """
    names = schema.fieldNames()
    # The attributes of a named tuple are read in C. `Row` searches for its names in a list, in Python.
    pattern = cast(Any, namedtuple)("pattern", names, rename=True)
    fast: dict[str, Any] = {
        name: pattern.__dict__[place]
        for name, place in zip(names, pattern._fields, strict=True)
        if name == place and not hasattr(Row, name)
    }
    made = type("Row", (Row,), {"__slots__": (), "__fields__": names, **fast})
    return partial(tuple.__new__, made)


def column_reader(data_type: DataType) -> Convert:
    """A function that turns an Arrow column into Python values: structs become rows, timestamps are in UTC."""
    match data_type:
        case TimestampType():
            return partial(_datetimes, aware=True)
        case TimestampNTZType():
            return partial(_datetimes, aware=False)
        case DateType():
            return _dates
        case DayTimeIntervalType():
            return _intervals
        case StructType() | ArrayType() | MapType():
            return _nested(data_type)
        case _:
            return _plain


def _plain(column: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:  # Spark makes text of any bytes
        raise UnreadableValueError(f"a text that is not valid UTF-8: {error}") from None
    return values


def _with_nulls(values: list[Any], column: Any) -> list[Any]:
    if column.null_count:
        for at in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[at] = None
    return values


def _datetimes(column: Any, aware: bool) -> list[Any]:
    # numpy converts the values, because Arrow's own conversion takes 3 us per value.
    instants = pc.fill_null(column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64()), 0).to_numpy()
    _check_range(instants, _DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1, "us", "timestamp")
    values: list[Any] = instants.view("M8[us]").tolist()
    if aware:
        values = [value.replace(tzinfo=UTC) for value in values]
    return _with_nulls(values, column)


def _dates(column: Any) -> list[Any]:
    days = pc.fill_null(column.view(pa.int32()), 0).to_numpy()
    _check_range(days, *_DAYS, "D", "date")
    return _with_nulls(days.astype("M8[D]").tolist(), column)


def _check_range(numbers: npt.NDArray[Any], first: int, last: int, unit: str, kind: str) -> None:
    wrong = np.flatnonzero((numbers < first) | (numbers > last))
    if len(wrong):
        shown = numbers[wrong[:1]].astype(f"M8[{unit}]")[0]
        raise UnreadableValueError(f"the {kind} {shown}, which Python cannot hold: it is not in the years 1 to 9999")


def _intervals(column: Any) -> list[Any]:
    micros = pc.fill_null(column.cast(pa.duration("us")).view(pa.int64()), 0).to_numpy()
    return _with_nulls(micros.view("m8[us]").tolist(), column)


def _nested(data_type: StructType | ArrayType | MapType) -> Convert:
    match data_type:
        case StructType():
            make = row_factory(data_type)
            readers = [column_reader(field.dataType) for field in data_type.fields]

            def read_structs(column: Any) -> list[Any]:
                fields = [read(field) for read, field in zip(readers, column.flatten(), strict=True)]
                return _with_nulls(list(map(make, zip(*fields, strict=True))), column)

            return read_structs
        case ArrayType():
            read_element = column_reader(data_type.elementType)

            def read_arrays(column: Any) -> list[Any]:
                first, spans = _spans(column)
                values = read_element(column.values.slice(*first))
                return _with_nulls([values[a:b] for a, b in spans], column)

            return read_arrays
        case MapType():
            read_key, read_value = column_reader(data_type.keyType), column_reader(data_type.valueType)

            def read_maps(column: Any) -> list[Any]:
                first, spans = _spans(column)
                keys, values = read_key(column.keys.slice(*first)), read_value(column.items.slice(*first))
                return _with_nulls([dict(zip(keys[a:b], values[a:b], strict=True)) for a, b in spans], column)

            return read_maps


def _spans(column: Any) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Which part of its child array a list or map column uses, and which span of that part each row has."""
    edges = column.offsets.to_numpy()
    first = int(edges[0]) if len(edges) else 0
    return (first, int(edges[-1]) - first if len(edges) else 0), list(pairwise((edges - first).tolist()))


def iterate_rows(columns: list[list[Any]], make: Callable[[tuple[Any, ...]], Any]) -> Iterator[Any]:
    """The rows of columns of equal length, made one at a time."""
    return map(make, zip(*columns, strict=True))
