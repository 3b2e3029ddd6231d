"""Encodes rows of any Spark types as bytes, a column at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from msgspec import Raw
from pyspark.sql.types import StructField, StructType

from strandline.errors import SchemaError
from strandline.operators.columns.row_reader import UnreadableValueError, column_reader
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.coding.codec import ColumnCodec, ValueCodec
from strandline.state.coding.conversion import conversion, struct_places


class RowCodec:
    """Encodes and decodes rows a column at a time; only values of nested types are encoded one by one."""

    def __init__(self, struct: StructType, where: str) -> None:
        self.schema = arrow_schema(struct)
        self._struct = struct
        self._nested: dict[int, tuple[Any, ValueCodec]] = {}
        stored = self.schema
        for at, field in enumerate(struct.fields):
            if _is_flat(self.schema.field(at).type):
                continue
            stored = stored.set(at, pa.field(field.name, pa.binary()))
            codec = ValueCodec(_wrapped(field), f"{where}, column {field.name!r}")
            self._nested[at] = column_reader(field.dataType), codec
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

    def conversion_to(self, other: RowCodec) -> Callable[[list[bytes]], list[bytes]]:
        """A function that rewrites encoded rows for a codec with other columns, which are found by their names.

        New columns are null. Raises `NotConvertibleError` if a type cannot change without loss.
        """
        places = struct_places(self._struct, other._struct)
        old, new = self._codec, other._codec
        changes = {
            at: conversion(_wrapped(self._struct.fields[place]), _wrapped(other._struct.fields[at]))
            for at, place in enumerate(places)
            if place is not None and at in other._nested
        }

        def convert(values: list[bytes]) -> list[bytes]:
            rows = old.decode(values)
            columns = []
            for at, (place, field) in enumerate(zip(places, new.schema, strict=True)):
                column = pa.nulls(len(values), field.type) if place is None else rows.column(place)
                change = changes.get(at)
                if change is not None:
                    raw = (None if data is None else bytes(change(Raw(data))) for data in column.to_pylist())
                    column = pa.array(raw, field.type)
                columns.append(column.cast(field.type))
            return new.encode(pa.RecordBatch.from_arrays(columns, schema=new.schema))

        return convert

    def _with_coded_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self._nested:
            return rows
        columns = list(rows.columns)
        for at, (read, codec) in self._nested.items():
            try:
                values = read(columns[at])
            except UnreadableValueError as error:
                raise SchemaError(f"{codec.where} has {error}; filter such rows before the step") from None
            coded = [None if value is None else codec.encode((value,)) for value in values]
            columns[at] = pa.array(coded, pa.binary())
        return pa.RecordBatch.from_arrays(columns, schema=self._codec.schema)

    def _with_decoded_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = list(rows.columns)
        for at, (_, codec) in self._nested.items():
            values = [None if data is None else codec.decode(data) for data in columns[at].to_pylist()]
            columns[at] = pa.array(values, self.schema.field(at).type)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)


def _wrapped(field: StructField) -> StructType:
    """A row of one column, in which a value of a nested type is stored."""
    return StructType([StructField(field.name, field.dataType)])


def _is_flat(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))
