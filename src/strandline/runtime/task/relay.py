"""The relay: carries the rows of a Spark task to the slot of its subtask, and the output rows back to Spark.

It sends all input before it reads output. The slot answers after the subtask is prepared, so every row that Spark sees
comes from a finished attempt.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.protocol.exchange import SEND_INPUT, ExchangeHeader
from strandline.runtime.protocol.failures import translate
from strandline.runtime.task.batch_properties import current_batch
from strandline.runtime.task.worker_memory import begin_task


@dataclass(frozen=True, slots=True)
class Relay:
    """What a relay knows from the plan; all that changes from batch to batch comes with the task."""

    operator: str
    connections: SlotConnections
    marked: bool
    """Whether every partition holds a marker row without a key group, so that the slot is called even without rows."""
    initial: bool = False
    """Whether the rows are the initial state of the operator, not those of a batch."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task(current_batch().attempt)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        header = self._header(first.column(SUBTASK_COLUMN)[0].as_py())
        if self.marked:
            batches = _without_marks(chain((first,), batches))
            first = next(batches)
        client = self.connections.slot(header, current_batch().addresses)
        try:
            writer, reader = client.exchange(msgspec.msgpack.encode(header))
            with writer, self.connections.pulse(header, client.address, reader.cancel):
                yield from _exchange(writer, reader, first, batches)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self.connections.forget()
            raise translate(error, f"slot {header.subtask}, operator {header.operator}") from error

    def _header(self, subtask: int) -> ExchangeHeader:
        task = current_batch()
        return ExchangeHeader(
            task.generation,
            task.batch,
            task.round,
            self.operator,
            subtask,
            task.attempt,
            task.time,
            self.initial,
            uuid.uuid4().hex,
        )


def _without_marks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        groups = batch.column(KEY_GROUP_COLUMN)
        yield batch.filter(pc.is_valid(groups)) if groups.null_count else batch


def _send(writer: Any, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> None:
    rows = 0
    batch: pa.RecordBatch | None = first
    while batch is not None:
        if batch.num_rows:
            rows += batch.num_rows
            writer.write_batch(batch.drop_columns([SUBTASK_COLUMN]))
        batch = next(rest, None)
    writer.write_metadata(str(rows).encode())
    writer.done_writing()


def _exchange(
    writer: Any, reader: Any, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    schema = first.schema.remove(first.schema.get_field_index(SUBTASK_COLUMN))
    writer.begin(schema)
    if reader.read_chunk().app_metadata.to_pybytes() == SEND_INPUT:
        try:
            _send(writer, first, rest)
        except OSError:
            reader.read_chunk()  # raises the slot's error
            raise
        reader.read_chunk()
    for chunk in reader:
        if chunk.data is not None:
            yield chunk.data
    for _ in rest:
        pass  # Spark does not reuse a worker that left input unread, and a new worker takes a second to start
