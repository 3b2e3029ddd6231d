"""The relay of real-time mode: runs as long as a batch of Spark's, and delivers its rows whenever the driver cuts.

Spark's thread only puts rows aside. A second thread asks the driver for the next cut when there are rows. If slots are
slow, more rows wait for the next cut. At `MOST_ROWS` or `MOST_BYTES`, Spark's thread waits, and the source is read no
further.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.delivery.deliveries import DeliveryExchange, by_subtask
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.liveness.silence import Silence
from strandline.runtime.protocol.coordinator_calls import CoordinatorClient
from strandline.runtime.protocol.cuts import Cut, CutOrder, ReadPart, RelayNews, Section
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.task.worker_memory import begin_task
from strandline.runtime.task.worker_socket import QuickAnswers

log = logging.getLogger(__name__)

FROM_COLUMN: Final = "__sl_from"
"""The stream, the partition and the topic that a row comes from, as one text."""
OFFSET_COLUMN: Final = "__sl_offset"
"""The offset of a row in its partition."""
TIME_COLUMN: Final = "__sl_time"
"""The event time of a row at its source, in microseconds."""
HIDDEN_COLUMNS: Final = (FROM_COLUMN, OFFSET_COLUMN, TIME_COLUMN)
"""What a row carries beside its columns until the relay has read it."""
FOLLOWER_COLUMN: Final = "__sl_follower"
"""Whether a row says nothing, and only comes so that Spark passes on the row before it."""
NO_ROWS: Final = "nothing boolean"
"""The columns of the rows that a relay returns: none ever."""

MOST_ROWS: Final = 100_000
"""So many rows wait for a cut at most."""
ASK_AGAIN: Final = 0.1
"""Seconds after which the driver is asked again, if it did not answer."""
FAILURE_PATIENCE: Final = 1.0
"""Seconds that Spark's thread gets to raise the failure of the other thread."""
MOST_BYTES: Final = 32 << 20
"""So many bytes of rows wait for a cut at most."""
MERGED_BATCHES: Final = 1024
"""So many small batches are made one while they wait: a batch of one row takes far more memory than its row."""


