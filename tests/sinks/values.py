"""Tables with any columns, staged as a task stages them."""

from __future__ import annotations

import pyarrow as pa

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.sinks.marked import MarkedTarget
from strandline.testing.sink import SinkDriver


def stage_table(driver: SinkDriver, table: pa.Table, rows: int = 100_000) -> None:
    """One batch with the rows of a table."""
    driver.batches += 1
    stager = driver.job.sink.stager(driver.job.context)
    driver.staged += stager.stage(iter(table.to_batches(max_chunksize=rows)), driver.batch, 0)


def check_staged(driver: SinkDriver, metadata: CheckpointMetadata) -> None:
    """All rows that the checkpoint covers are still there to be published."""
    assert isinstance(driver.target, MarkedTarget)
    assert metadata.sink_files
    assert driver.target.staging.missing(metadata.sink_files) is None
