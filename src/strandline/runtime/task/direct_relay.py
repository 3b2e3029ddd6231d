"""The relay of a plan without Spark's shuffle: delivers the rows of a partition to the slots of all subtasks.

The relay does not wait for output. It returns one row for each slot that got rows. Spark gives the driver the rows of
one attempt of every task, so the driver knows which deliveries count, and has the slots prepare the batch with them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa

from strandline.errors import SlotLostError
from strandline.operators.combining import JUDGED_ROWS, Combiner, Combining
from strandline.runtime.delivery.deliveries import DeliveryExchange, deliver
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader
from strandline.runtime.task.batch_properties import TaskBatch, current_batch
from strandline.runtime.task.worker_memory import begin_task

GATHERED_ROWS = 1 << 16
"""Rows that are combined together, if they are not too large."""
GATHERED_BYTES = 64 << 20
"""Rows that take so many bytes are not gathered further: a worker has little memory, and an Arrow column of texts holds
less than 2 GiB."""
DELIVERED = "operator string, subtask int, partition int, exchange string, rows long"
"""The columns of the rows that a relay returns: the fields of a `Delivery`."""
_COLUMNS = pa.schema(
    [
        ("operator", pa.string()),
        ("subtask", pa.int32()),
        ("partition", pa.int32()),
        ("exchange", pa.string()),
        ("rows", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class DirectRelay:
    """What a relay knows from the plan; all that changes from batch to batch comes with the task."""

    operator: str
    connections: SlotConnections
    combiner: Combiner | None = None
    """Makes one row of many of the same key before they are sent; None if the step needs every row."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = current_batch()
        begin_task(task.attempt)
        try:
            delivered = self._deliver(task, batches)
        except SlotLostError:
            self.connections.forget()
            raise
        if delivered:
            values = zip(*map(msgspec.structs.astuple, delivered), strict=True)
            arrays = [pa.array(list(column), kind) for column, kind in zip(values, _COLUMNS.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS)

    def _deliver(self, task: TaskBatch, batches: Iterator[pa.RecordBatch]) -> list[Delivery]:
        combining = Combining(self.combiner, task.time.of(self.operator).late_watermark_ms)
        return deliver(combined(batches, combining), partial(self._begin, task))

    def _begin(self, task: TaskBatch, subtask: int, schema: pa.Schema) -> DeliveryExchange:
        header = ExchangeHeader(
            task.generation,
            task.batch,
            task.round,
            self.operator,
            subtask,
            task.attempt,
            task.time,
            exchange=uuid.uuid4().hex,
            partition=task.partition,
        )
        return self.connections.delivery(header, schema, task.addresses)


def combined(batches: Iterator[pa.RecordBatch], combining: Combining) -> Iterator[pa.RecordBatch]:
    """The rows, combined as long as that pays. Many are gathered first, because few rows have few equal keys."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not combining.pays:
            yield batch
            continue
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= GATHERED_ROWS or size >= GATHERED_BYTES:
            yield from _together(held, combining)
            held, rows, size = [], 0, 0
    if rows < JUDGED_ROWS:
        yield from held
    else:
        yield from _together(held, combining)


def _together(held: list[pa.RecordBatch], combining: Combining) -> Iterator[pa.RecordBatch]:
    made = combining(pa.Table.from_batches(held))
    for table in (made.combined, made.raw):
        if table is not None:
            yield from table.combine_chunks().to_batches()
