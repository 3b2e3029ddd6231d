"""The output rows of one prepared batch, kept until the batch commits: every evaluation gets the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from strandline.state.disk_full import disk_full_error


class BatchOutput:
    """Keeps output batches in memory up to `memory_limit` bytes and in a local file beyond."""

    def __init__(self, schema: pa.Schema, memory_limit: int, path: Path) -> None:
        self.schema = schema
        self.rows = 0
        self._limit = memory_limit
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._path = path
        self._spill: Any = None

    def append(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        if self._spill is None and self._held_bytes + batch.nbytes <= self._limit:
            self._held.append(batch)
            self._held_bytes += batch.nbytes
            return
        with disk_full_error(self._path.parent):
            if self._spill is None:
                self._spill = pa.ipc.new_stream(str(self._path), self.schema)
            self._spill.write_batch(batch)

    def seal(self) -> None:
        """Close the file: no more batches are appended."""
        if self._spill is not None:
            with disk_full_error(self._path.parent):
                self._spill.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All batches, in the order in which they were appended. May be called any number of times."""
        yield from self._held
        if self._spill is not None:
            with pa.memory_map(str(self._path)) as source:
                yield from pa.ipc.open_stream(source)

    def discard(self) -> None:
        self.seal()
        self._held = []
        self._path.unlink(missing_ok=True)
