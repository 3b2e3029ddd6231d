"""Writes the rows of a `ParquetSink` to staged files that readers of the folder skip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.checkpoint.metadata import SinkFile
from strandline.sinks.base import Stager
from strandline.sinks.staging import LocalRows, stage_files
from strandline.storage import open_storage

_PARTITION_SHIFT = 40
"""A position is the number of the subtask or task, then that of the row in it: no two rows of a batch share one."""


@dataclass(frozen=True, slots=True)
class ParquetStager(Stager):
    """Writes the rows of a subtask, or of a task, to one staged file."""

    job: str
    sink: str
    options: dict[str, str] = field(repr=False)
    compression: str
    version_columns: tuple[str, ...] = ()
    """The names of the columns for the batch and the position of a row, if rows have them."""

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        if self.version_columns:
            batches = _with_versions(batches, self.version_columns, batch, partition)
        first = next((some for some in batches if some.num_rows), None)
        if first is None:
            return
        storage = open_storage(self.sink, self.options, private=False)
        yield from stage_files(storage, self.job, self.sink, batch, partial(self._write, first, batches))

    def _write(self, first: pa.RecordBatch, others: Iterator[pa.RecordBatch], folder: Path) -> Iterator[LocalRows]:
        local = folder / "rows.parquet"
        rows = 0
        with pq.ParquetWriter(local, first.schema, compression=self.compression) as out:
            for some in chain([first], others):
                rows += some.num_rows
                out.write_batch(some)
        yield LocalRows(local, rows)


def _with_versions(
    batches: Iterator[pa.RecordBatch], names: tuple[str, ...], batch_id: int, partition: int
) -> Iterator[pa.RecordBatch]:
    position = partition << _PARTITION_SHIFT
    for batch in batches:
        ids = pa.repeat(pa.scalar(batch_id, pa.int64()), batch.num_rows)
        positions = pa.array(range(position, position + batch.num_rows), pa.int64())
        schema = pa.schema([*batch.schema, *(pa.field(name, pa.int64()) for name in names)])
        yield pa.RecordBatch.from_arrays([*batch.columns, ids, positions], schema=schema)
        position += batch.num_rows
