"""Stages the rows of a sink in a Spark task, and returns manifest rows instead of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from strandline.checkpoint.metadata import SinkFile
from strandline.runtime.task.batch_properties import current_batch
from strandline.runtime.task.worker_memory import begin_task
from strandline.sinks.base import Stager

MANIFEST = "sink string, staged string, final string, rows long, size long, handle string"
"""The columns of a manifest row: the fields of a `SinkFile`."""
_COLUMNS = pa.schema(
    [
        ("sink", pa.string()),
        ("staged", pa.string()),
        ("final", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("handle", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class StageRows:
    """Runs in a Spark task: has the stager of a sink write the task's rows."""

    stager: Stager

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = current_batch()
        begin_task(task.attempt)
        files: list[SinkFile] = []
        if task.staging:
            files = list(self.stager.stage(batches, task.batch, task.partition))
        for _ in batches:
            pass  # Spark does not reuse a worker that left input unread
        if files:
            values = [[getattr(file, name) for file in files] for name in _COLUMNS.names]
            arrays = [pa.array(column, kind) for column, kind in zip(values, _COLUMNS.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS)
