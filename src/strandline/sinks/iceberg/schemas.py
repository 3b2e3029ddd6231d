"""The columns of rows beside those of an Iceberg table: which fit, and how data files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType, NestedField

FIELD_ID = b"PARQUET:field_id"
"""The key under which PyArrow keeps the id of a field, which Iceberg's data files have."""


class DoesNotFitError(Exception):
    """Rows cannot be written into the table; the text says which column and why."""


def table_columns(schema: pa.Schema) -> Schema:
    """The columns of a table that is made for rows of `schema`. Raises `DoesNotFitError`."""
    return _as_iceberg([pa.field(field.name, field.type) for field in schema], "")


def file_columns(schema: pa.Schema, table: Schema) -> pa.Schema:
    """How data files hold rows of `schema`: with the types of the table, and its field ids.

    Raises `DoesNotFitError` if a column is not in the table or has another type there, or if a required one is missing.
    """
    columns = {field.name: field for field in table.fields}
    return pa.schema(_file_fields(list(schema), columns, "", rows=True))


def _file_fields(given: list[pa.Field], columns: dict[str, NestedField], inside: str, *, rows: bool) -> list[pa.Field]:
    unknown = [field.name for field in given if field.name not in columns]
    if unknown:
        raise DoesNotFitError(f"there is no column {inside + unknown[0]!r}, which the rows have")
    names = {field.name for field in given}
    left_out = [name for name, column in columns.items() if column.required and name not in names]
    if left_out:
        raise DoesNotFitError(f"the column {inside + left_out[0]!r} is required, and the rows do not have it")
    return [_file_field(field, columns[field.name], inside + field.name, rows=rows) for field in given]


def _file_field(field: pa.Field, column: NestedField, path: str, *, rows: bool = False) -> pa.Field:
    # Nulls in a column are found when its rows are written; nulls inside of values are not.
    if column.required and field.nullable and not rows:
        raise DoesNotFitError(f"{path!r} is required inside of its column, and may be null in the rows")
    metadata = {FIELD_ID: str(column.field_id)}
    return pa.field(column.name, _file_type(field, column.field_type, path), not column.required, metadata)


def _file_type(field: pa.Field, wanted: IcebergType, path: str) -> pa.DataType:
    from pyiceberg.exceptions import ResolveError
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.schema import promote
    from pyiceberg.types import ListType, MapType, StructType

    kind = field.type
    if isinstance(wanted, StructType) and pa.types.is_struct(kind):
        inner = {one.name: one for one in wanted.fields}
        return pa.struct(_file_fields([kind.field(at) for at in range(kind.num_fields)], inner, f"{path}.", rows=False))
    if isinstance(wanted, ListType) and _is_list(kind):
        return pa.list_(_file_field(kind.value_field, wanted.element_field, f"{path}.element"))
    if isinstance(wanted, MapType) and pa.types.is_map(kind):
        return pa.map_(
            _file_field(kind.key_field, wanted.key_field, f"{path}.key"),
            _file_field(kind.item_field, wanted.value_field, f"{path}.value"),
        )
    if wanted.is_primitive and not pa.types.is_nested(kind):
        found = _as_iceberg([field], path).fields[0].field_type
        try:
            fits = found == wanted or promote(found, wanted) is not None
        except ResolveError:
            fits = False
        if fits:
            stored: pa.DataType = schema_to_pyarrow(wanted)
            return stored
    raise DoesNotFitError(f"the column {path!r} is of type {wanted}, and the rows have {kind} there")


def _as_iceberg(fields: list[pa.Field], path: str) -> Schema:
    """Columns as Iceberg has them. Raises `DoesNotFitError` if it has no such type; `path` says where the column is."""
    from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, pyarrow_to_schema

    ids = count(1)
    try:
        return pyarrow_to_schema(pa.schema([_numbered(field.with_type(_instant(field.type)), ids) for field in fields]))
    except (UnsupportedPyArrowTypeException, TypeError, ValueError) as error:
        where = f"the column {path!r}" if path else "one of the columns"
        raise DoesNotFitError(f"Iceberg has no type for {where}: {error}") from error


def _instant(kind: pa.DataType) -> pa.DataType:
    """The type with every timestamp in microseconds, and every time zone UTC: the instants stay the same."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([field.with_type(_instant(field.type)) for field in fields])
    if _is_list(kind):
        return pa.list_(kind.value_field.with_type(_instant(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_instant(kind.key_type), kind.item_field.with_type(_instant(kind.item_type)))
    return kind


def _numbered(field: pa.Field, ids: Iterator[int]) -> pa.Field:
    """The field with an id, and with ids for all that is inside."""
    number, kind = next(ids), field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_numbered(kind.field(at), ids) for at in range(kind.num_fields)])
    elif _is_list(kind):
        kind = pa.list_(_numbered(kind.value_field, ids))
    elif pa.types.is_map(kind):
        kind = pa.map_(_numbered(kind.key_field, ids), _numbered(kind.item_field, ids))
    return pa.field(field.name, kind, field.nullable, {FIELD_ID: str(number)})


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
