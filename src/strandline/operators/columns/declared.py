"""Checks the columns that a job's definition names: they exist, and they have the right type."""

from __future__ import annotations

import difflib
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from strandline.errors import JobDefinitionError
from strandline.operators.columns.time_columns import why_unfit

RESERVED_COLUMNS: Final = "__sl_"
"""The columns that steps add to their rows begin with this."""


def column_type(schema: StructType, column: str, where: str) -> DataType:
    """The type of a column; raises `JobDefinitionError`, with the most similar name, if there is no such column."""
    names = schema.fieldNames()
    if column in names:
        return schema[column].dataType
    near = difflib.get_close_matches(column, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(names)}"
    raise JobDefinitionError(f"{where}: no column {column!r}; {hint}")


def check_not_reserved(schema: StructType, where: str) -> None:
    """Raise `JobDefinitionError` if a column has a name like those that steps add to their rows."""
    for name in schema.fieldNames():
        if name.startswith(RESERVED_COLUMNS):
            raise JobDefinitionError(
                f"{where}: names of columns that begin with {RESERVED_COLUMNS!r} are reserved; rename {name!r} in a "
                "transform"
            )


def check_key_type(kind: DataType, what: str, where: str) -> None:
    """Raise `JobDefinitionError` if equal values of a type may have different bytes: state is found by the bytes."""
    found = _without_equal_bytes(kind)
    if isinstance(found, MapType):
        problem = "the entries of a map have no order, so equal maps may differ in their bytes. Use an array of entries"
    elif found is not None:
        problem = (
            "the collation makes different texts equal. Convert the texts first, for instance with "
            "lower(collate(name, 'UTF8_BINARY'))"
        )
    else:
        return
    raise JobDefinitionError(f"{where}: {what} of type {kind.simpleString()} cannot be a key: {problem}")


def _without_equal_bytes(kind: DataType) -> DataType | None:
    match kind:
        case MapType():
            return kind
        case StringType():
            return kind if is_collated(kind) else None
        case ArrayType():
            return _without_equal_bytes(kind.elementType)
        case StructType():
            return next(filter(None, (_without_equal_bytes(field.dataType) for field in kind.fields)), None)
        case _:
            return None


def is_collated(kind: DataType) -> bool:
    """Whether a type holds texts that are not compared by their bytes."""
    return isinstance(kind, StringType) and kind.collation != "UTF8_BINARY"


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
