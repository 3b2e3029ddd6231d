"""The slot: the process of one subtask. It runs user code and holds its keyed state, from batch to batch.

A slot answers an exchange after it has read all input rows and sealed the changes: the subtask is then prepared,
and its output is kept until the batch commits. Whoever asks again for the same batch gets the same rows.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # what is loaded below stays: `set_up_process` switches the collector on again

import logging
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from strandline.checkpoint.batch import is_of
from strandline.decoding import msgpack_decoder
from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.logs import formatter, log_context
from strandline.operators.base import Operator, SubtaskInfo
from strandline.runtime.delivery.deliveries import RowsForSlot
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.liveness.threads import thread_error
from strandline.runtime.protocol.address import listen_on
from strandline.runtime.protocol.calls import NOTHING, Nothing
from strandline.runtime.protocol.cuts import Section
from strandline.runtime.protocol.exchange import OUTPUT_FOLLOWS, RECEIVED, SEND_INPUT, Delivery, ExchangeHeader
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.folders import operator_folder, socket_folder
from strandline.runtime.protocol.logs import log_file, log_folder, open_log, slot_log
from strandline.runtime.protocol.messages import (
    BackendSettings,
    FeedSpec,
    OperatorSpec,
    Rebuilt,
    Sealed,
    SlotSpec,
    SnapshotReport,
)
from strandline.runtime.protocol.process_limits import set_up_process
from strandline.runtime.protocol.profiles import Folded, Profile
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import (
    PULSE_EVERY,
    BatchFailure,
    BatchRound,
    Commit,
    Freeze,
    NextTimers,
    Prepare,
    PreparedEpoch,
    PrepareEmpty,
    PrepareEpoch,
    Pulse,
    Query,
    RelayAlive,
    SlotCalls,
    SlotFailed,
    SlotFigures,
    SlotReady,
    SlotStatus,
    SnapshotRef,
)
from strandline.runtime.protocol.taskmanager_calls import TaskManagerClient
from strandline.runtime.protocol.user_folder import make_private
from strandline.runtime.slot.exchanges import Exchanges
from strandline.runtime.slot.feed import Begin, Feed
from strandline.runtime.slot.local_files import OperatorFolder
from strandline.runtime.slot.operator_slot import OperatorSlot
from strandline.runtime.slot.profiler import Profiler
from strandline.runtime.slot.rebuild import rebuild
from strandline.runtime.slot.restored_bytes import RestoredBytes
from strandline.state.backends.rocksdb import RocksDBMemory

log = logging.getLogger(__name__)

ROCKSDB_SHARE = 2 / 3
"""RocksDB's share of a slot's state memory. The rest is for the current batch and for gaps in the heap."""


class Slot(SlotCalls):
    """All operators' subtasks with one index, behind one Flight server."""

    def __init__(self, spec: SlotSpec) -> None:
        self.spec = spec
        self._floor = (spec.decided_batch, 0)
        self._failure: BatchFailure | None = None
        self._stopped = threading.Event()
        self._exchanges = Exchanges()
        self._dead_thread: Failure | None = None
        self._profiler = Profiler()
        self.rebuilt: list[Rebuilt] = []
        self._manager: TaskManagerClient | None = None
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="teller") if spec.run.changelog else None
        self._memory = _rocksdb_memory(spec.backend) if spec.backend.kind == "rocksdb" else None
        self.operators = {op.uid: self._open(number, op) for number, op in enumerate(spec.operators)}
        self._feeds = {op.uid: [self._feed(op.uid, feed) for feed in op.feeds] for op in spec.operators}
        self._connections = SlotConnections(
            spec.run.coordinator, spec.run.secret, spec.run.run_id, spec.run.heartbeat_timeout, spec.run.tls
        )

    def _open(self, number: int, op: OperatorSpec) -> OperatorSlot:
        spec = self.spec
        operator: Operator = pickle.loads(op.blob)
        operator.open(SubtaskInfo(spec.run.job, op.uid, spec.index, spec.parallelism, spec.max_parallelism))
        folder = OperatorFolder(operator_folder(spec, number))
        backend, rebuilt = rebuild(spec, operator, folder, self._memory)
        self.rebuilt.append(rebuilt)
        stagers = [(stager.output, pickle.loads(stager.blob)) for stager in op.stagers]
        return OperatorSlot(operator, backend, folder, spec, self._tell_sealed, stagers, op.pushed)

    def _feed(self, uid: str, feed: FeedSpec) -> Feed:
        return Feed(feed, self.operators[uid].operator, self.operators[feed.operator].operator, self.spec)

    def _tell_sealed(self, sealed: Sealed) -> None:
        """Lets the task manager begin with the upload. If this call fails, it learns of the segment from `status`."""
        if self._teller is not None:
            self._teller.submit(self._call_manager, sealed)

    def _call_manager(self, sealed: Sealed) -> None:
        try:
            if self._manager is None:
                spec = self.spec
                self._manager = TaskManagerClient(
                    spec.manager, spec.run.secret, spec.run.run_id, lambda: spec.generation, tls=spec.run.tls
                )
            self._manager.sealed(sealed)
        except StrandlineError as error:
            log.info("the task manager was not told of a segment: %s", error)
        except Exception as error:
            log.exception("the teller has failed")
            self.thread_died(thread_error("teller", error))

    # --- data ------------------------------------------------------------------------------------

    def exchange(self, context: Any, command: bytes, reader: Any, writer: Any) -> None:
        """One attempt of one subtask at one batch."""
        header = msgpack_decoder(ExchangeHeader).decode(command)
        operator = self.operators.get(header.operator)
        if operator is None:
            raise StrandlineError(f"slot {self.spec.index} runs no operator {header.operator!r}")
        with self._exchanges.opened(header.exchange), log_context(step=header.operator):
            if header.goes_on:
                self._receive_sections(header, operator, reader, writer)
                return
            if header.partition is not None:
                self._receive(header, operator, reader, writer)
                return
            self._serve_exchange(header, operator, context, reader, writer)

    def _receive(self, header: ExchangeHeader, operator: OperatorSlot, reader: Any, writer: Any) -> None:
        self._check_fresh(header, operator)
        operator.receive(header, reader.schema, _input(reader))
        writer.begin(pa.schema([]))
        writer.write_metadata(RECEIVED)

    def _receive_sections(self, header: ExchangeHeader, operator: OperatorSlot, reader: Any, writer: Any) -> None:
        self._check_mine(header)
        schema = reader.schema
        writer.begin(pa.schema([]))
        operator.receive_sections(header, schema, _messages(reader), self._decided)

    def _decided(self, batch: int) -> None:
        """An epoch is decided: it becomes part of the state while the rows of the next one are on their way."""
        for op in self.operators.values():
            if op.prepared() == (batch, 0):
                op.commit(batch)

    def _serve_exchange(
        self, header: ExchangeHeader, operator: OperatorSlot, context: Any, reader: Any, writer: Any
    ) -> None:
        schema = operator.output_schema
        begun = False

        def rows() -> Iterator[pa.RecordBatch]:
            nonlocal begun
            begun = True
            writer.begin(schema)
            writer.write_metadata(SEND_INPUT)
            return _input(reader)

        try:
            output = operator.work(header, rows, context.is_cancelled, partial(self._check_fresh, header, operator))
        except (StaleAttemptError, flight.FlightError):
            raise  # the attempt is over or its relay is gone: the batch has not failed
        except BaseException as error:  # also what user code raises to end the process
            self._failure = BatchFailure(header.batch, header.round, Failure.of(error))
            raise
        if not begun:
            reader.schema  # noqa: B018 - waits for the relay's first message: it may not meet a finished exchange
            writer.begin(schema)
        writer.write_metadata(OUTPUT_FOLLOWS)
        for batch in output.batches():
            with operator.back_pressure.running():
                writer.write_batch(batch)

    def _where(self, header: ExchangeHeader) -> str:
        return f"job {self.spec.run.job}, operator {header.operator}, subtask {header.subtask}"

    def _check_batch(self, batch: int) -> None:
        if not is_of(batch, self.spec.generation):
            raise StaleAttemptError(
                f"job {self.spec.run.job}, slot {self.spec.index}: batch {batch} is not of generation "
                f"{self.spec.generation}"
            )

    def _check_mine(self, header: ExchangeHeader) -> None:
        if header.generation != self.spec.generation or header.subtask != self.spec.index:
            raise StaleAttemptError(
                f"{self._where(header)}: an attempt of generation {header.generation} came to slot "
                f"{self.spec.index} of generation {self.spec.generation}"
            )

    def _check_fresh(self, header: ExchangeHeader, operator: OperatorSlot) -> None:
        self._check_mine(header)
        if header.batch <= operator.committed or (header.batch, header.round) < self._floor:
            raise StaleAttemptError(f"{self._where(header)}: batch {header.batch}, round {header.round} is over")

    # --- control ---------------------------------------------------------------------------------

    def status(self, request: Nothing) -> SlotStatus:
        return SlotStatus(
            incarnation=self.spec.incarnation,
            prepared={uid: op.prepared() for uid, op in self.operators.items()},
            sealed=[sealed for op in self.operators.values() if (sealed := op.sealed()) is not None],
            committed={uid: op.committed for uid, op in self.operators.items()},
            counts={uid: op.counts() for uid, op in self.operators.items()},
            failure=self._failure,
            staged=[file for op in self.operators.values() for file in op.staged()],
        )

    def pulse(self, request: Nothing) -> Pulse:
        return Pulse(self._exchanges.longest_silence(), self._dead_thread)

    def relay_alive(self, request: RelayAlive) -> None:
        self._exchanges.heard(request.exchange)

    def status_when_free(self, request: Nothing) -> SlotStatus:
        return self.status(request)

    def figures(self, request: Nothing) -> SlotFigures:
        operators = {uid: op.figures() for uid, op in self.operators.items()}
        if self._memory is not None:
            used = self._memory.used_bytes()
        else:
            used = sum(figures.memory_bytes for figures in operators.values())
        return SlotFigures(operators, self.spec.backend.memory_bytes, used, os.getpid())

    def query(self, request: Query) -> bytes:
        op = self.operators.get(request.operator)
        if op is None:
            raise StrandlineError(f"there is no step {request.operator!r}; there are: {', '.join(self.operators)}")
        return pickle.dumps(op.query(request.state, request.key))

    def profile(self, request: Profile) -> Folded:
        return self._profiler.profile(request)

    def prepare_empty(self, request: PrepareEmpty) -> None:
        self._check_batch(request.batch)
        for uid, op in self.operators.items():
            if op.prepared() == (request.batch, request.round):
                continue
            header = ExchangeHeader(
                self.spec.generation, request.batch, request.round, uid, self.spec.index, -1, request.time
            )
            output = op.work(header, lambda: iter(()), lambda: False, partial(self._check_fresh, header, op))
            if output.rows:
                raise StrandlineError(f"operator {uid} gave {output.rows} rows for a batch without input")

    def prepare(self, request: Prepare) -> SlotStatus:
        spec = self.spec
        self._check_batch(request.batch)
        begin = partial(self._begin, request.addresses)
        forwarded: list[Delivery] = []
        for uid in request.steps:
            op = self.operators[uid]
            header = ExchangeHeader(spec.generation, request.batch, request.round, uid, spec.index, -1, request.time)
            mine = [one for one in request.deliveries if (one.operator, one.subtask) == (uid, spec.index)]
            with log_context(step=uid):
                op.work(header, partial(op.input_rows, mine), lambda: False, partial(self._check_fresh, header, op))
                forwarded += self._forward(op, header, begin)
        pushed = [rows for op in self.operators.values() for rows in op.pushed()] if request.last else []
        return msgspec.structs.replace(self.status(NOTHING), pushed=pushed, forwarded=forwarded)

    def prepare_epoch(self, request: PrepareEpoch) -> PreparedEpoch:
        spec = self.spec
        self._check_batch(request.batch)
        if request.commits is not None:
            self.commit(Commit(request.commits))
        begin = partial(self._begin, request.addresses)
        done = PreparedEpoch(spec.incarnation, {}, {}, [])
        for uid in request.steps:
            op = self.operators[uid]
            header = ExchangeHeader(spec.generation, request.batch, 0, uid, spec.index, -1, request.time)
            mine = [one for one in request.deliveries if (one.operator, one.subtask) == (uid, spec.index)]
            rows = partial(op.input_rows, mine, spec.run.heartbeat_timeout)
            with log_context(step=uid):
                op.work(header, rows, lambda: False, partial(self._check_fresh, header, op), of_epoch=True)
                done.forwarded.extend(self._forward(op, header, begin))
            done.counts[uid] = op.counts()
            due = op.next_timer()
            if due is not None:
                done.timers[uid] = due
            if spec.run.changelog is not None:
                done.segments.extend(op.segment())
            done.rows.extend(op.rows_for_sinks())
            done.pushed.extend(op.pushed())
        return done

    def _forward(self, op: OperatorSlot, header: ExchangeHeader, begin: Begin) -> list[Delivery]:
        try:
            return op.forward(self._feeds[op.operator.uid], header, begin)
        except SlotLostError:
            self._connections.forget()
            raise

    def _begin(self, addresses: str, header: ExchangeHeader, schema: pa.Schema) -> RowsForSlot:
        """Begins to deliver rows of a step to the step that reads them, here or in another slot."""
        if header.subtask == self.spec.index:
            return self.operators[header.operator].delivery(header, schema)
        return self._connections.delivery(header, schema, addresses)

    def discard(self, request: BatchRound) -> None:
        begun = (request.batch, request.round)
        if begun <= self._floor:
            return  # the call was repeated, or comes late
        self._floor = begun
        self._failure = None
        for op in self.operators.values():
            op.discard(begun)

    def commit(self, request: Commit) -> NextTimers:
        self._check_batch(request.batch)
        timers: NextTimers = {}
        for uid, op in self.operators.items():
            op.commit(request.batch)
            due = op.next_timer()
            if due is not None:
                timers[uid] = due
        if request.applied:
            for op in self.operators.values():
                op.wait_until_applied()
        return timers

    def compact(self, request: Nothing) -> None:
        for op in self.operators.values():
            op.compact()

    def freeze(self, request: Freeze) -> None:
        def one(op: OperatorSlot) -> None:
            with log_context(step=op.operator.uid, checkpoint=request.checkpoint):
                if request.canonical is None:
                    op.barrier(request.checkpoint)
                else:
                    op.savepoint(request.checkpoint, request.canonical)

        with ThreadPoolExecutor(max(1, len(self.operators))) as pool:
            list(pool.map(one, self.operators.values()))

    def report(self, request: SnapshotRef) -> list[SnapshotReport]:
        return [op.report(request.checkpoint) for op in self.operators.values()]

    def release(self, request: SnapshotRef) -> None:
        for op in self.operators.values():
            op.release(request.checkpoint)

    def stop(self, request: Nothing) -> None:
        self._stopped.set()

    def thread_died(self, error: StrandlineError) -> None:
        """A background thread has died: the next sign of life says so."""
        self._dead_thread = Failure.of(error)

    def serve(self, ready: Announcement) -> None:
        """Answer calls until told to stop."""
        spec = self.spec
        bind_host, advertise_host = listen_on(spec.run.bind_host, spec.run.coordinator.host)
        server = Server(
            spec.run.secret,
            SlotCalls,
            self,
            run_id=spec.run.run_id,
            generation=lambda: spec.generation,
            bind_host=bind_host,
            advertise_host=advertise_host,
            unix_path=str(make_private(socket_folder(spec.run.run_id)) / f"s{spec.index}-{spec.incarnation}.sock"),
            exchange=self.exchange,
            tls=spec.run.tls,
        )
        states = {uid: op.described_states() for uid, op in self.operators.items()}
        ready.tell(SlotReady(server.address, states, self.rebuilt))
        self._stopped.wait()
        time.sleep(0.05)  # until the answer to `stop` is sent
        server.close()
        for op in self.operators.values():
            op.close()