@dataclass(frozen=True, slots=True)
class StreamRelay:
    """What a relay knows from the plan."""

    operator: str
    connections: SlotConnections
    generation: int
    addresses: str
    """Names where the slots are; see `Cluster.addresses`."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        begin_task(task.taskAttemptId())
        with (
            StreamedPartition(self, task.partitionId(), task.taskAttemptId()) as partition,
            QuickAnswers() as to_jvm,
        ):
            for batch in batches:
                to_jvm.again()
                if FOLLOWER_COLUMN not in batch.schema.names:
                    partition.add(batch)
                    continue
                rows = batch.filter(pc.invert(batch.column(FOLLOWER_COLUMN)))
                if rows.num_rows:
                    partition.add(rows.drop_columns([FOLLOWER_COLUMN]))
            partition.finish()
        yield from ()


class StreamedPartition:
    """The rows of one partition, between Spark's thread and the thread that delivers them. A context."""

    def __init__(self, relay: StreamRelay, partition: int, attempt: int) -> None:
        self._relay = relay
        self._partition = partition
        self._attempt = attempt
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._waiting: list[pa.RecordBatch] = []
        self._small = 0
        """How many of the last batches that wait have not been made one."""
        self._rows = 0
        self._bytes = 0
        self._over = False
        """Whether Spark has no more rows for this task."""
        self._delivered = False
        """Whether the driver has taken the cut with the last rows."""
        self._failure: BaseException | None = None
        self._offsets: dict[str, int] = {}
        """The last offset of every part that was delivered."""
        self._exchanges: dict[int, SectionExchange] = {}
        self._open = ExitStack()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cuts")

    def __enter__(self) -> StreamedPartition:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._open.__exit__(*error)  # type: ignore[arg-type]  # what Python gives to every context

    # --- Spark's thread ----------------------------------------------------------------------------

    def add(self, batch: pa.RecordBatch) -> None:
        """Put rows aside; waits as long as too many wait already. Raises the failure of the other thread."""
        with self._changed:
            while self._failure is None and (self._rows >= MOST_ROWS or self._bytes >= MOST_BYTES):
                self._changed.wait()
            self._raise_failure()
            self._waiting.append(batch)
            self._small += 1
            if self._small >= MERGED_BATCHES:
                merged = pa.Table.from_batches(self._waiting[-self._small :]).combine_chunks().to_batches()
                self._waiting[-self._small :] = merged
                self._small = 0
            self._rows += batch.num_rows
            self._bytes += batch.nbytes
            self._changed.notify_all()

    def finish(self) -> None:
        """Return when the driver has taken the cut with the last rows. Raises the failure of the other thread."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while not self._delivered and self._failure is None:
                self._changed.wait()
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the thread that delivers --------------------------------------------------------------------

    def _run(self) -> None:
        driver: CoordinatorClient | None = None
        try:
            driver = self._relay.connections.driver(self._relay.generation)
            self._deliver(driver)
            with self._changed:
                self._delivered = True
                self._changed.notify_all()
        except BaseException as error:
            if self._closed.is_set():
                return  # Spark has ended the task, and the exchanges with it
            if isinstance(error, StrandlineError):
                log.info("a relay ends: %s", error)  # the driver is told, or it has ended before
            else:
                log.exception("a relay has failed")
            if driver is not None:
                self._tell(driver, error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            # Spark's thread may wait for rows for long, and not notice. Spark notices the end of a worker.
            if not self._closed.wait(FAILURE_PATIENCE):
                os._exit(1)
        finally:
            if driver is not None:
                driver.close()

    def _tell(self, driver: CoordinatorClient, error: BaseException) -> None:
        """Tell the driver why this relay ends."""
        if isinstance(error, SlotLostError):
            self._relay.connections.forget()
        try:
            driver.next_cut(RelayNews(self._name, None, has_rows=False, failure=Failure.of(error)))
        except StrandlineError as unheard:
            log.info("the driver was not told: %s", unheard)

    def _deliver(self, driver: CoordinatorClient) -> None:
        """Deliver rows until there are no more, or until Spark ends the task."""
        cut: Cut | None = None
        while True:
            with self._changed:
                while cut is None and not (self._waiting or self._over or self._closed.is_set()):
                    self._changed.wait()
                has_rows = bool(self._waiting)
                if self._closed.is_set() or (cut is None and not has_rows):
                    return
            order = self._ask(driver, RelayNews(self._name, cut, has_rows))
            cut = self._cut(order.batch, order.decided) if order.batch is not None else None

    def _ask(self, driver: CoordinatorClient, news: RelayNews) -> CutOrder:
        """What the driver says, which may hear the same news several times: it may be busy, or an answer gets lost."""
        silence = Silence()
        while True:
            try:
                return driver.next_cut(news)
            except SlotLostError:
                if silence.seconds() > self._relay.connections.heartbeat_timeout or self._closed.wait(ASK_AGAIN):
                    raise

    def _cut(self, batch: int, decided: int | None) -> Cut:
        """Send all rows that wait. The slots may get them later: an epoch waits for what it names."""
        with self._changed:
            taken, self._waiting = self._waiting, []
            self._rows = self._bytes = self._small = 0
            self._changed.notify_all()
        sent: dict[int, SectionExchange] = {}
        read: dict[tuple[int, str, int], ReadPart] = {}
        for rows in pa.Table.from_batches(taken).combine_chunks().to_batches():
            for part in self._read(rows):
                key = (part.stream, part.topic, part.partition)
                read[key] = merged(read[key], part) if key in read else part
            plain = rows.drop_columns(list(HIDDEN_COLUMNS))
            for subtask, some in by_subtask(plain):
                sent[subtask] = self._exchange(subtask, some.schema)
                sent[subtask].send(some)
        return Cut(batch, [exchange.end_section(batch, decided) for exchange in sent.values()], list(read.values()))

    def _read(self, rows: pa.RecordBatch) -> Iterator[ReadPart]:
        """What the rows show of each part of the source. Raises `StrandlineError` if they are out of order."""
        origins = rows.column(FROM_COLUMN).dictionary_encode()
        codes = origins.indices.to_numpy()
        offsets = rows.column(OFFSET_COLUMN).to_numpy()
        times = rows.column(TIME_COLUMN)
        for code, origin in enumerate(origins.dictionary.to_pylist()):
            mine = codes == code if len(origins.dictionary) > 1 else slice(None)
            some = offsets[mine]
            if some[0] <= self._offsets.get(origin, -1) or (np.diff(some) <= 0).any():
                raise StrandlineError(
                    f"step {self._relay.operator!r}: rows of {origin} are not in the order of their offsets: a "
                    "transform in front of the step has changed their order, and latency_mode='realtime' cannot follow"
                )
            self._offsets[origin] = int(some[-1])
            latest = pc.max(times if len(origins.dictionary) == 1 else times.filter(pa.array(mine))).as_py()
            stream, partition, topic = origin.split(" ", 2)
            latest_ms = None if latest is None else latest // 1000
            yield ReadPart(int(stream), topic, int(partition), int(some[0]), int(some[-1]) + 1, len(some), latest_ms)

    def _exchange(self, subtask: int, schema: pa.Schema) -> SectionExchange:
        known = self._exchanges.get(subtask)
        if known is None:
            relay = self._relay
            header = ExchangeHeader(
                relay.generation,
                0,
                0,
                relay.operator,
                subtask,
                self._attempt,
                BatchTime(0),
                exchange=uuid.uuid4().hex,
                partition=self._partition,
                goes_on=True,
            )
            client = relay.connections.slot(header, relay.addresses)
            pulse = partial(relay.connections.pulse, header, client.address)
            known = SectionExchange(header, schema, client, pulse)
            self._open.enter_context(known)
            self._exchanges[subtask] = known
        return known


class SectionExchange(DeliveryExchange):
    """A delivery that goes on: a section ends the rows of every cut."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                self._writer.close()  # an epoch has all rows that this relay has sent, and the slot may be gone
        super().__exit__(kind, *error)

    def end_section(self, batch: int, decided: int | None) -> Delivery:
        """The rows that were sent since the last section are those of the cut for `batch`."""
        header, section = self._header, Section(batch, self._rows, decided)
        assert header.partition is not None
        self._rows = 0
        with self._told():
            self._writer.write_metadata(msgspec.msgpack.encode(section))
        return Delivery(
            header.operator, header.subtask, header.partition, section.delivery_of(header.exchange), section.rows
        )


def merged(before: ReadPart, after: ReadPart) -> ReadPart:
    """What two tables of rows show of one part of the source."""
    times = [one.latest_ms for one in (before, after) if one.latest_ms is not None]
    return msgspec.structs.replace(
        after,
        first_offset=before.first_offset,
        rows=before.rows + after.rows,
        latest_ms=max(times, default=None),
    )
