"""Encodes rows of any Spark types as bytes, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from strandline.operators.columns.row_reader import column_reader
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.coding.codec import ColumnCodec, ValueCodec


class RowCodec:
    """Encodes and decodes rows a column at a time; only values of nested types are encoded one by one."""

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
        return self._codec.encode(self._with_coded_values(rows))

    def encode_array(self, rows: pa.RecordBatch) -> Any:
        """The bytes of every row, as an Arrow array of large binary."""
        return self._codec.encode_array(self._with_coded_values(rows)).cast(pa.large_binary())

    def decode(self, values: list[bytes]) -> pa.RecordBatch:
        """The rows that were encoded as `values`."""
        return self._with_decoded_values(self._codec.decode(values))

    def decode_array(self, values: Any) -> pa.RecordBatch:
        """The rows that were encoded as an Arrow array of large binary."""
        return self._with_decoded_values(self._codec.decode_array(values))

    def widened(self, values: list[bytes], by: RowCodec, places: Sequence[int]) -> list[bytes]:
        """Encoded rows, rewritten for a codec `by` with more columns.

        `places` says where the columns of this codec are among the columns of `by`. The other columns are null.
        """
        schema = by._codec.schema
        columns = [pa.nulls(len(values), field.type) for field in schema]
        for place, column in zip(places, self._codec.decode(values).columns, strict=True):
            columns[place] = column
        return by._codec.encode(pa.RecordBatch.from_arrays(columns, schema=schema))

    def _with_coded_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._nested:
            return rows
        columns = list(rows.columns)
        for at, (read, codec) in self._nested.items():
            coded = [None if value is None else codec.encode((value,)) for value in read(columns[at])]
            columns[at] = pa.array(coded, pa.binary())
        return pa.RecordBatch.from_arrays(columns, schema=self._codec.schema)

    def _with_decoded_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = list(rows.columns)
        for at, (_, codec) in self._nested.items():
            values = [None if data is None else codec.decode(data) for data in columns[at].to_pylist()]
            columns[at] = pa.array(values, self.schema.field(at).type)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)


def _is_flat(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))
