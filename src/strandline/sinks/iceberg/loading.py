"""The data files of an Iceberg table as the driver handles them: described for a snapshot, read and rewritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strandline.checkpoint.metadata import SinkFile
from strandline.sinks.iceberg.data_files import (
    Layout,
    PartitionValues,
    data_folder,
    partition_record,
    write_files,
)
from strandline.sinks.iceberg.schemas import FIELD_ID
from strandline.sinks.staging import written_locally
from strandline.sinks.upserts import comparable
from strandline.storage import Storage

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.io.pyarrow import StatisticsCollector
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_BATCH = 1 << 16
"""How many rows are written at a time."""
_MOST_NAMED = 200
"""Up to how many keys are looked for by name; PyIceberg looks for more of them by their range."""


class DataFiles:
    """The data files of a table as it was loaded."""

    def __init__(self, table: Table, storage: Storage) -> None:
        """`storage` is the folder of the data files."""
        self.table = table
        self._storage = storage
        self._folder = data_folder(table.metadata)

    def of(self, name: str, rows: int, partition: PartitionValues, schema_id: int) -> DataFile:
        """The entry for a file that lies in the folder, with the statistics of its columns.

        Raises `ValueError` if the file or the partition is not what it should be.
        """
        from pyiceberg.io.pyarrow import data_file_statistics_from_parquet_metadata
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

        found = self.table.io.new_input(f"{self._folder}/{name}")
        with found.open() as stream:
            metadata = pq.read_metadata(stream)
        if metadata.num_rows != rows:
            raise ValueError(f"it has {metadata.num_rows} rows")
        plan, ids = self._statistics(schema_id)
        statistics = data_file_statistics_from_parquet_metadata(metadata, plan, ids)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=found.location,
            file_format=FileFormat.PARQUET,
            partition=partition_record(partition, self.table.spec(), self.table.schema()),
            file_size_in_bytes=len(found),
            sort_order_id=None,
            spec_id=self.table.spec().spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def _statistics(self, schema_id: int) -> tuple[dict[int, StatisticsCollector], dict[str, int]]:
        """Which statistics are kept, and the ids of the columns under the names that they had in one of the schemas."""
        from pyiceberg.io.pyarrow import compute_statistics_plan, parquet_path_to_id_mapping

        schema = self.table.schemas().get(schema_id)
        if schema is None:
            raise ValueError(f"the table has no schema {schema_id}")
        return compute_statistics_plan(schema, self.table.properties), parquet_path_to_id_mapping(schema)

    def write(self, tables: Sequence[pa.Table], new_name: Callable[[], str], place: str) -> list[DataFile]:
        """Write rows to new data files. Those of tables with the same columns go into the same files."""
        by_layout: dict[Layout, list[pa.Table]] = {}
        for rows in tables:
            by_layout.setdefault(Layout.of(self.table.metadata, rows.schema), []).append(rows)
        files = []
        for layout, some in by_layout.items():
            batches = (one for rows in some for one in rows.to_batches(max_chunksize=_BATCH))
            for written in written_locally(partial(write_files, batches, layout, place=place)):
                name = new_name()
                self._storage.upload(written.path, name)
                files.append(self.of(name, written.rows, written.partition, layout.schema_id))
        return files

    def written_anew(self, file: SinkFile, new_name: Callable[[], str], place: str) -> list[DataFile]:
        """New data files with the rows of a staged file, for a table that is partitioned in another way now."""
        path = file.staged if self._storage.exists(file.staged) else file.final
        with self.table.io.new_input(f"{self._folder}/{path}").open() as stream:
            rows = pq.read_table(stream)
        columns = {str(column.field_id).encode(): column.name for column in self.table.schema().fields}
        still = {
            field.name: columns[field.metadata[FIELD_ID]]
            for field in rows.schema
            if field.metadata[FIELD_ID] in columns
        }
        return self.write([rows.select(list(still)).rename_columns(list(still.values()))], new_name, place)

    def without(self, rows: pa.Table, keys: Sequence[str]) -> tuple[list[DataFile], list[pa.Table]]:
        """The data files that hold keys of `rows`, and what is in them beside these keys."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        schema = self.table.schema()
        wanted = self._as_stored(rows.select(list(keys)))
        replaced, kept = [], []
        everything, only_keys = (
            ArrowScan(self.table.metadata, self.table.io, columns, AlwaysTrue())
            for columns in (schema, schema.select(*keys))
        )
        for task in self.table.scan(row_filter=_around(wanted)).plan_files():
            hit = matches(only_keys.to_table([task]), wanted, keys)
            if not pc.any(hit, min_count=0).as_py():
                continue
            replaced.append(task.file)
            rest = everything.to_table([task]).filter(pc.invert(hit))
            if rest.num_rows:
                kept.append(rest)
        return replaced, kept

    def _as_stored(self, rows: pa.Table) -> pa.Table:
        """The rows with the types that a scan of the table gives."""
        return rows.cast(pa.schema([self._scanned.field(name) for name in rows.schema.names]))

    @cached_property
    def _scanned(self) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        found: pa.Schema = schema_to_pyarrow(self.table.schema(), include_field_ids=False)
        return pa.schema([field.with_nullable(True) for field in found])


def matches(table: pa.Table, wanted: pa.Table, keys: Sequence[str]) -> pa.ChunkedArray:
    """For every row of `table`, whether its key is in `wanted`. A null is equal to a null."""
    # The number of each row's key among the wanted ones, column by column; null if it is not among them.
    there = here = None
    for key in keys:
        given = comparable(wanted[key])
        values = given.combine_chunks().unique()
        width = pa.scalar(len(values), pa.int64())
        columns = (given, comparable(table[key].cast(values.type)))
        codes = (pc.index_in(column, value_set=values).cast(pa.int64()) for column in columns)
        if there is None or here is None:
            there, here = codes
        else:
            there, here = (
                pc.add(pc.multiply(before, width), now) for before, now in zip((there, here), codes, strict=True)
            )
            values = there.combine_chunks().unique()
            there, here = (pc.index_in(one, value_set=values).cast(pa.int64()) for one in (there, here))
    assert here is not None
    return pc.is_valid(here)


def _around(wanted: pa.Table) -> BooleanExpression:
    """A condition that all rows with the wanted keys meet, and that leaves out files by their statistics."""
    from pyiceberg.expressions import AlwaysTrue, And

    condition: BooleanExpression = AlwaysTrue()
    for name in wanted.schema.names:
        condition = And(condition, _near(name, wanted[name]))
    return condition


def _near(name: str, values: pa.ChunkedArray) -> BooleanExpression:
    from pyiceberg import expressions

    build: Any = expressions  # the types of PyIceberg's conditions do not show the arguments that they take
    nothing: BooleanExpression = build.AlwaysTrue()
    if not any(check(values.type) for check in _ORDERED):
        return nothing
    some = pc.unique(values.drop_null())
    condition = build.AlwaysFalse()
    if len(some) > _MOST_NAMED:
        ends = pc.min_max(some).as_py()
        condition = build.And(build.GreaterThanOrEqual(name, ends["min"]), build.LessThanOrEqual(name, ends["max"]))
    elif len(some):
        condition = build.In(name, set(some.to_pylist()))
    with_nulls: BooleanExpression = build.Or(condition, build.IsNull(name)) if values.null_count else condition
    return with_nulls


_ORDERED = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_decimal,
)
