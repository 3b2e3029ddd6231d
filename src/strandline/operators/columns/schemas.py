"""Brings rows into the Arrow schema of a Spark struct: input rows from Spark, and tables that user code made."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    StructType,
)

from strandline import pyspark_releases
from strandline.errors import JobDefinitionError, SchemaError


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema of a Spark struct, timestamps in UTC; raises `JobDefinitionError` if Arrow has no such type."""
    try:
        return pyspark_releases.arrow_schema(schema)
    except Exception as error:  # PySpark's errors have no common base outside of its own error framework
        raise JobDefinitionError(f"the schema {schema.simpleString()} cannot be written as Arrow: {error}") from error


def fitted(rows: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The columns of `schema`, taken from `rows` by name and cast; raises `SchemaError` if one does not fit.

    A cast is needed for timestamps, for instance: Spark sends them in the session's time zone.
    """
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
    # The result is not checked for nulls: Spark may send a nullable column for one that is declared not null.
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def conform(rows: Any, struct: StructType, schema: pa.Schema, where: str) -> pa.Table:
    """The columns of `schema` from a table that user code made; raises `SchemaError` if one does not fit."""
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
