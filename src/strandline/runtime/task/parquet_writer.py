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


@dataclass(frozen=True, slots=True)
class ParquetWriter:
    """Runs in a Spark task: writes the task's rows to one staged file, and returns a manifest row instead of them."""

    job: str
    sink: str
    options: dict[str, str] = field(repr=False)
    compression: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = current_batch()
        if not task.staging:
            for _ in batches:
                pass  # Spark does not reuse a worker that left input unread
            return
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
