"""Columns of Delta tables: how Arrow's types are stored, and whether a table can take the rows of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.types as kinds

from strandline.errors import IncompatibleCheckpointError, JobDefinitionError
from strandline.sinks.tables import Column, check_columns, check_distinct

_REFUSED = set(" ,;{}()\n\t=`")
"""Delta refuses them in names of columns, and the backtick cannot be escaped in a merge of delta-rs."""

_STORED: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType | None], ...] = (
    (kinds.is_boolean, None),
    (kinds.is_signed_integer, None),
    (kinds.is_float32, None),
    (kinds.is_float64, None),
    (kinds.is_decimal128, None),
    (kinds.is_date32, None),
    (kinds.is_string, None),
    (kinds.is_large_string, pa.string()),
    (kinds.is_binary, None),
    (kinds.is_large_binary, pa.binary()),
)
"""The plain types that a table has, and as what they are stored if not as they are."""


def check_names(where: str, schema: pa.Schema) -> None:
    """Raise `JobDefinitionError` if a Delta table cannot have columns of these names."""
    for name in schema.names:
        if not name or _REFUSED & set(name):
            raise JobDefinitionError(
                f"{where}: Delta takes no column {name!r}: a name has one character at least, and no space, backtick "
                "or any of ,;{}()= in it. Rename it in a transform"
            )
    check_distinct(where, "Delta", schema.names)


def stored_schema(where: str, schema: pa.Schema) -> pa.Schema:
    """The columns as a Delta table has them. Raises `JobDefinitionError` for types that it cannot have."""
    fields = []
    for field in schema:
        kind = _stored(field.type)
        if kind is None:
            raise JobDefinitionError(
                f"{where}: Delta has no type for the column {field.name!r}, which is {field.type}; cast it in a "
                "transform, for instance to a string or a long"
            )
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _stored(kind: pa.DataType) -> pa.DataType | None:
    """What a table stores for a type; None if there is nothing."""
    for is_kind, other in _STORED:
        if is_kind(kind):
            return other or kind
    if kinds.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        inner = _stored(kind.value_type)
        return pa.list_(pa.field("element", inner)) if inner is not None else None
    if kinds.is_map(kind):
        key, item = _stored(kind.key_type), _stored(kind.item_type)
        return pa.map_(key, item) if key is not None and item is not None else None
    if kinds.is_struct(kind):
        members = [(member.name, _stored(member.type)) for member in kind]
        if members and all(member is not None for _name, member in members):
            return pa.struct([pa.field(name, member) for name, member in members])
    return None


def is_partition_type(kind: pa.DataType) -> bool:
    """Whether a table may be partitioned by a column of this type here."""
    return any(check(kind) for check in (kinds.is_boolean, kinds.is_signed_integer, kinds.is_date32, kinds.is_string))


def check_fits(place: str, job: str, table: pa.Schema, rows: pa.Schema) -> None:
    """Raise `IncompatibleCheckpointError` unless the table can take the rows. Both are as Delta stores them."""
    check_columns(
        place,
        job,
        rows,
        {field.name: Column(str(field.type), not field.nullable) for field in table},
        str,
        lambda field: _fits(table.field(field.name).type, field.type),
        " (delta-rs: DeltaTable.alter.add_columns)",
    )


def _fits(table: pa.DataType, rows: pa.DataType) -> bool:
    """Whether values of the type `rows` are values of the table's type. Names of elements do not matter."""
    if kinds.is_list(table) and kinds.is_list(rows):
        return _field_fits(table.value_field, rows.value_field)
    if kinds.is_map(table) and kinds.is_map(rows):
        return _fits(table.key_type, rows.key_type) and _field_fits(table.item_field, rows.item_field)
    if kinds.is_struct(table) and kinds.is_struct(rows):
        return [field.name for field in table] == [field.name for field in rows] and all(map(_field_fits, table, rows))
    return bool(table == rows)


def _field_fits(table: pa.Field, rows: pa.Field) -> bool:
    return (table.nullable or not rows.nullable) and _fits(table.type, rows.type)


def check_partitions(place: str, table: Sequence[str], sink: Sequence[str]) -> None:
    """Raise `IncompatibleCheckpointError` unless the table is partitioned as the sink says."""
    if list(table) != list(sink):
        raise IncompatibleCheckpointError(
            f"{place} is partitioned by {list(table)}, but the sink says partition_by={list(sink)}; give it "
            f"partition_by={list(table)}, or another table"
        )
