"""What sinks into tables share: names in SQL, the check of a table's columns, nested values as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from strandline.errors import (
    IncompatibleCheckpointError,
    JobDefinitionError,
    SinkFilesMissingError,
    StorageRefusedError,
)
from strandline.sinks.marked import Marker

MARKERS = "strandline_markers"
"""The table that says which rows of which job the other tables of the database have."""

_json = msgspec.json.Encoder(decimal_format="number")


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def name_list(names: Iterable[str]) -> str:
    """Names, with commas."""
    return ", ".join(map(quoted, names))


def on_conflict(names: Iterable[str], keys: Iterable[str]) -> str:
    """The end of an INSERT that replaces the row with the same key. All columns but the keys get the new values."""
    keys = list(keys)
    changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in names if name not in keys)
    return f"ON CONFLICT ({name_list(keys)}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"


def check_distinct(where: str, system: str, names: Iterable[str]) -> None:
    """Raise `JobDefinitionError` if columns have the same name for a system that takes `A` for `a`.

    `where` names the job and the sink, and `system` the system, in the message.
    """
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise JobDefinitionError(
                f"{where}: {system} does not tell capital letters from small ones in the names of columns, so {name!r} "
                "would be there twice; rename one in a transform"
            )
        seen.add(name.lower())


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table that exists."""

    type: str
    """As the database writes it."""
    required: bool
    """Whether every row must have a value of its own: NULL is refused, and the database fills in nothing."""


def check_columns(
    place: str,
    job: str,
    schema: pa.Schema,
    columns: Mapping[str, Column],
    wanted: Callable[[pa.DataType], str],
    fits: Callable[[pa.Field], bool],
    how_to_add: str = "",
) -> None:
    """Raise `IncompatibleCheckpointError` unless the table can take rows with these columns.

    `wanted` gives the type that a column would have in a table of ours, and `fits` says whether the values of a field
    go into the column of that name. `how_to_add` names another way than SQL to add a column.
    """
    for field in schema:
        found = columns.get(field.name)
        if found is None:
            raise IncompatibleCheckpointError(
                f"{place} has no column {field.name!r}, which the rows of job {job!r} have"
                f"{_spelled(field.name, columns)}; add it with ALTER TABLE ... ADD COLUMN {quoted(field.name)} "
                f"{wanted(field.type)}{how_to_add}, or leave it out in a transform"
            )
        if not fits(field):
            raise IncompatibleCheckpointError(
                f"{place}: the column {field.name!r} is of type {found.type}, and job {job!r} writes "
                f"{wanted(field.type)}, which might not fit; cast it in a transform, change the column, or give the "
                "sink another table"
            )
    required = [name for name, column in columns.items() if column.required and name not in schema.names]
    if required:
        raise IncompatibleCheckpointError(
            f"{place}: the column {required[0]!r} must not be null and has no default, and the rows of job {job!r} do "
            "not have it; give it a default, drop NOT NULL, or add it in a transform"
        )


def _spelled(name: str, others: Iterable[str]) -> str:
    near = next((other for other in others if other.lower() == name.lower()), None)
    return f" (it has {near!r}, so perhaps rename the column in a transform)" if near is not None else ""


def check_not_lost(place: str, marker: Marker | None) -> None:
    """Raise `SinkFilesMissingError` if a table that does not exist had rows of the job."""
    if marker is not None and marker.batch >= 0:
        raise SinkFilesMissingError(
            f"{place}: the table is gone, and the marker of job {marker.job!r} in {MARKERS} says that it had rows up "
            f"to checkpoint {marker.checkpoint}. Bring the table back. To begin anew without these rows, delete that "
            "marker, and give the job another checkpoint_dir"
        )


def check_text(place: str, batch: pa.RecordBatch, *, nul: bool) -> None:
    """Raise `StorageRefusedError` if a text is not valid UTF-8; or holds the character NUL, unless `nul` is allowed."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise StorageRefusedError(
                f"{place}: a text in the column {field.name!r} cannot be stored: {error}. The rows stay staged. Start "
                "the job from the checkpoint before (restore=) with a transform that casts the column to binary, or "
                "that leaves such rows out"
            ) from error
        if not nul and (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            data = column.buffers()[2]
            if data is not None and b"\0" in memoryview(data).tobytes() and _has_nul(column):
                raise StorageRefusedError(
                    f"{place}: a text in the column {field.name!r} holds the character NUL (\\0), which the database "
                    "cannot store. The rows stay staged. Start the job from the checkpoint before (restore=) with a "
                    "transform that removes NUL, such as F.translate(column, '\\0', '')"
                )


def _has_nul(column: pa.Array) -> bool:
    """The buffer of a column may hold more than its values."""
    return any("\0" in value for value in column.to_pylist() if value is not None)


def json_text(name: str, column: pa.Array) -> list[str | None]:
    """The nested values of a column as JSON: maps with texts as keys are objects, other maps are lists of pairs.

    Binary values are in Base64, times are texts, in UTC if they are instants, decimals are numbers; what JSON has no
    number for, such as NaN, is null.

    Raises `StorageRefusedError` for what JSON cannot hold.
    """
    maps = "strict" if _keys_are_texts(column.type) else None
    try:
        # In another time zone, the first and the last hours of what Python has dates for may be beyond them.
        values: list[Any] = column.cast(_in_utc(column.type)).to_pylist(maps_as_pydicts=maps)
        return [None if value is None else _json.encode(value).decode() for value in values]
    except (ValueError, OverflowError, KeyError) as error:
        raise StorageRefusedError(
            f"the column {name!r} has a value that cannot be written as JSON: {error}. The rows stay staged. Start the "
            "job from the checkpoint before (restore=) with a transform that leaves such values out: times beyond the "
            "years 1 to 9999, and maps that have a key twice"
        ) from error


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """The type with the time zone UTC in the place of others. The instants stay the same."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC") if kind.tz is not None else kind
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(_in_utc(field.type)) for field in fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_in_utc(kind.key_type)), kind.item_field.with_type(_in_utc(kind.item_type))
        )
    return kind


def _keys_are_texts(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)) and _keys_are_texts(
            kind.item_type
        )
    return all(_keys_are_texts(kind.field(number).type) for number in range(kind.num_fields))
