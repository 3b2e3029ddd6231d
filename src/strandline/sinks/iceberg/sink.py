"""`IcebergSink`: what a user writes into a job to get the rows of a stream into an Iceberg table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from strandline.errors import ConfigError, JobDefinitionError
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.extras import required
from strandline.sinks.iceberg.catalogues import catalogue_name, storage_options_of
from strandline.sinks.iceberg.data_files import DataFileStager
from strandline.sinks.iceberg.schemas import DoesNotFitError, table_columns
from strandline.sinks.iceberg.target import IcebergTarget
from strandline.sinks.staging import ArrowStager
from strandline.sinks.upserts import Mode, check_plain_keys, upsert_keys


@dataclass(frozen=True, slots=True)
class IcebergSink(ExactlyOnceSink):
    """Writes rows exactly once into an Iceberg table, with one snapshot per checkpoint.

    Tasks write the data files, and the snapshot makes them part of the table. The namespace and the table are made if
    they do not exist. Needs `pip install "strandline[iceberg]"` on every host.
    """

    table: str
    """The table with its namespace: `"sales.visits"`."""
    catalog: str | Mapping[str, str] = field(repr=False)
    """The name of a catalogue that PyIceberg is configured for on the driver's host; or its properties, such as
    `{"type": "sql", "uri": "postgresql+psycopg2://…", "warehouse": "s3://…"}` or `{"type": "rest", "uri": "http://…"}`.
    Tasks never see them. `"name"`, by default `"default"`, is the name of the catalogue."""
    mode: Mode = "append"
    """`"upsert"` keeps the last row of every key instead of all rows. Each checkpoint then rewrites every data file
    that holds one of its keys: that suits small tables, and keys that lie together."""
    keys: Sequence[str] = ()
    """The key columns of an upsert, by default the key of the step before."""
    partition_by: Sequence[str] = ()
    """The columns by whose values a table that the sink makes is partitioned. For other partitionings, such as days or
    buckets, make the table yourself: the sink writes into any."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of a table that the sink makes."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of the storage of the table's files, beside those of the job."""

    @property
    def place(self) -> str:
        """The name of the catalogue, and the table."""
        return f"iceberg:{catalogue_name(self.catalog)}/{self.table}"

    def bound(self, context: SinkContext) -> IcebergSink:
        """This sink with the key columns of its upserts."""
        what = f"IcebergSink({self.table!r})"
        where = f"job {context.job!r}: {what}"
        required("pyiceberg", "iceberg", what)
        parts = self.table.split(".")
        if len(parts) < 2 or not all(part.strip() for part in parts) or not self.table.isprintable():
            raise JobDefinitionError(f"{where}: give the table with its namespace, as in 'sales.visits'")
        if not catalogue_name(self.catalog):
            raise JobDefinitionError(f"{where}: the catalogue has no name")
        if not isinstance(self.catalog, str) and not ({"uri", "type", "py-catalog-impl"} & set(self.catalog)):
            raise ConfigError(f"{where}: catalog= needs at least the 'uri' of the catalogue, and its 'type'")
        names = context.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise JobDefinitionError(f"{where}: the column {twice!r} is there twice; rename one in a transform")
        try:
            table_columns(context.schema)
        except DoesNotFitError as error:
            raise JobDefinitionError(f"{where}: {error}; cast it in a transform") from error
        unknown = [name for name in self.partition_by if name not in names]
        if isinstance(self.partition_by, str) or unknown:
            raise JobDefinitionError(
                f"{where}: partition_by={self.partition_by!r}: give a list of columns; the rows have {names}"
            )
        nested = next((name for name in self.partition_by if pa.types.is_nested(context.schema.field(name).type)), None)
        if nested is not None:
            raise JobDefinitionError(
                f"{where}: partition_by={list(self.partition_by)}: {nested!r} is of type "
                f"{context.schema.field(nested).type}, by which Iceberg partitions no table; use one of a plain type"
            )
        keys = upsert_keys(what, self.mode, self.keys, context)
        check_plain_keys(what, keys, context)
        return replace(self, keys=keys)

    def _options(self, context: SinkContext) -> dict[str, str]:
        """The settings of the storage of the table's files."""
        return {**context.storage_options, **storage_options_of(self.catalog), **self.storage_options}

    def stager(self, context: SinkContext) -> Stager:
        """Writes data files into the table's folder; rows of upserts wait in the job's checkpoint folder."""
        if self.mode == "upsert":
            return ArrowStager.of(context, self.place)
        return DataFileStager.of(context, self.place, self._options(context))

    def target(self, context: SinkContext) -> SinkTarget:
        """Commits one snapshot per checkpoint."""
        return IcebergTarget(self, context, self._options(context))
