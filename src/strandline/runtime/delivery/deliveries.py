"""The delivery of rows to the slots of a step: each row goes to the slot of its subtask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from strandline.operators.base import SUBTASK_COLUMN
from strandline.operators.combining import ROWS_COLUMN
from strandline.runtime.protocol.exchange import RECEIVED, Delivery, ExchangeHeader
from strandline.runtime.protocol.failures import translate
from strandline.runtime.protocol.slot_calls import SlotClient


class RowsForSlot(AbstractContextManager["RowsForSlot"], Protocol):
    """Takes the rows for one slot. A context: left by an error, the delivery is given up."""

    def send(self, rows: pa.RecordBatch) -> None:
        """Send some rows."""

    def finish(self) -> None:
        """Say that there are no more."""

    def delivered(self) -> Delivery:
        """Wait until the slot has all rows."""


def deliver(batches: Iterator[pa.RecordBatch], begin: Callable[[int, pa.Schema], RowsForSlot]) -> list[Delivery]:
    """Deliver rows that have a `SUBTASK_COLUMN`; the slots have them when this returns.

    `begin` starts the delivery to a subtask. Combined rows have another schema than raw ones, and all rows of a
    delivery have one: so a subtask may get two deliveries.
    """
    with ExitStack() as open_exchanges:
        exchanges: dict[tuple[int, bool], RowsForSlot] = {}
        for batch in batches:
            for subtask, rows in by_subtask(batch):
                at = (subtask, ROWS_COLUMN in rows.schema.names)
                if at not in exchanges:
                    exchanges[at] = open_exchanges.enter_context(begin(subtask, rows.schema))
                exchanges[at].send(rows)
        # All slots hear that their rows are complete before anybody waits for the first.
        for exchange in exchanges.values():
            exchange.finish()
        return [exchange.delivered() for exchange in exchanges.values()]


class DeliveryExchange:
    """The delivery of one partition's rows to one slot. A context: left by an error, the delivery is given up."""

    def __init__(
        self,
        header: ExchangeHeader,
        schema: pa.Schema,
        client: SlotClient,
        pulse: Callable[[Callable[[], None]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`pulse` gives signs of life, and calls what it is given if the slot does not answer them."""
        self._header = header
        self._client = client
        self._schema = schema
        self._pulse = pulse
        self._rows = 0
        self._writer: Any = None
        self._reader: Any = None
        self._inside = ExitStack()

    def __enter__(self) -> DeliveryExchange:
        with self._told():
            self._writer, self._reader = self._client.exchange(msgspec.msgpack.encode(self._header))
            try:
                self._writer.begin(self._schema)
            except BaseException:
                self._reader.cancel()
                raise
        self._inside.enter_context(self._pulse(self._reader.cancel))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._inside.close()
        if kind is not None:
            self._reader.cancel()

    def send(self, rows: pa.RecordBatch) -> None:
        """Send some rows. Raises the slot's error if it gave one."""
        with self._told():
            self._writer.write_batch(rows)
        self._rows += rows.num_rows

    def finish(self) -> None:
        """Say how many rows there were."""
        with self._told():
            self._writer.write_metadata(str(self._rows).encode())
            self._writer.done_writing()

    def delivered(self) -> Delivery:
        """Wait until the slot has all rows."""
        self._await_confirmation()
        with self._told():
            self._writer.close()
        header = self._header
        assert header.partition is not None
        return Delivery(header.operator, header.subtask, header.partition, header.exchange, self._rows)

    def _await_confirmation(self) -> None:
        with self._told():
            answer = self._reader.read_chunk().app_metadata
            if answer is None or answer.to_pybytes() != RECEIVED:
                raise OSError("the slot did not confirm the rows")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns an error of the connection into the slot's own error, if the slot gave one."""
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError, StopIteration) as error:
            cause: Exception = error
            if isinstance(error, OSError) and self._reader is not None:
                try:
                    self._reader.read_chunk()  # a broken connection only says that it is broken
                except (flight.FlightError, pa.ArrowException, OSError) as told:
                    cause = told
                except StopIteration:
                    pass
            where = f"slot {self._header.subtask}, operator {self._header.operator}"
            raise translate(cause, where) from error


def by_subtask(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each subtask, without the column that names it. Rows keep their order."""
    if not batch.num_rows:
        return
    at = batch.schema.get_field_index(SUBTASK_COLUMN)
    subtasks = batch.column(at).to_numpy(zero_copy_only=False)
    rows = batch.remove_column(at)
    first = int(subtasks[0])
    if (subtasks == first).all():
        yield first, rows
        return
    order = np.argsort(subtasks, kind="stable")
    gathered = rows.take(pa.array(order))
    ordered = subtasks[order]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ordered)) + 1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True):
        yield int(ordered[start]), gathered.slice(start, end - start)