def _rocksdb_memory(backend: BackendSettings) -> RocksDBMemory:
    return RocksDBMemory(int(backend.memory_bytes * ROCKSDB_SHARE), backend.rocksdb.write_buffer_share)


def _input(reader: Any) -> Iterator[pa.RecordBatch]:
    """The rows of an exchange. Raises `StaleAttemptError` unless as many arrive as the relay says at the end."""
    rows = 0
    for chunk in reader:
        if chunk.data is not None and chunk.data.num_rows:
            rows += chunk.data.num_rows
            yield chunk.data
        if chunk.app_metadata is not None:
            announced = int(chunk.app_metadata.to_pybytes())
            if announced != rows:
                raise StaleAttemptError(f"the relay sent {announced} rows, {rows} arrived")
            return
    raise StaleAttemptError("the relay ended before its last row")


def _messages(reader: Any) -> Iterator[pa.RecordBatch | Section]:
    """What a relay that runs for long sends: rows, and after those of each cut a `Section`."""
    for chunk in reader:
        if chunk.data is not None and chunk.data.num_rows:
            yield chunk.data
        if chunk.app_metadata is not None:
            yield msgpack_decoder(Section).decode(chunk.app_metadata.to_pybytes())


class Announcement:
    """The standard output of a slot that starts: a line every second as a sign of life, then one message.

    The line says how many bytes of the state the slot has restored, as far as that was found out: the sign of life does
    not wait for the disk.
    """

    def __init__(self, output: BinaryIO) -> None:
        self._restored = 0
        self._output = output
        self._lock = threading.Lock()
        self._told = threading.Event()
        threading.Thread(target=self._pulse, daemon=True, name="start-pulse").start()

    def restores(self, so_far: Callable[[], int]) -> None:
        """From now on, say how many bytes are restored. `so_far` may take its time."""
        threading.Thread(target=self._look, args=(so_far,), daemon=True, name="restored-bytes").start()

    def tell(self, message: SlotReady | SlotFailed) -> None:
        """Say the message. Nothing is written afterwards."""
        with self._lock:
            self._told.set()
            self._write(msgspec.json.encode(message))

    def _pulse(self) -> None:
        while not self._told.wait(PULSE_EVERY):
            with self._lock:
                if not self._told.is_set():
                    self._write(b"%d" % self._restored)

    def _look(self, so_far: Callable[[], int]) -> None:
        while not self._told.wait(PULSE_EVERY):
            self._restored = so_far()

    def _write(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # the task manager is gone, and this process is about to end
            self._output.write(line + b"\n")
            self._output.flush()


def _end_with_parent() -> None:
    """End this process when its task manager dies, which holds the other end of stdin."""
    # Not through `sys.stdin`: a thread that holds its lock at the end of the interpreter makes Python abort.
    while os.read(0, 1 << 16):
        pass
    os._exit(0)


def _set_up_log(spec: SlotSpec) -> None:
    """Write everything to the slot's log: log lines, what user code prints, and what libraries say."""
    run = spec.run
    file = open_log(log_file(log_folder(run.local_dir, run.job, run.run_id), slot_log(spec.index)))
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    handler = logging.StreamHandler()
    fields: dict[str, str | int] = {"job": run.job, "run": run.run_id, "subtask": spec.index}
    handler.setFormatter(formatter(run.log_format, "slot", fields, run.secrets))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    log.info(
        "slot %d of job %s begins: generation %d, incarnation %d, process %d",
        spec.index,
        run.job,
        spec.generation,
        spec.incarnation,
        os.getpid(),
    )


def main() -> None:
    """The entry of the process: reads a `SlotSpec` from stdin, and writes `SlotReady` or `SlotFailed` to stdout."""
    set_up_process()
    ready = Announcement(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what user code prints goes to the log
    (length,) = struct.unpack(">Q", sys.stdin.buffer.read(8))
    spec = msgpack_decoder(SlotSpec).decode(sys.stdin.buffer.read(length))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_up_log(spec)
    ready.restores(RestoredBytes(spec).so_far)
    for entry in spec.run.sys_path:
        if entry not in sys.path:
            sys.path.append(entry)
    try:
        slot = Slot(spec)
    except BaseException as error:  # user code is imported, and may call `sys.exit`
        log.exception("slot %d could not start", spec.index)
        ready.tell(SlotFailed(Failure.of(error)))
        return
    slot.serve(ready)


if __name__ == "__main__":
    main()
