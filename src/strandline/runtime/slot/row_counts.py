"""Counts the rows of a subtask: all of them, and those of each key group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.combined_rows import rows_per_row
from strandline.runtime.protocol.slot_calls import RowCounts
from strandline.runtime.slot.work_clock import WorkClock


class CountedRows(Iterator[pa.RecordBatch]):
    """Batches of rows, counted as they are read. The time in which the reader waits for them is no work.

    A combined row counts for the rows that it stands for, and with its own bytes.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], key_groups: range, work: WorkClock) -> None:
        """The reader works by the clock `work`; all rows belong to one of the `key_groups`."""
        self.rows = 0
        self.bytes = 0
        self.of_groups = np.zeros(len(key_groups), np.int64)
        self._batches = batches
        self._groups = key_groups
        self._work = work

    def __next__(self) -> pa.RecordBatch:
        self._work.end()
        try:
            batch = next(self._batches)
        finally:
            self._work.begin()
        stands_for = rows_per_row(batch)
        self.rows += batch.num_rows if stands_for is None else int(stands_for.sum())
        self.bytes += batch.nbytes
        at = batch.schema.get_field_index(KEY_GROUP_COLUMN)
        if at >= 0 and batch.num_rows:
            numbers = batch.column(at).to_numpy(zero_copy_only=False)
            counts = np.bincount(numbers, stands_for, self._groups.stop).astype(np.int64)
            self.of_groups += counts[self._groups.start : self._groups.stop]
        return batch


class CommittedRows:
    """The rows of all batches that a subtask has committed since its slot started."""

    def __init__(self, key_groups: range) -> None:
        self.counts = RowCounts()
        self.of_groups = np.zeros(len(key_groups), np.int64)

    def add(self, counts: RowCounts, of_groups: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Add the rows of a batch."""
        self.counts = self.counts.plus(counts)
        self.of_groups += of_groups
