"""What vectorised operators share: gathered input, checked columns, event times, and rows of any type as bytes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import repeat
from operator import is_not
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StructField, StructType, TimestampNTZType, TimestampType

from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.columns.rows import arrow_schema, column_reader, fitted
from strandline.state.coding.codec import ColumnCodec, ValueCodec

GATHER_BYTES: Final = 64 << 20


def gathered(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema, limit: int, where: str, bytes_limit: int = GATHER_BYTES
) -> Iterator[pa.RecordBatch]:
    """The columns of `schema` in record batches of about `limit` rows: small ones are not worth the work on each."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for incoming in rows:
        part = fitted(incoming, schema, where)
        if part.num_rows == 0:
            continue
        held.append(part)
        count += part.num_rows
        size += part.nbytes
        if count >= limit or size >= bytes_limit:
            yield pa.concat_batches(held)
            held, count, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def column_type(schema: StructType, column: str, where: str, what: str = "column") -> DataType:
    """The type of a column; raises `JobDefinitionError` that names the nearest one where there is none."""
    names = schema.fieldNames()
    if column in names:
        return schema[column].dataType
    near = difflib.get_close_matches(column, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise JobDefinitionError(f"{where}: no {what} {column!r}; {hint}")


def check_time_column(schema: StructType, column: str, where: str) -> None:
    """Raises `JobDefinitionError` unless the column exists and holds timestamps."""
    kind = column_type(schema, column, where)
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise JobDefinitionError(
            f"{where}: the time column {column!r} is of type {kind.simpleString()}; cast it to timestamp"
        )


def micros(column: Any) -> npt.NDArray[np.int64]:
    """A column of timestamps as microseconds since the epoch; nulls are 0."""
    numbers = column.view(pa.int64())
    values: npt.NDArray[np.int64] = (pc.fill_null(numbers, 0) if numbers.null_count else numbers).to_numpy()
    return values


def whole_millis(times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first whole milliseconds at or after some times: a watermark has passed a time once it is there."""
    return -(-times_us // 1000)


def is_valid(column: Any) -> npt.NDArray[np.bool_]:
    """Where a column is not null."""
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def present(values: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
    """Which stored values there are."""
    return np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))


def found(values: list[bytes | None]) -> npt.NDArray[np.int64]:
    """Where stored values are there."""
    missing = values.count(None)
    if missing in (0, len(values)):
        return np.arange(len(values) - missing)
    return np.flatnonzero(present(values))


def conform(rows: Any, struct: StructType, schema: pa.Schema, where: str) -> pa.Table:
    """A table that user code made, in the columns and types of `schema`; `SchemaError` names what does not fit."""
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if not isinstance(table, pa.Table):
        raise SchemaError(f"{where}: expected a pyarrow Table or RecordBatch, got {type(rows).__name__}")
    names = table.column_names
    unknown = [name for name in names if name not in schema.names]
    twice = [name for name in schema.names if names.count(name) > 1]
    missing = [name for name in schema.names if name not in names]
    for problem, found in (("unexpected", unknown), ("duplicate", twice), ("missing", missing)):
        if found:
            raise SchemaError(f"{where}: {problem} column {found[0]!r}; the columns are {', '.join(schema.names)}")
    columns = []
    for field, declared in zip(schema, struct.fields, strict=True):
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise SchemaError(
                    f"{where}: column {field.name!r} is {column.type}, expected {field.type}: {error}"
                ) from None
        if column.null_count and not declared.nullable:
            raise SchemaError(f"{where}: column {field.name!r} has {column.null_count} nulls, but is declared not null")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


class RowCodec:
    """Rows of any Spark types to bytes and back, a column at a time; only nested values are coded one by one."""

    def __init__(self, struct: StructType, where: str) -> None:
        self.schema = arrow_schema(struct)
        self._nested: dict[int, tuple[Any, ValueCodec]] = {}
        stored = self.schema
        for at, field in enumerate(struct.fields):
            if _is_flat(self.schema.field(at).type):
                continue
            stored = stored.set(at, pa.field(field.name, pa.binary()))
            wrapped = StructType([StructField(field.name, field.dataType)])
            self._nested[at] = column_reader(field.dataType), ValueCodec(wrapped, f"{where}, column {field.name!r}")
        self._codec = ColumnCodec(pa.schema([pa.field(field.name, field.type) for field in stored]))

    def encode(self, rows: pa.RecordBatch) -> list[bytes]:
        """The bytes of every row."""
        return self._codec.encode(self._lowered(rows))

    def encode_array(self, rows: pa.RecordBatch) -> Any:
        """The bytes of every row as an Arrow array of type large binary."""
        return self._codec.encode_array(self._lowered(rows)).cast(pa.large_binary())

    def decode(self, values: list[bytes]) -> pa.RecordBatch:
        """The rows that were encoded as `values`."""
        return self._raised(self._codec.decode(values))

    def decode_array(self, values: Any) -> pa.RecordBatch:
        """The rows that were encoded as an Arrow array of type large binary."""
        return self._raised(self._codec.decode_array(values))

    def widened(self, values: list[bytes], by: RowCodec, places: Sequence[int]) -> list[bytes]:
        """Encoded rows as `by` encodes them; `places` are those of their columns among its own, the others are null."""
        schema = by._codec.schema
        columns = [pa.nulls(len(values), field.type) for field in schema]
        for place, column in zip(places, self._codec.decode(values).columns, strict=True):
            columns[place] = column
        return by._codec.encode(pa.RecordBatch.from_arrays(columns, schema=schema))

    def _lowered(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._nested:
            return rows
        columns = list(rows.columns)
        for at, (read, codec) in self._nested.items():
            coded = [None if value is None else codec.encode((value,)) for value in read(columns[at])]
            columns[at] = pa.array(coded, pa.binary())
        return pa.RecordBatch.from_arrays(columns, schema=self._codec.schema)

    def _raised(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = list(rows.columns)
        for at, (_, codec) in self._nested.items():
            values = [None if data is None else codec.decode(data) for data in columns[at].to_pylist()]
            columns[at] = pa.array(values, self.schema.field(at).type)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)


def all_valid(columns: list[Any]) -> npt.NDArray[np.bool_]:
    """The rows in which none of the columns is null."""
    return reduce(np.logical_and, map(is_valid, columns))


def _is_flat(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))
