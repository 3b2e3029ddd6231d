"""Checks the columns that a job's definition names: they exist, and they have the right type."""

from __future__ import annotations

import difflib

from pyspark.sql.types import DataType, StructType, TimestampNTZType, TimestampType

from strandline.errors import JobDefinitionError
from strandline.operators.columns.time_columns import why_unfit


def column_type(schema: StructType, column: str, where: str) -> DataType:
    """The type of a column; raises `JobDefinitionError`, with the most similar name, if there is no such column."""
    names = schema.fieldNames()
    if column in names:
        return schema[column].dataType
    near = difflib.get_close_matches(column, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(names)}"
    raise JobDefinitionError(f"{where}: no column {column!r}; {hint}")


def check_time_column(schema: StructType, column: str, where: str) -> None:
    """Raise `JobDefinitionError` unless the column exists, holds timestamps, and can be event time."""
    kind = column_type(schema, column, where)
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise JobDefinitionError(
            f"{where}: the time column {column!r} is of type {kind.simpleString()}, not a timestamp; convert it first, "
            "for instance with to_timestamp or timestamp_millis"
        )
    reason = why_unfit(schema[column])
    if reason is not None:
        raise JobDefinitionError(f"{where}: {column!r} cannot be event time: {reason}")
