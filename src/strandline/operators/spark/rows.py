"""PySpark rows for a `StatefulProcessor`: its input, read from Arrow, and its output, written to Arrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructField,
    StructType,
    TimestampType,
)

from strandline.errors import SchemaError
from strandline.operators.columns.row_reader import Convert, UnreadableValueError, column_reader
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.key_chunks import KeyChunkReader
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.spark.output_columns import OutputColumns
from strandline.state.coding.values import shown

_NESTED: Final = (ArrayType, MapType, StructType)


_UTC: Final = frozenset({"UTC", "Etc/UTC", "GMT"})


class SparkRowReader(KeyChunkReader):
    """Reads rows as Spark's Python worker does: nested values as Arrow returns them, times in the session's zone."""

    def __init__(
        self,
        struct: StructType,
        key_columns: Sequence[str],
        time_zone: str,
        where: str,
        limits: ProcessLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(struct, arrow_schema(struct), key_columns, where, limits)
        self._columns = [_spark_reader(field.dataType, time_zone) for field in struct.fields]


def _spark_reader(data_type: DataType, time_zone: str) -> Convert:
    if isinstance(data_type, _NESTED):
        return partial(_readable, lambda column: column.to_pylist())
    read = column_reader(data_type)
    if isinstance(data_type, TimestampType) and time_zone not in _UTC:
        return partial(_readable, partial(_zoned, read, ZoneInfo(time_zone)))
    return read


def _readable(read: Convert, column: Any) -> list[Any]:
    try:
        return read(column)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise UnreadableValueError(f"a value that Python cannot hold: {error}") from None


def _zoned(read: Convert, zone: ZoneInfo, column: Any) -> list[Any]:
    return [None if value is None else value.astimezone(zone) for value in read(column)]


class SparkRowWriter(OutputColumns):
    """Writes rows as Spark does: columns are found by name, a missing column is null, and other columns are ignored."""

    def __init__(self, struct: StructType, where: str) -> None:
        super().__init__(struct, where)
        self._nested = any(isinstance(field.dataType, _NESTED) for field in struct.fields)

    def waiting(self) -> list[Any]:
        """A new list for rows that wait."""
        return _Dicts() if self._nested else []

    def build(self, rows: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of `rows`."""
        arrays = []
        for at, (field, values) in enumerate(zip(self._struct.fields, self._columns(rows, key_at), strict=True)):
            kind = self._arrow.field(at).type
            try:
                arrays.append(pa.array(values, kind))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise self._first_misfit(values, field, kind, key_at) or error from None
        return self._batch(arrays, key_at)

    def _columns(self, rows: list[Any], key_at: Callable[[int], object]) -> list[Sequence[Any]]:
        wanted = self._struct.names
        if self._nested:
            return [[row.get(name) for row in rows] for name in wanted]
        names = None
        for at, row in enumerate(rows):
            fields = _fields_of(row)
            if fields is None:
                raise SchemaError(f"{self._where}, key {key_at(at)}: {_no_row(row)}")
            if names is None:
                names = fields
            elif fields != names:
                dicts = [row.asDict() for row in rows if _fields_of(row)]
                if len(dicts) == len(rows):
                    return [[row.get(name) for row in dicts] for name in wanted]
        known = dict(zip(names or (), zip(*rows, strict=True), strict=True))
        nothing = [None] * len(rows)
        return [known.get(name, nothing) for name in wanted]

    def _first_misfit(
        self, values: Sequence[Any], field: StructField, kind: pa.DataType, key_at: Callable[[int], object]
    ) -> SchemaError | None:
        for at, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                return self._misfit(key_at(at), field, error)
        return None


class _Dicts(list[Any]):
    """Waiting rows with nested values, copied at once: user code may change its own lists later."""

    def append(self, row: Any) -> None:
        if _fields_of(row) is None:
            raise SchemaError(_no_row(row))
        super().append(row.asDict(True))


def _fields_of(row: Any) -> list[str] | None:
    """The names of a row's columns; None if `row` is not a row, or has no names."""
    fields: list[str] | None = getattr(row, "__fields__", None)
    return fields if fields is not None and len(fields) == len(row) else None


def _no_row(row: Any) -> str:
    return f"an output row must be a pyspark.sql.Row with the names of its columns, got {shown(row)}"
