"""Data files of an Iceberg table: Parquet with the table's field ids, and one file per partition.

A task knows neither the catalogue nor its passwords. It finds what it needs to know of the table in a small file, the
layout, which the driver leaves in the job's checkpoint folder.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.checkpoint.metadata import SinkFile
from strandline.decoding import json_decoder
from strandline.errors import MetadataError, NotFoundError, SinkError, StorageError, StorageRefusedError
from strandline.sinks.base import SinkContext, Stager
from strandline.sinks.iceberg.schemas import file_columns
from strandline.sinks.names import target_description
from strandline.sinks.staging import LocalRows, stage_files
from strandline.storage import Storage, open_storage

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.typedef import Record

_ROW_GROUP = 64 << 20
"""How many bytes of rows, in memory, go into one row group."""
_TARGET_SIZE = 512 << 20
"""How many bytes a data file should have at most, where the table does not say."""
_MOST_OPEN = 200
"""How many partitions of one task have a file that is not finished."""

PartitionValues = tuple[str | None, ...]
"""The values of a partition in Iceberg's binary form, as base64."""


class Layout(msgspec.Struct, frozen=True):
    """What a task must know of the table."""

    table: str
    """The table's UUID."""
    root: str
    """The folder of its data files."""
    columns: bytes
    """The columns of a data file, as a serialized Arrow schema."""
    compression: str
    level: int | None
    target_size: int
    """How many bytes a data file should have at most."""
    schema_id: int
    spec_id: int
    spec: str = ""
    """The partitioning as JSON; empty without one."""
    schema: str = ""
    """The table's schema as JSON, if it is partitioned."""

    @classmethod
    def of(cls, table: TableMetadata, rows: pa.Schema) -> Layout:
        """The layout for rows of the schema `rows`. Raises `DoesNotFitError`."""
        spec, properties = table.spec(), table.properties
        parts = (
            {}
            if spec.is_unpartitioned()
            else {"spec": spec.model_dump_json(), "schema": table.schema().model_dump_json()}
        )
        codec = properties.get("write.parquet.compression-codec", "zstd")
        level = properties.get("write.parquet.compression-level")
        return cls(
            str(table.table_uuid),
            data_folder(table),
            file_columns(rows, table.schema()).serialize().to_pybytes(),
            "none" if codec == "uncompressed" else codec,
            int(level) if level else None,
            int(properties.get("write.target-file-size-bytes") or _TARGET_SIZE),
            table.current_schema_id,
            table.default_spec_id,
            **parts,
        )


def data_folder(table: TableMetadata) -> str:
    """The folder of a table's data files, as a URL or a path."""
    return str(table.properties.get("write.data.path") or f"{table.location.rstrip('/')}/data").rstrip("/")


def described_folder(checkpoints: Storage, job: str, place: str) -> str | None:
    """The folder of the data files of a table, as the driver has described it to tasks; None if it has not.

    `checkpoints` is the job's checkpoint folder, and `place` that of the sink. Raises `StorageError` if what is there
    cannot be read.
    """
    try:
        return _described(checkpoints, job, place).root
    except NotFoundError:
        return None


def _described(checkpoints: Storage, job: str, place: str) -> Layout:
    """The layout that the driver has left for tasks. Raises `NotFoundError` if there is none, and `StorageError`."""
    path = target_description(job, place)
    try:
        return json_decoder(Layout).decode(checkpoints.read(path))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(
            f"{checkpoints.url}/{path}, where the driver describes the table of {place}, is damaged: {error}; a "
            "start of the job with that sink writes it anew"
        ) from error


def open_folder(url: str, options: Mapping[str, str]) -> Storage:
    """The storage of a folder that Iceberg names."""
    scheme, found, rest = url.partition("://")
    return open_storage(f"s3://{rest}" if found and scheme in ("s3a", "s3n") else url, options, private=False)


