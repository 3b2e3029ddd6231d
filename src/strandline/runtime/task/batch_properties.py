"""The local properties of Spark by which the batch function tells its tasks for which batch they work."""

from __future__ import annotations

from typing import NamedTuple

from strandline.decoding import json_decoder
from strandline.errors import StrandlineError
from strandline.runtime.protocol.messages import BatchTime

GENERATION = "strandline.generation"
BATCH = "strandline.batch"
ROUND = "strandline.round"
ADDRESSES = "strandline.addresses"
"""Names where the slots are; see `Cluster.addresses`."""
TIME = "strandline.time"
STAGING = "strandline.staging"
"""Whether the action stages the rows of Parquet sinks. In other actions the same tasks write no files."""


class TaskBatch(NamedTuple):
    """The batch that a Spark task works for."""

    generation: int
    batch: int
    round: int
    addresses: str
    staging: bool
    time: BatchTime
    attempt: int
    partition: int


PROPERTIES = (GENERATION, BATCH, ROUND, ADDRESSES, STAGING, TIME)


def current_batch() -> TaskBatch:
    """Read from the task's local properties, which the batch function sets before each action."""
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    values = [task.getLocalProperty(name) for name in PROPERTIES]
    if any(value is None for value in values):
        raise StrandlineError("rows of a Strandline job can only be evaluated inside its batch function")
    generation, batch, round_, addresses, staging, time = (str(value) for value in values)
    return TaskBatch(
        int(generation),
        int(batch),
        int(round_),
        addresses,
        staging == str(True),
        json_decoder(BatchTime).decode(time),
        task.taskAttemptId(),
        task.partitionId(),
    )
