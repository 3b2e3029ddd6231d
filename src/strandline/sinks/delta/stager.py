"""Writes appended rows as data files of a Delta table, which no reader knows yet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from strandline.checkpoint.metadata import SinkFile
from strandline.decoding import json_decoder
from strandline.errors import MetadataError
from strandline.sinks.base import Stager
from strandline.sinks.staging import LocalRows, stage_files
from strandline.storage import open_storage

_FILE_BYTES = 128 << 20
"""So many bytes of Arrow data make a file, if a task has more."""
_LONGEST_BOUND = 32
"""Longer strings are cut in statistics."""
_LAST = "\U0010ffff"
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
_ROW = "__sl_row"

Bound = bool | int | float | str
"""A decimal is a string here, because JSON readers make floating-point numbers of it."""


class FileFacts(msgspec.Struct, frozen=True):
    """What the table's log says about a data file, beside its name and size."""

    partition: dict[str, str | None]
    nulls: dict[str, int]
    """How many nulls a column has, for all columns but nested ones."""
    least: dict[str, Bound]
    greatest: dict[str, Bound]

    def encoded(self) -> str:
        """The facts as text, for `SinkFile.handle`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, file: SinkFile, columns: pa.Schema, partition_by: tuple[str, ...]) -> FileFacts:
        """What a staged file says. Raises `MetadataError` if that is not about files of this table."""
        try:
            facts = json_decoder(cls).decode(file.handle)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _damaged(file, str(error)) from error
        if set(facts.partition) != set(partition_by):
            raise _damaged(file, f"it is partitioned by {sorted(facts.partition)}, not by {sorted(partition_by)}")
        known = set(columns.names)
        unknown = {*facts.nulls, *facts.least, *facts.greatest} - known
        decimals = [field.name for field in columns if kinds.is_decimal(field.type)]
        texts = [str(bounds[name]) for bounds in (facts.least, facts.greatest) for name in decimals if name in bounds]
        if (
            unknown
            or any(not 0 <= count <= file.rows for count in facts.nulls.values())
            or any(_DECIMAL.fullmatch(text) is None for text in texts)
        ):
            raise _damaged(file, f"its statistics are wrong {sorted(unknown)}")
        return facts

    def statistics(self, rows: int, table: pa.Schema) -> str:
        """The statistics as Delta's log has them, for a file of a table that may have more columns."""
        absent = {
            field.name: rows
            for field in table
            if field.name not in (*self.nulls, *self.partition) and not kinds.is_nested(field.type)
        }
        found = {
            "numRecords": rows,
            "minValues": _in_log(self.least, table),
            "maxValues": _in_log(self.greatest, table),
            "nullCount": {**self.nulls, **absent},
        }
        return msgspec.json.encode({name: value for name, value in found.items() if value != {}}).decode()


def _in_log(bounds: dict[str, Bound], table: pa.Schema) -> dict[str, Any]:
    return {
        name: msgspec.Raw(str(value).encode()) if kinds.is_decimal(table.field(name).type) else value
        for name, value in bounds.items()
    }


def _damaged(file: SinkFile, why: str) -> MetadataError:
    return MetadataError(
        f"what the checkpoint says about {file.staged}, with {file.rows} rows for {file.sink}, cannot be committed: "
        f"{why}. Restore another checkpoint."
    )


@dataclass(frozen=True, slots=True)
class DeltaStager(Stager):
    """Writes the rows of a task to one staged file for each partition of the table."""

    job: str
    place: str
    path: str
    options: dict[str, str] = field(repr=False)
    schema: pa.Schema
    """The columns as the table has them."""
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        storage = open_storage(self.path, self.options, private=False)
        yield from stage_files(storage, self.job, self.place, batch, partial(self._write, batches))

    def _write(self, batches: Iterator[pa.RecordBatch], folder: Path) -> Iterator[LocalRows]:
        for rows in _in_files(batches):
            for partition, part in split(as_stored(rows, self.schema, self.partition_by), self.partition_by):
                local = folder / "rows.parquet"
                pq.write_table(part, local, compression=self.compression)
                yield LocalRows(local, part.num_rows, facts_of(part, partition).encoded())


def _in_files(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows, in tables of some size."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            pending.append(batch)
            size += batch.nbytes
        if size >= _FILE_BYTES:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending)


def as_stored(rows: pa.Table, schema: pa.Schema, partition_by: tuple[str, ...]) -> pa.Table:
    """Rows with the types of the table. Delta has no empty strings in partition columns: they are null."""
    stored = rows.cast(schema)
    for name in partition_by:
        if kinds.is_string(schema.field(name).type):
            column = stored[name]
            empty = pc.equal(column, "")
            stored = stored.set_column(
                stored.column_names.index(name), schema.field(name), pc.if_else(empty, None, column)
            )
    return stored


def split(rows: pa.Table, partition_by: tuple[str, ...]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """The rows of each partition in their order, without the partition columns, and the values of those."""
    if not partition_by:
        yield {}, rows
        return
    numbered = rows.select(list(partition_by)).append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
    groups = numbered.group_by(list(partition_by), use_threads=False).aggregate([(_ROW, "list")])
    files = rows.drop_columns(list(partition_by))
    for at in range(groups.num_rows):
        value = {name: _partition_text(groups[name][at].as_py()) for name in partition_by}
        yield value, files.take(groups[f"{_ROW}_list"][at].values)


def _partition_text(value: str | int | bool | date | None) -> str | None:
    """A value of a partition column as Delta's log has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date):
        return value.isoformat()
    return None if value is None else str(value)


def facts_of(rows: pa.Table, partition: dict[str, str | None]) -> FileFacts:
    """The statistics of a file.

    If the bounds of one column are not known, the file has none. A reader that finds some of them may take the others
    for null, and skip the file: delta-rs does, when it makes a dataset for Arrow.
    """
    nulls = {
        name: column.null_count
        for name, column in zip(rows.column_names, rows.columns, strict=True)
        if not kinds.is_nested(column.type)
    }
    least: dict[str, Bound] = {}
    greatest: dict[str, Bound] = {}
    for name, count in nulls.items():
        column = rows[name]
        if count < rows.num_rows and any(check(column.type) for check in _BOUNDED):
            low, high = _bounds(column)
            if low is None or high is None:
                return FileFacts(partition, nulls, {}, {})
            least[name], greatest[name] = low, high
    return FileFacts(partition, nulls, least, greatest)


_BOUNDED = (
    kinds.is_boolean,
    kinds.is_signed_integer,
    kinds.is_floating,
    kinds.is_decimal,
    kinds.is_string,
    kinds.is_date32,
    kinds.is_timestamp,
)
"""Types for which readers expect bounds."""


def _bounds(column: pa.ChunkedArray) -> tuple[Bound | None, Bound | None]:
    """The least and the greatest value as Delta's log has them; None where they cannot be told."""
    # Spark sorts NaN above all numbers, and Arrow leaves NaN out.
    if kinds.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
        return None, None
    try:
        low, high = (pc.min_max(column)[name].as_py() for name in ("min", "max"))
    except (ValueError, OverflowError):  # Python has no date after the year 9999
        return None, None
    if isinstance(low, str) and isinstance(high, str):
        return low[:_LONGEST_BOUND], _cut_above(high)
    return _bound(low), _bound(high)


def _cut_above(text: str) -> str | None:
    """A text that is not less than `text`, and not much longer than a bound may be."""
    if len(text) <= _LONGEST_BOUND:
        return text
    return None if _LAST in text else text[:_LONGEST_BOUND] + _LAST


def _bound(value: Any) -> Bound | None:
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo is not None else text
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float) else None