class FileHandle(msgspec.Struct, frozen=True):
    """What the driver must know of a staged file beside its name."""

    table: str
    schema_id: int
    spec_id: int
    partition: PartitionValues = ()

    def encoded(self) -> str:
        """The handle as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, file: SinkFile) -> FileHandle:
        """Reads what `encoded` made. Raises `MetadataError` for anything else."""
        try:
            return json_decoder(cls).decode(file.handle)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MetadataError(
                f"the checkpoint says of {file.staged}, with {file.rows} rows for {file.sink}, what no task says of a "
                f"file: {error}. Restore another checkpoint."
            ) from error


@dataclass(frozen=True, slots=True)
class DataFileStager(Stager):
    """Writes the rows of a task to data files in the table's folder, under names that no table uses."""

    job: str
    sink: str
    checkpoint_dir: str
    checkpoint_options: dict[str, str] = field(repr=False)
    options: dict[str, str] = field(repr=False)
    """The settings of the table's storage."""

    @classmethod
    def of(cls, context: SinkContext, place: str, options: Mapping[str, str]) -> DataFileStager:
        """The stager for the rows of one sink."""
        return cls(context.job, place, context.checkpoint_dir, dict(context.storage_options), dict(options))

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        first = next((some for some in batches if some.num_rows), None)
        if first is None:
            return
        layout = self._layout()
        storage = open_folder(layout.root, self.options)
        rows = chain([first], batches)
        yield from stage_files(storage, self.job, self.sink, batch, partial(self._write, rows, layout))

    def _write(self, batches: Iterator[pa.RecordBatch], layout: Layout, folder: Path) -> Iterator[LocalRows]:
        for written in write_files(batches, layout, folder, self.sink):
            handle = FileHandle(layout.table, layout.schema_id, layout.spec_id, written.partition).encoded()
            yield LocalRows(written.path, written.rows, handle)

    def _layout(self) -> Layout:
        checkpoints = open_storage(self.checkpoint_dir, self.checkpoint_options)
        try:
            return _described(checkpoints, self.job, self.sink)
        except NotFoundError as error:
            raise SinkError(
                f"{self.sink}: {checkpoints.url}/{target_description(self.job, self.sink)}, where the driver describes "
                "the table, is missing; the next start of the job writes it"
            ) from error


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished data file on local disk."""

    path: Path
    rows: int
    partition: PartitionValues


def write_files(batches: Iterable[pa.RecordBatch], layout: Layout, folder: Path, place: str) -> Iterator[WrittenFile]:
    """Write rows to data files in a local folder, and give each when it is finished.

    Raises `StorageRefusedError` for values that the table's columns cannot hold.
    """
    columns = pa.ipc.read_schema(pa.py_buffer(layout.columns))
    splitter = PartitionSplitter(layout) if layout.spec else None
    open_files: dict[PartitionValues, _OpenFile] = {}
    number = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = _converted(batch, columns, place)
        for values, part in splitter.split(batch, rows) if splitter is not None else [((), rows)]:
            if values not in open_files:
                if len(open_files) >= _MOST_OPEN:
                    yield open_files.pop(next(iter(open_files))).finished()
                number += 1
                open_files[values] = _OpenFile(folder / f"{number}.parquet", columns, layout, values)
            open_files[values].write(part)
            if open_files[values].is_full():
                yield open_files.pop(values).finished()
    for one in open_files.values():
        yield one.finished()


def _converted(batch: pa.RecordBatch, columns: pa.Schema, place: str) -> pa.RecordBatch:
    arrays = []
    for column in columns:
        array = batch.column(column.name)
        if not column.nullable and array.null_count:
            raise StorageRefusedError(
                f"{place}: the column {column.name!r} is required, and {array.null_count} of {batch.num_rows} rows "
                "have null there; make it optional, or filter these rows in a transform"
            )
        try:
            arrays.append(array.cast(column.type))
        except pa.ArrowException as error:
            raise StorageRefusedError(
                f"{place}: the column {column.name!r} cannot hold a value of the rows: {error}; cast it in a transform"
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


class _OpenFile:
    """A data file that is being written."""

    def __init__(self, path: Path, columns: pa.Schema, layout: Layout, partition: PartitionValues) -> None:
        self._path, self._partition = path, partition
        self._writer = pq.ParquetWriter(
            path,
            columns,
            compression=layout.compression,
            compression_level=layout.level,
            store_schema=False,
            write_batch_size=20_000,
        )
        self._row_group = min(_ROW_GROUP, layout.target_size)
        self._target_size = layout.target_size
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._waiting.append(batch)
        if sum(one.nbytes for one in self._waiting) >= self._row_group:
            self._flush()

    def is_full(self) -> bool:
        return not self._waiting and self._path.stat().st_size >= self._target_size

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting = []

    def finished(self) -> WrittenFile:
        self._flush()
        self._writer.close()
        return WrittenFile(self._path, self._rows, self._partition)


class PartitionSplitter:
    """Splits rows by the values of their partition."""

    def __init__(self, layout: Layout) -> None:
        from pyiceberg.partitioning import PartitionSpec
        from pyiceberg.schema import Schema

        self._schema = Schema.model_validate_json(layout.schema)
        self._spec = PartitionSpec.model_validate_json(layout.spec)

    def split(self, given: pa.RecordBatch, rows: pa.RecordBatch) -> Iterator[tuple[PartitionValues, pa.RecordBatch]]:
        """The parts of `rows`, which are the rows `given` in the form of data files."""
        numbers = np.zeros(rows.num_rows, np.int64)
        encoded = []
        for part in self._spec.fields:
            values, codes = self._encoded(part, rows)
            encoded.append((values, codes))
            numbers = numbers * len(values) + codes
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for begin, end in zip(starts, [*starts[1:], len(order)], strict=True):
            chosen = order[begin:end]
            yield tuple(values[codes[chosen[0]]] for values, codes in encoded), rows.take(pa.array(chosen))

    def _encoded(self, part: Any, rows: pa.RecordBatch) -> tuple[list[str | None], np.ndarray[Any, np.dtype[np.int64]]]:
        """The different values of one field of the partitioning, and for every row the number of its value."""
        source = self._schema.find_field(part.source_id)
        if source.name not in rows.schema.names:
            return [None], np.zeros(rows.num_rows, np.int64)
        dictionary = rows.column(source.name).dictionary_encode(null_encoding="encode")
        transform = part.transform.transform(source.field_type)
        kind = part.transform.result_type(source.field_type)
        found: dict[str | None, int] = {}
        numbers = [
            found.setdefault(_as_text(kind, transform(_plain(source.field_type, value))), len(found))
            for value in dictionary.dictionary.to_pylist()
        ]
        return list(found), np.asarray(numbers, np.int64)[dictionary.indices.to_numpy(zero_copy_only=False)]


def _plain(kind: Any, value: Any) -> Any:
    """A value as Iceberg's transforms take it: dates and times as numbers."""
    from pyiceberg.types import DateType, TimestampType, TimestamptzType, TimeType
    from pyiceberg.utils.datetime import date_to_days, datetime_to_micros, time_to_micros

    if value is None:
        return None
    if isinstance(kind, (TimestampType, TimestamptzType)):
        return datetime_to_micros(value)
    if isinstance(kind, DateType):
        return date_to_days(value)
    return time_to_micros(value) if isinstance(kind, TimeType) else value


def _as_text(kind: Any, value: Any) -> str | None:
    from pyiceberg.conversions import to_bytes

    return None if value is None else base64.b64encode(to_bytes(kind, value)).decode()


def partition_record(values: PartitionValues, spec: PartitionSpec, schema: Schema) -> Record:
    """The partition of a data file. Raises `ValueError` for values that the partitioning cannot have."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.typedef import Record

    kinds = [one.field_type for one in spec.partition_type(schema).fields]
    return Record(
        *(
            None if value is None else from_bytes(kind, base64.b64decode(value, validate=True))  # type: ignore[arg-type]
            for kind, value in zip(kinds, values, strict=True)
        )
    )


def nested_source(spec: PartitionSpec, schema: Schema) -> str | None:
    """The name of a partition field whose source is inside of a column; None if there is none."""
    columns = {column.field_id for column in schema.fields}
    return next((part.name for part in spec.fields if part.source_id not in columns), None)
