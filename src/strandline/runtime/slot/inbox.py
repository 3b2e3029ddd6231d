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

from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.runtime.delivery.deliveries import RowsForSlot
from strandline.runtime.protocol.cuts import Section, exchange_of
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
        self._arrived = threading.Condition(self._lock)
        self._kept: dict[str, tuple[BatchAndRound, KeptRows]] = {}
        self._broken: dict[str, BaseException] = {}
        """The errors of exchanges that went on, by name. Each ends a generation, and the slot with it."""
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
        decided: Callable[[int], None],
    ) -> None:
        """Keep the rows of an exchange that goes on. A `Section` among `messages` ends the rows of one cut.

        `decided` is called with the epochs that sections call decided. Raises `StaleAttemptError` if the batch of a
        section is over.
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
                self._keep(header, message.delivery_of(header.exchange), (message.batch, 0), rows)
                rows = self._section(schema)
                if message.decided is not None:
                    decided(message.decided)
        except BaseException as error:
            with self._arrived:  # whoever waits for a section of this exchange waits in vain
                self._broken[header.exchange] = error
                self._arrived.notify_all()
            raise
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
        with self._arrived:
            self._check(header, of)
            self._kept[exchange] = (of, rows)
            self._arrived.notify_all()

    def rows(self, deliveries: Sequence[Delivery], patience: float = 0.0) -> list[KeptRows]:
        """The rows of these deliveries, in their order, once they are all here.

        Raises `StaleAttemptError` if one of them is not here after `patience` seconds, and the error of the exchange
        that would have brought it.
        """
        with self._arrived:
            if patience:
                self._arrived.wait_for(lambda: self._complete(deliveries), patience)
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

    def _complete(self, deliveries: Sequence[Delivery]) -> bool:
        missing = [one.exchange for one in deliveries if one.exchange not in self._kept]
        for name in missing:
            error = self._broken.get(exchange_of(name))
            if error is not None:
                raise error if isinstance(error, StrandlineError) else SlotLostError(f"a relay is lost: {error}")
        return not missing

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
