"""Arrow columns to Python rows for user code, and the rows it yields back to Arrow columns."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC
from functools import partial
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
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

from strandline import pyspark_releases
from strandline.errors import JobDefinitionError, SchemaError
from strandline.state.coding.values import MisfitError, check_for, exact_types, shown

Convert = Callable[[Any], list[Any]]
_NULL: Final = type(None)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema of a Spark struct, timestamps in UTC; raises `JobDefinitionError` where there is none."""
    try:
        return pyspark_releases.arrow_schema(schema)
    except Exception as error:  # PySpark's errors have no common base outside of its own error framework
        raise JobDefinitionError(f"the schema {schema.simpleString()} cannot be carried as Arrow: {error}") from error


def fitted(rows: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The columns of `schema` out of `rows`, by name, in its types: Spark uses the session's time zone."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for field in schema:
        at = rows.schema.get_field_index(field.name)
        if at < 0:
            raise SchemaError(f"{where}: no input column {field.name!r} among {', '.join(rows.schema.names)}")
        column = rows.column(at)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise SchemaError(f"{where}: input column {field.name!r} is {column.type}, not {field.type}") from error
        columns.append(column)
    # Nullability is not enforced here: Spark is free to send a nullable column for one that is declared not null.
    names = schema.names
    return pa.RecordBatch.from_arrays(columns, names=names)


# --- Arrow to Python -----------------------------------------------------------------------------


def row_factory(schema: StructType) -> Callable[[tuple[Any, ...]], Any]:
    """Makes PySpark rows of value tuples: a `Row` class that knows its names, so that a row is one allocation."""
    names = schema.fieldNames()
    # A named tuple's attributes are read in C; `Row` would look its names up in a list, in Python.
    pattern = cast(Any, namedtuple)("pattern", names, rename=True)
    fast: dict[str, Any] = {
        name: pattern.__dict__[place]
        for name, place in zip(names, pattern._fields, strict=True)
        if name == place and not hasattr(Row, name)
    }
    made = type("Row", (Row,), {"__slots__": (), "__fields__": names, **fast})
    return partial(tuple.__new__, made)


def column_reader(data_type: DataType) -> Convert:
    """Turns an Arrow column of `data_type` into Python values, nested structs into rows, timestamps into UTC."""
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
    values: list[Any] = column.to_pylist()
    return values


def _with_nulls(values: list[Any], column: Any) -> list[Any]:
    if column.null_count:
        for at in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[at] = None
    return values


def _datetimes(column: Any, aware: bool) -> list[Any]:
    # By way of numpy: Arrow's own conversion takes 3 us a value.
    instants = pc.fill_null(column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64()), 0).to_numpy()
    values: list[Any] = instants.view("M8[us]").tolist()
    if aware:
        values = [value.replace(tzinfo=UTC) for value in values]
    return _with_nulls(values, column)


def _dates(column: Any) -> list[Any]:
    days = pc.fill_null(column.view(pa.int32()), 0).to_numpy()
    return _with_nulls(days.astype("M8[D]").tolist(), column)


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
    """Which part of the children a list or map column uses, and where in that part each row lies."""
    edges = column.offsets.to_numpy()
    first = int(edges[0]) if len(edges) else 0
    return (first, int(edges[-1]) - first if len(edges) else 0), list(pairwise((edges - first).tolist()))


# --- Python to Arrow -----------------------------------------------------------------------------


class RowWriter:
    """Builds record batches of the rows that user code yields, checked against the output schema."""

    def __init__(self, schema: StructType, arrow: pa.Schema, where: str) -> None:
        self._arrow = arrow
        self._where = where
        self._names = schema.fieldNames()
        self._types = [field.dataType for field in schema.fields]
        self._checks = [check_for(field.dataType, field.nullable) for field in schema.fields]
        self._exact = [
            exact_types(field.dataType) | ({_NULL} if field.nullable else set())
            if exact_types(field.dataType)
            else frozenset()
            for field in schema.fields
        ]

    def waiting(self) -> list[Any]:
        """A place for rows that wait."""
        return []

    def build(self, rows: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of `rows`; `key_at` names the key that yielded a row, for errors."""
        if set(map(type, rows)) != {tuple}:
            rows = [row if type(row) is tuple else self._as_tuple(row, at, key_at) for at, row in enumerate(rows)]
        if set(map(len, rows)) != {len(self._names)}:
            at = next(at for at, row in enumerate(rows) if len(row) != len(self._names))
            raise SchemaError(
                f"{self._where}, key {key_at(at)}: an output row has {len(rows[at])} values, expected "
                f"{len(self._names)} ({', '.join(self._names)}): {shown(rows[at])}"
            )
        columns = [self._column(at, values, key_at) for at, values in enumerate(zip(*rows, strict=True))]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _as_tuple(self, row: Any, at: int, key_at: Callable[[int], object]) -> tuple[Any, ...]:
        if isinstance(row, tuple | list):
            return tuple(row)
        if isinstance(row, dict):
            unknown = [name for name in row if name not in self._names]
            if unknown:
                raise SchemaError(
                    f"{self._where}, key {key_at(at)}: an output row has a column {unknown[0]!r}, "
                    f"expected {', '.join(self._names)}"
                )
            return tuple(map(row.get, self._names))
        raise SchemaError(
            f"{self._where}, key {key_at(at)}: an output row must be a tuple, Row, list or dict with "
            f"{', '.join(self._names)}, got {shown(row)}"
        )

    def _column(self, at: int, values: Sequence[Any], key_at: Callable[[int], object]) -> Any:
        kind = self._arrow.field(at).type
        if set(map(type, values)) <= self._exact[at]:
            try:
                return pa.array(values, kind)
            except (pa.ArrowException, OverflowError, UnicodeError):
                pass  # the checks below find out which value it is
        check = self._checks[at]
        checked = []
        for row, value in enumerate(values):
            try:
                checked.append(check(value))
            except MisfitError as misfit:
                column = self._names[at] + misfit.path
                raise SchemaError(f"{self._where}, key {key_at(row)}: output column {column!r}: {misfit}") from None
        try:
            return pa.array(checked, kind)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise SchemaError(
                f"{self._where}, keys {key_at(0)} to {key_at(len(values) - 1)}: output column {self._names[at]!r} "
                f"cannot be written as {self._types[at].simpleString()}: {error}"
            ) from error


def iterate_rows(columns: list[list[Any]], make: Callable[[tuple[Any, ...]], Any]) -> Iterator[Any]:
    """Rows made one at a time out of columns of equal length."""
    return map(make, zip(*columns, strict=True))
