"""Rows that were delivered to one operator of a slot, and that the driver has not named yet.

A relay delivers rows before anybody knows whether they count: its task may be one that Spark repeats. So the inbox
keeps the rows of every exchange apart, until `SlotCalls.prepare` names the exchanges of a round.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from strandline.errors import StaleAttemptError
from strandline.runtime.delivery.deliveries import RowsForSlot
from strandline.runtime.protocol.cuts import Section
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader
from strandline.runtime.slot.kept_rows import KeptRows, MemoryLimit

BatchAndRound = tuple[int, int]


class Inbox:
    """The delivered rows of the batches that are under way. Safe to use from several threads."""

    def __init__(self, spill: Path, memory_limit: int) -> None:
        """Rows beyond `memory_limit` bytes go to files in the folder `spill`."""
        self._spill = spill
        self._memory = MemoryLimit(memory_limit)
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[BatchAndRound, KeptRows]] = {}
        self._floor: BatchAndRound = (-(1 << 62), 0)
        """Deliveries for an earlier round are void."""

    def receive(self, header: ExchangeHeader, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        """Keep the rows of an exchange. Raises `StaleAttemptError` if its round is over."""
        with self.delivery(header, schema) as delivery:
            for batch in batches:
                delivery.send(batch)
            delivery.finish()

    def delivery(self, header: ExchangeHeader, schema: pa.Schema) -> InboxDelivery:
        """Takes rows for this inbox, piece by piece."""
        rows = KeptRows(schema, self._memory, self._spill / f"input-{header.exchange}.arrow")
        return InboxDelivery(self, header, rows)

    def receive_sections(
        self,
        header: ExchangeHeader,
        schema: pa.Schema,
        messages: Iterator[pa.RecordBatch | Section],
        confirm: Callable[[], None],
    ) -> None:
        """Keep the rows of an exchange that goes on. A `Section` among `messages` ends the rows of one cut.

        Calls `confirm` once a section is kept. Raises `StaleAttemptError` if the batch of a section is over.
        """
        rows = self._section(schema)
        try:
            for message in messages:
                if not isinstance(message, Section):
                    rows.append(message)
                    continue
                if message.rows != rows.rows:
                    raise StaleAttemptError(f"the relay sent {message.rows} rows, {rows.rows} arrived")
                rows.seal()
                self._keep(header, message.exchange, (message.batch, 0), rows)
                rows = self._section(schema)
                confirm()
        finally:
            rows.discard()

    def check(self, header: ExchangeHeader) -> None:
        """Raises `StaleAttemptError` if the round of an exchange is over."""
        self._check(header, (header.batch, header.round))

    def keep(self, header: ExchangeHeader, rows: KeptRows) -> None:
        """Take all rows of an exchange. Raises `StaleAttemptError` if its round is over."""
        self._keep(header, header.exchange, (header.batch, header.round), rows)

    def _section(self, schema: pa.Schema) -> KeptRows:
        return KeptRows(schema, self._memory, self._spill / f"input-{uuid.uuid4().hex}.arrow")

    def _keep(self, header: ExchangeHeader, exchange: str, of: BatchAndRound, rows: KeptRows) -> None:
        with self._lock:
            self._check(header, of)
            self._kept[exchange] = (of, rows)

    def rows(self, deliveries: Sequence[Delivery]) -> list[KeptRows]:
        """The rows of these deliveries, in their order. Raises `StaleAttemptError` if one of them is not here."""
        with self._lock:
            found = []
            for one in deliveries:
                _of, rows = self._kept.get(one.exchange, (None, None))
                if rows is None or rows.rows != one.rows:
                    raise StaleAttemptError(
                        f"operator {one.operator}, subtask {one.subtask}: the {one.rows} rows of partition "
                        f"{one.partition} are not in the slot any more"
                    )
                found.append(rows)
            return found

    def drop(self, before: BatchAndRound) -> None:
        """Let go of what was delivered for earlier rounds, and refuse what arrives for them from now on."""
        with self._lock:
            self._floor = max(self._floor, before)
            over = [exchange for exchange, (of, _rows) in self._kept.items() if of < before]
            dropped = [self._kept.pop(exchange)[1] for exchange in over]
        for rows in dropped:
            rows.discard()

    def _check(self, header: ExchangeHeader, of: BatchAndRound) -> None:
        if of < self._floor:
            raise StaleAttemptError(
                f"operator {header.operator}, subtask {header.subtask}: batch {of[0]}, round {of[1]} is over"
            )


class InboxDelivery(RowsForSlot):
    """The rows of one exchange on their way into an inbox."""

    def __init__(self, inbox: Inbox, header: ExchangeHeader, rows: KeptRows) -> None:
        self._inbox = inbox
        self._header = header
        self._rows = rows

    def __enter__(self) -> InboxDelivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            self._rows.discard()

    def send(self, rows: pa.RecordBatch) -> None:
        self._inbox.check(self._header)
        self._rows.append(rows)

    def finish(self) -> None:
        self._rows.seal()
        self._inbox.keep(self._header, self._rows)

    def delivered(self) -> Delivery:
        header = self._header
        assert header.partition is not None
        return Delivery(header.operator, header.subtask, header.partition, header.exchange, self._rows.rows)
