"""One operator's subtask inside a slot: its state, the batch it works on, its snapshots."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import StaleAttemptError
from strandline.operators.base import BatchInfo, Operator
from strandline.runtime.delivery.deliveries import RowsForSlot
from strandline.runtime.protocol.cuts import Section
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader
from strandline.runtime.protocol.messages import Sealed, SlotSpec, SnapshotReport
from strandline.runtime.protocol.side_outputs import combined, output_schema_of, rows_of
from strandline.runtime.protocol.slot_calls import EARLIEST, EpochSegment, OperatorFigures, PushedRows, RowCounts
from strandline.runtime.slot.feed import Begin, Feed
from strandline.runtime.slot.inbox import Inbox
from strandline.runtime.slot.kept_rows import KeptRows, MemoryLimit
from strandline.runtime.slot.key_order import in_key_order
from strandline.runtime.slot.local_files import OperatorFolder
from strandline.runtime.slot.row_counts import CommittedRows, CountedRows
from strandline.runtime.slot.work_clock import WorkClock
from strandline.sinks.base import Stager
from strandline.state.backends.base import Snapshot, SnapshotFile, StateBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.batch.segment import Chunk, Segment, SegmentHeader, put, seal_in_memory, write_segment
from strandline.state.handles.look_up import LookUp

log = logging.getLogger(__name__)

APPLY_PATIENCE = 1.0
"""For how many seconds figures wait until the last commit is applied."""

WriteSnapshot = Callable[[int, Snapshot, int], tuple[list[SnapshotFile], float]]
"""Writes the snapshot of a checkpoint at a batch; returns its files, and how many milliseconds that took."""


@dataclass(slots=True)
class PreparedBatch:
    """One operator's finished work on a batch that is not decided yet."""

    batch: int
    round: int
    changes: ChangeSet
    chunks: list[Chunk] | None
    """The net changes in order, as they are in the segment; None if they are too many to be held in memory."""
    segment: Segment
    output: KeptRows
    counts: RowCounts
    of_groups: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Rows per key group of the slot."""
    staged: list[SinkFile]
    """The output rows that the slot has staged for sinks."""
    forwarded: list[Delivery] | None = None
    """The output rows that were delivered to the steps that read them; None before that."""
    content: bytes | None = None
    """The segment of an epoch. It is written to the local disk after the commit."""

    def discard(self) -> None:
        self.changes.discard()
        self.output.discard()
        self.segment.path.unlink(missing_ok=True)


@dataclass(slots=True)
class LocalSnapshot:
    """A snapshot between its barrier and the end of its upload."""

    snapshot: Snapshot
    batch: int
    sync_ms: float
    written: Future[tuple[list[SnapshotFile], float]]


class OperatorSlot:
    """One operator's subtask: its state, the batch it is working on, its snapshots."""

    def __init__(
        self,
        operator: Operator,
        backend: StateBackend,
        folder: OperatorFolder,
        spec: SlotSpec,
        on_sealed: Callable[[Sealed], None] = lambda _sealed: None,
        stagers: Sequence[tuple[str | None, Stager]] = (),
        pushed: Sequence[str | None] = (),
    ) -> None:
        """`stagers` put the output rows aside in the slot itself, each those of one side output, or the main ones.

        `pushed` names the outputs whose rows the driver wants itself.
        """
        self.operator = operator
        self.committed = spec.decided_batch
        self._on_sealed = on_sealed
        self._stagers = tuple(stagers)
        self._pushed = tuple(pushed)
        self._applied_batch = spec.decided_batch
        self._backend = backend
        self._folder = folder
        self._spec = spec
        self._busy = threading.Lock()
        self._prepared: PreparedBatch | None = None
        self._inbox = Inbox(folder.spill(), spec.backend.batch_memory)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"apply-{operator.uid}")
        self._applied: Future[None] = self._worker.submit(lambda: None)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"snapshot-{operator.uid}")
        self._savepoints = ThreadPoolExecutor(1, thread_name_prefix=f"savepoint-{operator.uid}")
        self._snapshots: dict[int, LocalSnapshot] = {}
        self._newest_snapshot: int | None = None
        self._ran = False
        self._processing_ms = 0
        self.output_schema = output_schema_of(operator)
        self.back_pressure = WorkClock()
        """Runs while the subtask waits for somebody to take its output."""
        self._work = WorkClock()
        """Runs while the subtask works on rows, applies a commit or takes a barrier."""
        self._rows = CommittedRows(spec.key_groups)

    def prepared(self) -> tuple[int, int] | None:
        held = self._prepared
        return (held.batch, held.round) if held else None

    def counts(self) -> RowCounts:
        """The rows of what is prepared."""
        held = self._prepared
        return held.counts if held else RowCounts()

    def staged(self) -> list[SinkFile]:
        """The rows of what is prepared that the slot itself has staged for sinks."""
        held = self._prepared
        return held.staged if held else []

    def pushed(self) -> list[PushedRows]:
        """The rows of what is prepared that the driver wants itself."""
        return self._output_of(self._pushed)

    def rows_for_sinks(self) -> list[PushedRows]:
        """The rows of what is prepared that somebody else stages for sinks."""
        return self._output_of(dict.fromkeys(name for name, _stager in self._stagers))

    def _output_of(self, names: Iterable[str | None]) -> list[PushedRows]:
        """The rows of some outputs of what is prepared. An output without rows is left out."""
        held = self._prepared
        if held is None or not held.output.rows:
            return []
        found = []
        for name in names:
            rows = list(rows_of(held.output.batches(), self.operator, name))
            if rows:
                found.append(PushedRows(self.operator.uid, name, _as_stream(rows), sum(one.num_rows for one in rows)))
        return found

    def sealed(self) -> Sealed | None:
        """The segment of what is prepared."""
        held = self._prepared
        return self._described(held.segment) if held else None

    def segment(self) -> list[EpochSegment]:
        """The segment of what is prepared with its bytes; nothing if it changes nothing."""
        held = self._prepared
        if held is None or held.content is None or not held.segment.entries:
            return []
        return [EpochSegment(self.operator.uid, held.content, str(held.segment.path))]

    def _described(self, segment: Segment) -> Sealed:
        header = segment.header
        return Sealed(
            header.operator,
            header.subtask,
            header.batch,
            header.round,
            str(segment.path),
            segment.size_bytes,
            segment.entries,
        )

    def described_states(self) -> list[dict[str, Any]]:
        """What the operator keeps, as checkpoints describe it."""
        return [msgspec.to_builtins(state) for state in self.operator.states()]

    def receive(self, header: ExchangeHeader, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> None:
        """Keep rows that a relay delivers, until `delivered` asks for them or their round is over."""
        self._inbox.receive(header, schema, rows)

    def receive_sections(
        self,
        header: ExchangeHeader,
        schema: pa.Schema,
        messages: Iterator[pa.RecordBatch | Section],
        decided: Callable[[int], None],
    ) -> None:
        """Keep the rows of a relay that runs for long, cut by cut. `decided` is told of decided epochs."""
        self._inbox.receive_sections(header, schema, messages, decided)

    def input_rows(self, deliveries: Sequence[Delivery], patience: float = 0.0) -> Iterator[pa.RecordBatch]:
        """The rows of these deliveries, as the operator needs them: by partition, or next to others of their key.

        Deliveries that are on their way get `patience` seconds.
        """
        kept = self._inbox.rows(sorted(deliveries, key=lambda one: one.partition), patience)
        if self.operator.sorted_input:
            return in_key_order(kept, self.operator, self._spec.key_groups, self._spec.backend.batch_memory)
        return (batch for rows in kept for batch in rows.batches())

    def work(
        self,
        header: ExchangeHeader,
        rows: Callable[[], Iterator[pa.RecordBatch]],
        cancelled: Callable[[], bool],
        check: Callable[[], None],
        *,
        of_epoch: bool = False,
    ) -> KeptRows:
        """The output of the batch: kept from an earlier attempt, or computed now from `rows`. One attempt at a time.

        `check` raises if the attempt became stale, while it waited for its turn or while it worked. Of an epoch the
        driver makes segments durable and stages rows; otherwise the task manager and this slot do.
        """
        while not self._busy.acquire(timeout=0.2):
            if cancelled():
                raise StaleAttemptError(f"attempt {header.attempt} was cancelled while it waited for its turn")
        try:
            check()
            held = self._prepared
            if held is not None:
                if (held.batch, held.round) == (header.batch, header.round):
                    return held.output
                # It belongs to an older round, so it can never commit. Both rounds use the same segment file.
                self._prepared = None
                held.discard()
            self._applied.result()
            with self._work.running():
                done = self._run(header, rows(), check, of_epoch)
            try:
                check()
            except StaleAttemptError:
                done.discard()
                raise
            self._prepared = done
            return done.output
        finally:
            self._busy.release()

    def _run(
        self, header: ExchangeHeader, rows: Iterator[pa.RecordBatch], check: Callable[[], None], of_epoch: bool
    ) -> PreparedBatch:
        spill = self._folder.spill()
        spill.mkdir(exist_ok=True)
        limit = self._spec.backend.batch_memory
        changes = ChangeSet(self._backend, limit, spill)
        output = KeptRows(
            self.output_schema,
            MemoryLimit(limit),
            spill / f"output-{header.batch}-{header.round}-{header.attempt}.arrow",
        )
        path = self._folder.segment(self.committed, header.batch)
        try:
            self._processing_ms = header.time.processing_ms
            when = header.time.of(header.operator)
            batch = BatchInfo(header.batch, header.time.processing_ms, when.watermark_ms, when.late_watermark_ms)
            work = self.operator.run_initial if header.initial else self.operator.run
            counted = CountedRows(rows, self._spec.key_groups, self._work)
            for produced in work(counted, changes, batch):
                output.append(combined(produced, self.output_schema, self.operator))
            self._ran = True
            output.seal()
            chunks = None if changes.spilled else list(changes.chunks())
            sealed = SegmentHeader(
                header.generation, header.batch, header.round, header.operator, header.subtask, header.attempt
            )
            content: bytes | None = None
            if of_epoch and self._spec.run.changelog is not None:  # else a lost slot is rebuilt from the local file
                segment, content = seal_in_memory(path, sealed, chunks or changes.chunks())
            else:
                segment = write_segment(path, sealed, chunks or changes.chunks())
            check()
            staged: list[SinkFile] = []
            if not of_epoch:
                self._on_sealed(self._described(segment))  # it is uploaded while the rows are staged
                staged = [] if header.initial else self._stage(output, header.batch)
        except BaseException:
            changes.discard()
            output.discard()
            raise
        counts = RowCounts(counted.rows, output.rows, self.operator.late_rows, counted.bytes, output.size)
        return PreparedBatch(
            header.batch,
            header.round,
            changes,
            chunks,
            segment,
            output,
            counts,
            counted.of_groups,
            staged,
            content=content,
        )

    def _stage(self, output: KeptRows, batch: int) -> list[SinkFile]:
        """Put the output rows aside for the sinks. Without rows there is nothing to put aside."""
        if not output.rows:
            return []
        files: list[SinkFile] = []
        for name, stager in self._stagers:
            files += stager.stage(rows_of(output.batches(), self.operator, name), batch, self._spec.index)
        return files

    def forward(self, feeds: Sequence[Feed], header: ExchangeHeader, begin: Begin) -> list[Delivery]:
        """Deliver the output of what is prepared to the steps that read it. May be repeated: it is done once."""
        with self._busy:
            held = self._prepared
            if held is None or (held.batch, held.round) != (header.batch, header.round):
                raise StaleAttemptError(f"operator {self.operator.uid}: batch {header.batch} is not prepared")
            if held.forwarded is None:
                with self.back_pressure.running():
                    held.forwarded = [
                        one for feed in feeds for one in feed.forward(held.output.batches(), header, begin)
                    ]
            return held.forwarded

    def delivery(self, header: ExchangeHeader, schema: pa.Schema) -> RowsForSlot:
        """Takes rows for this operator from another operator of the same slot."""
        return self._inbox.delivery(header, schema)

    def discard(self, begun: tuple[int, int] | None = None) -> None:
        """Drop what was prepared before the round `begun`; None: whatever is prepared.

        An attempt that runs at this moment is refused as stale when it ends.
        """
        if begun is not None:
            self._inbox.drop(begun)
        if not self._busy.acquire(blocking=False):
            return
        try:
            held = self._prepared
            if held is not None and (begun is None or (held.batch, held.round) < begun):
                held.discard()
                self._prepared = None
        finally:
            self._busy.release()

    def commit(self, batch: int) -> None:
        """Make the prepared batch the state. Returns at once; the next batch and barrier wait until it is applied."""
        with self._busy:
            held = self._prepared
            if batch <= self.committed and (held is None or held.batch > batch):
                return  # the commit was repeated
            if held is None or held.batch != batch:
                raise StaleAttemptError(f"operator {self.operator.uid}: batch {batch} is not prepared")
            self._prepared = None
            self.committed = batch
            self._rows.add(held.counts, held.of_groups)
            self._inbox.drop((batch + 1, 0))
            self._applied = self._worker.submit(self._apply, held)

    def _apply(self, held: PreparedBatch) -> None:
        with self._work.running():
            for keys, values in held.chunks or held.changes.chunks():
                self._backend.apply(keys, values)
        self._applied_batch = held.batch
        if held.content is not None:
            put(held.segment.path, held.content)
        held.changes.discard()
        held.output.discard()

    def wait_until_applied(self) -> None:
        """Return when the last commit is in the backend, and its segment on the local disk."""
        self._applied.result()

    def compact(self) -> None:
        """Compact the state on disk, before a snapshot that many checkpoints will name. Batches go on meanwhile."""
        self._backend.compact()

    def barrier(self, checkpoint_id: int) -> None:
        """Freeze the committed state: the synchronous part of a checkpoint.

        It may run beside an attempt, which only reads the state. Commits and barriers run one after the other on the
        same thread. The driver decides which batch a checkpoint covers: it commits nothing during a barrier.
        """
        local = self._take_snapshot(checkpoint_id, self._writer, self._write_snapshot)
        self._writer.submit(self._drop_covered, checkpoint_id, local.batch)  # in the background

    def savepoint(self, checkpoint_id: int, canonical: bool) -> None:
        """Freeze the committed state for a savepoint. Unlike a checkpoint's snapshot, no rebuild starts from it."""
        self._take_snapshot(checkpoint_id, self._savepoints, self._write_savepoint, canonical)

    def _take_snapshot(
        self, checkpoint_id: int, writer: ThreadPoolExecutor, write: WriteSnapshot, full: bool = False
    ) -> LocalSnapshot:
        """Freeze the state, and have `writer` write its files with `write`."""
        started = time.perf_counter()
        batch, snapshot = self._worker.submit(self._freeze, checkpoint_id, self._applied, full).result()
        sync_ms = (time.perf_counter() - started) * 1000
        written = writer.submit(write, checkpoint_id, snapshot, batch)
        local = self._snapshots[checkpoint_id] = LocalSnapshot(snapshot, batch, sync_ms, written)
        return local

    def _freeze(self, checkpoint_id: int, applied: Future[None], full: bool = False) -> tuple[int, Snapshot]:
        applied.result()  # it ran before this on the same thread; raises its error
        with self._work.running():
            return self._applied_batch, self._backend.snapshot(self._folder.snapshot(checkpoint_id), full=full)

    def _write_snapshot(self, checkpoint_id: int, snapshot: Snapshot, batch: int) -> tuple[list[SnapshotFile], float]:
        started = time.perf_counter()
        files = snapshot.write()
        self._folder.mark(checkpoint_id, batch, files)
        self._newest_snapshot = checkpoint_id
        return files, (time.perf_counter() - started) * 1000

    def _write_savepoint(
        self, _checkpoint_id: int, snapshot: Snapshot, _batch: int
    ) -> tuple[list[SnapshotFile], float]:
        started = time.perf_counter()
        return snapshot.write(), (time.perf_counter() - started) * 1000

    def _drop_covered(self, checkpoint_id: int, batch: int) -> None:
        if self._newest_snapshot != checkpoint_id:
            return  # the snapshot could not be written
        try:
            self._folder.drop_segments(batch)
            for older in self._folder.snapshots():
                if older < checkpoint_id and older not in self._snapshots:  # also what earlier incarnations left
                    self._folder.drop_snapshot(older)
        except OSError:
            log.warning("operator %s: older local files stay until the next snapshot", self.operator.uid, exc_info=True)

    def report(self, checkpoint_id: int) -> SnapshotReport:
        """The snapshot's files, once they are all on disk."""
        local = self._snapshots[checkpoint_id]
        files, write_ms = local.written.result()
        return SnapshotReport(
            self.operator.uid,
            [(f.name, str(f.path), f.size, f.identity, f.shared) for f in files],
            self.described_states(),
            local.batch,
            local.sync_ms,
            write_ms,
        )

    def release(self, checkpoint_id: int) -> None:
        """The upload has ended. Delete the snapshot's files, unless it is the newest: a rebuild starts from that."""
        local = self._snapshots.pop(checkpoint_id, None)
        if local is not None and self._newest_snapshot != checkpoint_id:
            local.snapshot.release()
            self._folder.drop_snapshot(checkpoint_id)

    def next_timer(self) -> int | None:
        """When the operator next has something to do without rows, by its own clock; the least time before its first
        run, and None if there is nothing or if it has no clock."""
        if self.operator.time_mode == "none":
            return None
        return self.operator.next_timer_ms if self._ran else EARLIEST

    def query(self, state: str | None, key: bytes) -> tuple[bool, Any]:
        """Whether the step keeps something for `key` after the last commit, and what; `key` is without a key group.

        Only the subtask that owns the key's group finds something. The others say what nothing looks like.
        """
        self._applied.result()
        now_ms = max(int(time.time() * 1000), self._processing_ms)
        for group in self._spec.key_groups:
            found = self.operator.look_up(LookUp(self._backend, group, key, now_ms), state)
            if found is not None:
                return True, found[0]
        return False, self.operator.nothing(state)

    def figures(self) -> OperatorFigures:
        """What the state takes up. The last committed batch is part of it, unless that takes long to apply."""
        wait([self._applied], timeout=APPLY_PATIENCE)
        rows = self._rows.counts
        reads = self._backend.cache_reads()
        return OperatorFigures(
            state_bytes=self._backend.size_bytes(),
            memory_bytes=self._backend.memory_bytes(),
            estimated_keys=self._backend.estimated_keys(),
            taken_ns=time.monotonic_ns(),
            rows_in=rows.rows_in,
            rows_out=rows.rows_out,
            busy_ns=self._work.total_ns(),
            back_pressured_ns=self.back_pressure.total_ns(),
            first_key_group=self._spec.key_groups.start,
            key_group_rows=self._rows.of_groups.tolist(),
            cache_hits=reads.hits if reads is not None else 0,
            cache_misses=reads.misses if reads is not None else 0,
            bytes_in=rows.bytes_in,
            bytes_out=rows.bytes_out,
        )

    def close(self) -> None:
        self._worker.shutdown()
        self._writer.shutdown()
        self._savepoints.shutdown()
        self.discard()
        self._inbox.drop((1 << 62, 0))
        self.operator.close()
        self._backend.close()


def _as_stream(rows: Sequence[pa.RecordBatch]) -> bytes:
    """Rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows[0].schema) as writer:
        for batch in rows:
            writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream
