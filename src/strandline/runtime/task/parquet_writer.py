"""Writes the rows of a `ParquetSink` inside Spark's tasks, to staged files that readers of the folder skip."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.runtime.protocol.sink_names import new_final_name, staged_name
from strandline.runtime.task.batch_properties import current_batch
from strandline.state.disk_full import disk_full_error
from strandline.storage import open_storage

MANIFEST = "sink string, staged string, final string, rows long, size long"
_MANIFEST_ARROW = pa.schema(
    [("sink", pa.string()), ("staged", pa.string()), ("final", pa.string()), ("rows", pa.int64()), ("size", pa.int64())]
)


_PARTITION_SHIFT = 40
"""A position is the number of the task's partition, then that of the row in it: no two rows of a batch share one."""


@dataclass(frozen=True, slots=True)
class ParquetWriter:
    """Runs in a Spark task: writes the task's rows to one staged file, and returns a manifest row instead of them."""

    job: str
    sink: str
    options: dict[str, str] = field(repr=False)
    compression: str
    version_columns: tuple[str, ...] = ()
    """The names of the columns for the batch and the position of a row, if rows have them."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = current_batch()
        if not task.staging:
            for _ in batches:
                pass  # Spark does not reuse a worker that left input unread
            return
        if self.version_columns:
            batches = _with_versions(batches, self.version_columns, task.batch, task.partition)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        final = new_final_name(self.job, task.batch)
        staged = staged_name(final)
        with tempfile.TemporaryDirectory(prefix="strandline-sink-") as folder:
            local = Path(folder) / "rows.parquet"
            rows = 0
            with (
                disk_full_error(Path(folder)),
                pq.ParquetWriter(local, first.schema, compression=self.compression) as out,
            ):
                batch: pa.RecordBatch | None = first
                while batch is not None:
                    rows += batch.num_rows
                    out.write_batch(batch)
                    batch = next(batches, None)
            size = local.stat().st_size
            open_storage(self.sink, self.options, private=False).upload(local, staged)
        yield pa.RecordBatch.from_pylist(
            [{"sink": self.sink, "staged": staged, "final": final, "rows": rows, "size": size}], _MANIFEST_ARROW
        )


def version_fields(names: tuple[str, ...]) -> list[pa.Field]:
    """The columns that hold the batch and the position of a row."""
    return [pa.field(name, pa.int64()) for name in names]


def _with_versions(
    batches: Iterator[pa.RecordBatch], names: tuple[str, ...], batch_id: int, partition: int
) -> Iterator[pa.RecordBatch]:
    position = partition << _PARTITION_SHIFT
    for batch in batches:
        ids = pa.repeat(pa.scalar(batch_id, pa.int64()), batch.num_rows)
        positions = pa.array(range(position, position + batch.num_rows), pa.int64())
        schema = pa.schema([*batch.schema, *version_fields(names)])
        yield pa.RecordBatch.from_arrays([*batch.columns, ids, positions], schema=schema)
        position += batch.num_rows
