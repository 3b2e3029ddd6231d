"""`DeltaSink`: rows in a Delta table, exactly once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from strandline.errors import ConfigError, JobDefinitionError
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.delta.columns import check_names, is_partition_type, stored_schema
from strandline.sinks.delta.stager import DeltaStager
from strandline.sinks.extras import required
from strandline.sinks.staging import ArrowStager
from strandline.sinks.upserts import Mode, check_plain_keys, upsert_keys
from strandline.storage import is_local, open_storage
from strandline.storage.object_store import SCHEMES

_REFUSED = "%[\\]^|"
"""delta-rs decodes or encodes these characters of a path once too often."""


@dataclass(frozen=True, slots=True)
class DeltaSink(ExactlyOnceSink):
    """Writes rows exactly once into a Delta table, without Spark's jar for Delta.

    The rows of a checkpoint become visible as one version of the table, which is made if it does not exist. Others may
    write into the table, too. Needs `pip install "strandline[delta]"` on the driver's host.
    """

    path: str
    """The folder of the table: a local one, or a URL: `s3://`, `gs://` or `az://`. Credentials are those of
    `Config.storage_options` or of the environment."""
    mode: Mode = "append"
    """`"upsert"` keeps the last row of every key instead of all rows: a merge into the table for every checkpoint."""
    keys: Sequence[str] = ()
    """The key columns of an upsert, by default the key of the step before."""
    partition_by: Sequence[str] = ()
    """The columns by which the table is partitioned: strings, whole numbers, booleans or dates. Delta takes an empty
    string in such a column for null."""
    compression: Literal["snappy", "zstd", "lz4", "gzip", "none"] = "snappy"
    """The compression inside the Parquet files of `mode="append"`."""

    @property
    def place(self) -> str:
        """The folder of the table."""
        return f"delta:{self.path}"

    def bound(self, context: SinkContext) -> DeltaSink:
        """This sink with the one name of its folder, and with the key columns of its upserts."""
        what = f"DeltaSink({self.path!r})"
        where = f"job {context.job!r}: {what}"
        required("deltalake", "delta", "DeltaSink")
        place = open_storage(self.path, context.storage_options)  # contacts nobody
        if not is_local(self.path) and not self.path.lower().startswith(tuple(f"{name}://" for name in SCHEMES)):
            raise ConfigError(f"{where}: a Delta table is local, or in s3://, gs:// or az://")
        path = os.path.abspath(place.url) if is_local(self.path) else place.url
        if set(_REFUSED) & set(path):
            raise ConfigError(
                f"{where}: delta-rs does not find tables whose path has one of {_REFUSED} in it; choose another folder"
            )
        check_names(where, context.schema)
        stored = stored_schema(where, context.schema)
        keys = upsert_keys(what, self.mode, self.keys, context)
        check_plain_keys(what, keys, context)
        return replace(self, path=path, keys=keys, partition_by=self._partition_columns(where, stored))

    def _partition_columns(self, where: str, schema: pa.Schema) -> tuple[str, ...]:
        if isinstance(self.partition_by, str):
            raise JobDefinitionError(f"{where}: give a list of columns: partition_by=[{self.partition_by!r}]")
        columns = tuple(self.partition_by)
        for name in columns:
            if name not in schema.names or columns.count(name) > 1:
                raise JobDefinitionError(
                    f"{where}: partition_by={list(columns)}: {name!r} is no column, or is there twice; the rows have "
                    f"{schema.names}"
                )
            if not is_partition_type(schema.field(name).type):
                raise JobDefinitionError(
                    f"{where}: partition_by={list(columns)}: {name!r} is of type {schema.field(name).type}; partition "
                    "by strings, whole numbers, booleans or dates. Make such a column in a transform"
                )
        if columns and len(columns) == len(schema.names):
            raise JobDefinitionError(f"{where}: partition_by has all columns, so that none is left for the files")
        return columns

    def stager(self, context: SinkContext) -> Stager:
        """Appended rows are staged as files of the table; upserts wait in the job's checkpoint folder."""
        if self.mode == "upsert":
            return ArrowStager.of(context, self.place)
        options = {} if is_local(self.path) else dict(context.storage_options)
        schema = stored_schema(f"job {context.job!r}", context.schema)
        return DeltaStager(
            context.job, self.place, self.path, options, schema, tuple(self.partition_by), self.compression
        )

    def target(self, context: SinkContext) -> SinkTarget:
        """Writes the rows of a checkpoint in one commit of the table."""
        from strandline.sinks.delta.target import DeltaTarget  # loads delta-rs, which tasks do not need

        return DeltaTarget(self, context)
