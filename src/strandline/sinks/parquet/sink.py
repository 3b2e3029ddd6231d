"""`ParquetSink`: what a user writes into a job to get a folder of Parquet files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from strandline.errors import JobDefinitionError
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.parquet.stager import ParquetStager
from strandline.sinks.parquet.target import ParquetTarget
from strandline.storage import is_local, open_storage

VERSION_COLUMNS = ("_batch", "_position")
"""The columns that `ParquetSink.version_columns` adds to every row."""


@dataclass(frozen=True, slots=True)
class ParquetSink(ExactlyOnceSink):
    """Writes rows exactly once into a folder of Parquet files that any reader can read.

    Rows become visible when the checkpoint that covers them completes: never earlier, and never twice.
    """

    path: str
    """A local folder, or a URL: `s3://`, `gs://`, `az://` or `hdfs://`. The folder must be empty or hold earlier output
    of this job, and no other job may write there; else `Job.start` raises `DirectoryNotOursError`."""
    compression: Literal["snappy", "zstd", "lz4", "gzip", "none"] = "snappy"
    """The compression inside the Parquet files."""
    version_columns: bool = False
    """Adds the columns `_batch` and `_position` (both `long`) to every row, so that a reader can tell which row of a
    key is the newest: the one with the greatest `_batch`, and among those the greatest `_position`. The rows of one key
    come from one subtask, and their positions have the order in which the step emitted them."""

    @property
    def place(self) -> str:
        """The folder."""
        return self.path

    @property
    def added_columns(self) -> tuple[str, ...]:
        """The columns that the files have and the stream has not."""
        return VERSION_COLUMNS if self.version_columns else ()

    def bound(self, context: SinkContext) -> ParquetSink:
        """This sink with the one name of its folder that the driver, every task and the next start know."""
        place = open_storage(self.path, context.storage_options)  # contacts nobody
        path = os.path.abspath(place.url) if is_local(self.path) else place.url
        taken = set(self.added_columns) & set(context.schema.names)
        if taken:
            raise JobDefinitionError(
                f"job {context.job!r}: version_columns=True would add a second column {min(taken)!r} to the "
                f"rows in {path!r}; rename that of the stream in a transform"
            )
        return replace(self, path=path)

    def stager(self, context: SinkContext) -> Stager:
        """Writes Parquet files into the folder, under names that readers skip."""
        return ParquetStager(
            context.job, self.path, dict(context.storage_options), self.compression, self.added_columns
        )

    def target(self, context: SinkContext) -> SinkTarget:
        """Gives files their final names."""
        storage = open_storage(self.path, dict(context.storage_options), private=False)
        columns = [pa.field(name, pa.int64()) for name in self.added_columns]
        return ParquetTarget(storage, self.path, context.job, pa.schema([*context.schema, *columns]))
