"""Random lives of a slot, run on the real slot code and on plain dicts side by side.

The machine plays everyone around a slot: the relays that bring rows, the batch function, the coordinator, the uploads
of its task manager, and whatever kills processes and spoils disks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strandline.admin.verification import verify_files
from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, all_files, keyed_files
from strandline.checkpoint.restore import plan_restore
from strandline.errors import SegmentsLostError, StaleAttemptError, StrandlineError, UserCodeError
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.operators.aggregate.functions import sum as sum_of
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.runtime.driver.opening import pickled
from strandline.runtime.protocol.address import NOWHERE
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.exchange import OUTPUT_FOLLOWS, SEND_INPUT, ExchangeHeader
from strandline.runtime.protocol.folders import operator_folder, slot_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    BatchTime,
    OperatorSpec,
    RunInfo,
    SlotSpec,
    StorageSettings,
)
from strandline.runtime.protocol.slot_calls import BatchRound, Commit, Freeze, PrepareEmpty, SnapshotRef
from strandline.runtime.slot.local_files import OperatorFolder
from strandline.runtime.slot.process import Slot
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.storage.local import LocalStorage
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import upload_settings

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where it exists, nothing waits for a disk: what a sync is good for is not what is tried here."""
JOB = "machine"
GROUPS = 128
USERS = [f"u{number}" for number in range(12)]
ROWS_IN = parse_schema("user string, x long")
ROWS_OUT = parse_schema("user string, n long, s long")
SENT = pa.schema([("user", pa.string()), ("x", pa.int64()), (KEY_GROUP_COLUMN, pa.int32())])
SUMS, TOTALS = "sums", "totals"
UIDS = (SUMS, TOTALS)

Row = tuple[str, int]
State = dict[str, tuple[int, int]]

POISON, RESET = -666, -1
ROWS = st.lists(st.tuples(st.sampled_from(USERS), st.just(RESET) | st.integers(0, 9)), max_size=25)


class Sums(KeyedProcessor):
    """Counts and sums per user; one value makes it forget the user, another makes it fail."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            if row.x == POISON:
                raise ValueError("poison")
            n, s = (0, 0) if row.x == RESET else (n + 1, s + row.x)
        if n:
            self.total.update((n, s))
        else:
            self.total.clear()
        yield (*key, n, s)


def expected(uid: str, state: State, rows: list[Row]) -> tuple[State, list[tuple[Any, ...]]]:
    """The state after a batch, and the rows that it gives, worked out in plain Python."""
    after = dict(state)
    for user, x in rows:
        n, s = after.get(user, (0, 0))
        after[user] = (0, 0) if uid == SUMS and x == RESET else (n + 1, s + x)
    output = sorted((user, *after[user]) for user in {user for user, _ in rows})
    return {user: value for user, value in after.items() if value[0]}, output


def record_batches(rows: list[Row], per_batch: int) -> list[pa.RecordBatch]:
    """As the relay would send them: sorted by key, with the key group."""
    rows = sorted(rows, key=lambda row: row[0])
    return [
        pa.RecordBatch.from_arrays(
            [
                pa.array([user for user, _ in part], pa.string()),
                pa.array([x for _, x in part], pa.int64()),
                pa.array([hash_group(user) for user, _ in part], pa.int32()),
            ],
            schema=SENT,
        )
        for part in (rows[at : at + per_batch] for at in range(0, len(rows), per_batch))
    ]


def hash_group(user: str) -> int:
    return int(user[1:]) * 37 % GROUPS


class Chunk(NamedTuple):
    """What Flight hands to a reader."""

    data: pa.RecordBatch | None
    app_metadata: Any = None


class Sent:
    """Flight's reader, as the slot sees it: what the relay sends."""

    schema = SENT

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks


class Answer:
    """Flight's writer, as the slot sees it: keeps what the relay would have read."""

    def __init__(self) -> None:
        self.signs: list[bytes] = []
        self.batches: list[pa.RecordBatch] = []
        self.schema: pa.Schema | None = None

    def begin(self, schema: pa.Schema) -> None:
        assert self.schema is None
        self.schema = schema

    def write_metadata(self, sign: bytes) -> None:
        assert self.schema is not None
        self.signs.append(sign)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        assert self.signs[-1] == OUTPUT_FOLLOWS
        assert batch.schema.equals(self.schema)
        self.batches.append(batch)

    def rows(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for batch in self.batches for row in batch.to_pylist()]


def whole(batches: list[pa.RecordBatch]) -> Iterator[Chunk]:
    for batch in batches:
        yield Chunk(batch)
    yield Chunk(None, pa.py_buffer(str(sum(batch.num_rows for batch in batches)).encode()))


def cut_short(batches: list[pa.RecordBatch]) -> Iterator[Chunk]:
    yield from map(Chunk, batches)


def miscounted(batches: list[pa.RecordBatch]) -> Iterator[Chunk]:
    yield from map(Chunk, batches)
    yield Chunk(None, pa.py_buffer(str(1 + sum(batch.num_rows for batch in batches)).encode()))


def broken(batches: list[pa.RecordBatch]) -> Iterator[Chunk]:
    yield from map(Chunk, batches)
    raise flight.FlightCancelledError("the task was killed")


class SlotMachine(RuleBasedStateMachine):
    """A subclass names the backend with `kind` and `incremental`."""

    kind = "heap"
    incremental = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strandline-slot-", dir=MEMORY))
        self.storage = LocalStorage(str(self.folder / "durable"))
        self.clock = 0.0
        self.retained: dict[int, CheckpointMetadata] = {}
        self.frozen: dict[int, dict[str, State]] = {}
        """What the state was at the barrier of each checkpoint."""
        self.committed: dict[str, State] = {}
        self.prepared: dict[str, State] = {}
        self.recorded: dict[str, list[tuple[Any, ...]]] = {}
        self.coordinator: CheckpointCoordinator
        self.base: CheckpointMetadata | None = None
        self.generation = self.incarnation = 0
        self.last_id = 0
        operators = [
            ProcessOperator(SUMS, Sums(), ["user"], ROWS_IN, ROWS_OUT),
            AggregateOperator(TOTALS, ["user"], ROWS_IN, {"n": count(), "s": sum_of("x")}),
        ]
        self.operators = [OperatorSpec(operator.uid, pickled(operator)) for operator in operators]
        self.run_info = RunInfo(
            JOB,
            "run",
            "secret",
            NOWHERE,
            str(self.folder / "local"),
            "127.0.0.1",
            8.0,
            StorageSettings(self.storage.url, {}),
            [],
            upload_settings(),
        )

    @initialize(batch_memory=st.sampled_from([600, 1 << 20]))
    def start(self, batch_memory: int) -> None:
        self.backend = BackendSettings(self.kind, 8 << 20, batch_memory, self.incremental, "lz4")
        self.begin_generation()

    # --- the batch function --------------------------------------------------------------------------

    def header(self, uid: str, **other: int) -> ExchangeHeader:
        fields: dict[str, Any] = {
            "generation": self.generation,
            "batch": self.batch,
            "round": self.round,
            "subtask": 0,
            "attempt": 7,
        }
        return ExchangeHeader(operator=uid, time=BatchTime(0), **{**fields, **other})

    def exchange(self, header: ExchangeHeader, chunks: Iterator[Chunk]) -> Answer:
        answer = Answer()
        context = SimpleNamespace(is_cancelled=lambda: False)
        self.slot.exchange(context, msgspec.msgpack.encode(header), Sent(chunks), answer)
        return answer

    @rule(
        rows=ROWS, per_batch=st.sampled_from([1, 4, 100]), uids=st.lists(st.sampled_from(UIDS), min_size=1, unique=True)
    )
    def work(self, rows: list[Row], per_batch: int, uids: list[str]) -> None:
        """Relays of one or both steps bring a batch; one that is prepared already gives the recorded rows."""
        for uid in uids:
            answer = self.exchange(self.header(uid), whole(record_batches(rows, per_batch)))
            if uid in self.prepared:
                assert answer.signs == [OUTPUT_FOLLOWS]
                assert answer.rows() == self.recorded[uid]
                continue
            assert answer.signs == [SEND_INPUT, OUTPUT_FOLLOWS]
            after, output = expected(uid, self.committed[uid], rows)
            assert sorted(answer.rows()) == output
            self.recorded[uid] = answer.rows()
            self.prepared[uid] = after
        self.compare_status()

    @rule(
        rows=ROWS,
        uid=st.sampled_from(UIDS),
        how=st.sampled_from([cut_short, miscounted, broken, whole]),
        per_batch=st.sampled_from([1, 100]),
    )
    def attempt_that_fails(self, rows: list[Row], uid: str, how: Any, per_batch: int) -> None:
        """Its relay dies, or user code raises: nothing of it stays."""
        if uid in self.prepared or (how is whole and uid != SUMS):
            return
        files = self.local_files()
        if how is whole:
            rows = [*rows, ("u5", POISON)]
        with pytest.raises((StaleAttemptError, flight.FlightCancelledError, UserCodeError)):
            self.exchange(self.header(uid), how(record_batches(rows, per_batch)))
        assert self.local_files() <= files
        if how is whole:
            failure = self.slot.status(NOTHING).failure
            assert failure is not None
            assert (failure.batch, failure.round) == (self.batch, self.round)
        self.compare_status()

    @rule(rows=ROWS, uid=st.sampled_from(UIDS), which=st.sampled_from(["round", "batch", "generation", "subtask"]))
    def stale_attempt(self, rows: list[Row], uid: str, which: str) -> None:
        if which == "round" and self.round == 0:
            return
        value = {
            "round": self.round - 1,
            "batch": self.decided,
            "generation": self.generation - 1,
            "subtask": 1,
        }[which]
        with pytest.raises(StaleAttemptError):
            self.exchange(self.header(uid, **{which: value}), whole(record_batches(rows, 4)))
        self.compare_status()

    @rule(busy=st.booleans())
    def new_round(self, busy: bool) -> None:
        """A discard that finds an attempt at work leaves what was prepared to the next round's attempt."""
        locks = [operator._busy for operator in self.slot.operators.values()] if busy else []
        for lock in locks:
            lock.acquire()
        self.round += 1
        self.slot.discard(BatchRound(self.batch, self.round))
        for lock in locks:
            lock.release()
        self.prepared, self.recorded = {}, {}
        self.compare_status()

    @rule(rows=ROWS, per_batch=st.sampled_from([1, 4, 100]))
    def whole_batch(self, rows: list[Row], per_batch: int) -> None:
        self.work(rows, per_batch, list(UIDS))
        self.commit(twice=False)

    @rule(twice=st.booleans())
    def commit(self, twice: bool) -> None:
        """Steps that Spark did not call had no rows."""
        self.slot.prepare_empty(PrepareEmpty(self.batch, self.round, BatchTime(0)))
        for _ in range(1 + twice):
            self.slot.commit(Commit(self.batch))
        self.decide()
        self.compare_state()

    def decide(self) -> None:
        self.committed = {**self.committed, **self.prepared}
        self.decided = self.batch
        self.begin_batch(self.batch + 1)

    def begin_batch(self, batch: int) -> None:
        self.batch, self.round = batch, 0
        self.prepared, self.recorded = {}, {}

    # --- checkpoints ---------------------------------------------------------------------------------

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    @precondition(lambda self: self.coordinator.should_trigger(self.clock, self.checkpointable(), forced=True))
    @rule(released=st.booleans())
    def barrier_and_upload(self, released: bool) -> None:
        """Also while a batch is prepared and not committed: none of it may get into the checkpoint."""
        pending = self.coordinator.trigger(self.now(), self.clock, self.decided)
        self.last_id = pending.id
        self.frozen[pending.id] = dict(self.committed)
        self.slot.freeze(Freeze(pending.id))
        incremental = self.incremental and self.kind == "rocksdb"
        reports = self.slot.report(SnapshotRef(pending.id))
        snapshots = [SubtaskSnapshot(0, range(GROUPS), self.kind, incremental, r, self.clock) for r in reports]
        for ack in self.uploader.upload(pending.id, snapshots):
            self.coordinator.acknowledge(pending.id, ack.state.operator, 0, ack)
        if released:
            self.slot.release(SnapshotRef(pending.id))
        else:
            self.unreleased.append(pending.id)
        self.compare_snapshots(pending.id)

    @precondition(lambda self: self.coordinator.should_trigger(self.clock, self.checkpointable(), forced=True))
    @rule()
    def whole_checkpoint(self) -> None:
        self.barrier_and_upload(released=True)
        self.confirm(self.last_id)

    def compare_snapshots(self, newest: int) -> None:
        """The newest one stays as the local base, the others until they are released."""
        for number, operator in enumerate(self.slot.operators.values()):
            operator._writer.submit(lambda: None).result()  # older ones go after the report
            folder = OperatorFolder(operator_folder(self.spec(), number))
            assert folder.snapshots() == sorted({newest, *self.unreleased})

    def checkpointable(self) -> int | None:
        return self.decided if self.decided >= 0 else None

    @precondition(lambda self: self.unreleased)
    @rule()
    def release(self) -> None:
        self.slot.release(SnapshotRef(self.unreleased.pop(0)))

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Not always the oldest; older pending ones are aborted by it."""
        self.confirm(data.draw(st.sampled_from(self.coordinator.ready())))

    def confirm(self, chosen: int) -> None:
        shape = JobShape(JOB, self.generation, 1, GROUPS, UIDS)
        plan = self.coordinator.prepare_completion(chosen, self.now(), shape=shape, source=SourcePosition(0, {}))
        decision = self.coordinator.confirm_completion(chosen, self.now())
        self.retained[chosen] = plan.metadata
        for gone in decision.dropped:
            del self.retained[gone]
        replaced = {f.identity: f.handle for _state, f in all_files(plan.metadata) if f.shared and f.handle is not None}
        self.uploader.completed(chosen, replaced if plan.duplicates else {})
        for gone in decision.aborted:
            self.uploader.aborted(gone)
        self.storage.delete([handle.path for handle in decision.delete])
        self.base = plan.metadata
        self.compare_storage()

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.coordinator.ready()))
        decision = self.coordinator.fail(chosen, "declined", self.now())
        self.uploader.aborted(chosen)
        self.storage.delete([handle.path for handle in decision.delete])
        self.compare_storage()

    def compare_storage(self) -> None:
        """Every file that a retained checkpoint names is there and whole; without pending ones, nothing else is."""
        handles = {h for metadata in self.retained.values() for _key, h in keyed_files(metadata.subtasks)}
        assert verify_files(self.storage, handles, threads=1) == {}
        if not self.coordinator.ready():
            assert {file.path for file in self.storage.list()} == {handle.path for handle in handles}

    # --- what goes wrong -----------------------------------------------------------------------------

    @rule()
    def slot_dies(self) -> None:
        self.crash()
        self.replace_slot()

    @precondition(lambda self: self.coordinator.should_trigger(self.clock, self.checkpointable(), forced=True))
    @rule()
    def slot_dies_within_a_barrier(self) -> None:
        """The snapshot was frozen, its files never written to the end: for the next incarnation it does not exist."""
        gate = threading.Event()
        for operator in self.slot.operators.values():
            operator._writer.submit(gate.wait)
        self.last_id = self.coordinator.trigger(self.now(), self.clock, self.decided).id
        self.slot.freeze(Freeze(self.last_id))
        self.crash(gate)
        self.replace_slot()

    @precondition(lambda self: len(self.prepared) == len(UIDS))
    @rule(told=st.sets(st.sampled_from(UIDS)))
    def slot_dies_at_the_commit(self, told: set[str]) -> None:
        """The batch is decided; the slot, told or not, comes back with it."""
        for uid in told:
            self.slot.operators[uid].commit(self.batch)
        self.decide()
        self.crash()
        self.replace_slot()

    @rule(fresh_manager=st.booleans(), restarted=st.booleans())
    def host_dies(self, fresh_manager: bool, restarted: bool) -> None:
        """Without local files only what a completed checkpoint covers comes back; else the run goes back to it."""
        self.crash()
        if fresh_manager:
            self.uploader.close()
            del self.uploader
        if restarted:
            self.begin_generation()
            return
        shutil.rmtree(slot_folder(self.spec()))
        if self.decided > (self.base.batch_id if self.base else -1):
            with pytest.raises(SegmentsLostError):
                self.open_slot()
            self.begin_generation()
        else:
            self.replace_slot()

    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "delete"]))
    def local_file_is_damaged(self, data: st.DataObject, how: str) -> None:
        """The slot comes back with the right state from something else, or says that it cannot."""
        self.crash()
        files = sorted(file for file in self.local_files() if file.startswith("op-") and "/db-" not in file)
        if files:
            path = slot_folder(self.spec()) / data.draw(st.sampled_from(files), label="file")
            content = bytearray(path.read_bytes())
            if how == "delete" or not content:
                path.unlink()
            else:
                # Not drawn from the size: a compressed file's is not the same each time.
                at = data.draw(st.integers(0, (1 << 16) - 1), label="offset") % len(content)
                content[at] ^= 1 + data.draw(st.integers(0, 254), label="change")
                path.write_bytes(content[:at] if how == "cut" else content)
        try:
            self.replace_slot()
        except SegmentsLostError:
            self.begin_generation()
        except Corrupted:
            self.crash()
            self.begin_generation()

    def crash(self, gate: threading.Event | None = None) -> None:
        """A process that was killed writes nothing more, and leaves everything as it is."""
        for operator in self.slot.operators.values():
            operator._worker.shutdown(wait=gate is None, cancel_futures=gate is not None)
            operator._writer.shutdown(wait=gate is None, cancel_futures=gate is not None)
            # The next incarnation has a database of its own. The old one is closed only because RocksDB, when it is
            # thrown away open, waits seconds for a folder that is gone.
            operator._backend.close()
        if gate is not None:
            gate.set()

    def replace_slot(self) -> None:
        """The same generation, from local files where they are; the open batch goes into a new round."""
        decision = self.coordinator.fail_all("a slot was lost", self.now())
        self.storage.delete([handle.path for handle in decision.delete])
        self.open_slot()
        for gone in decision.failed:
            self.uploader.aborted(gone)
        self.round += 1
        self.slot.discard(BatchRound(self.batch, self.round))
        self.prepared, self.recorded = {}, {}
        self.compare_state()
        self.compare_status()

    def begin_generation(self) -> None:
        """A takeover: everything goes on from the newest completed checkpoint, under higher batch ids."""
        self.generation += 1
        shutil.rmtree(slot_folder(self.spec_folder()).parent, ignore_errors=True)
        newest = max(self.retained, default=None)
        self.base = self.retained[newest] if newest is not None else None
        self.committed = dict(self.frozen[newest]) if newest is not None else {uid: {} for uid in UIDS}
        self.decided = self.base.batch_id if self.base else -1
        self.begin_batch(first_batch(self.generation))
        self.coordinator = CheckpointCoordinator(
            interval=1.0,
            subtasks=[(uid, 0) for uid in UIDS],
            max_concurrent=2,
            num_retained=2,
            first_checkpoint_id=self.last_id + 1,
            start_time=self.clock,
            tolerable_failures=1 << 30,
        )
        self.coordinator.recover(list(self.retained.values()), [])
        # What an earlier generation left pending is nobody's any more.
        named = {handle.path for metadata in self.retained.values() for _key, handle in keyed_files(metadata.subtasks)}
        self.storage.delete([file.path for file in self.storage.list() if file.path not in named])
        self.open_slot()
        self.compare_state()

    def spec_folder(self) -> SlotSpec:
        return SlotSpec(self.run_info, self.generation, 0, 0, 1, GROUPS, self.backend, [], [], -1, -1)

    def spec(self) -> SlotSpec:
        restore = list(plan_restore(self.base)) if self.base else []
        restored_batch = self.base.batch_id if self.base else -1
        return msgspec.structs.replace(
            self.spec_folder(),
            incarnation=self.incarnation,
            operators=self.operators,
            restore=restore,
            restore_batch=restored_batch,
            decided_batch=self.decided,
        )

    def open_slot(self) -> None:
        self.incarnation += 1
        spec = self.spec()
        if not hasattr(self, "uploader"):
            self.uploader = SnapshotUploader(self.storage, JOB, upload_settings(), threads=2)
        for uid in UIDS:
            states = [state for state in spec.restore if state.operator == uid]
            self.uploader.start_from((uid, spec.index), states, spec.restore_owned)
        self.unreleased: list[int] = []
        self.slot = Slot(spec)

    # --- what must hold ------------------------------------------------------------------------------

    def compare_status(self) -> None:
        status = self.slot.status(NOTHING)
        assert status.committed == dict.fromkeys(UIDS, self.decided)
        assert {uid for uid, prepared in status.prepared.items() if prepared == (self.batch, self.round)} == set(
            self.prepared
        )

    def compare_state(self) -> None:
        """Every user's state, as the steps themselves read it; and no entry more than that."""
        probe = record_batches([(user, 0) for user in USERS], 100)
        for uid, operator in self.slot.operators.items():
            operator._applied.result()
            backend = operator._backend
            changes = ChangeSet(backend, 1 << 20, self.folder / "probe")
            try:
                entries = len(list(backend.scan(b"")))
                output = [
                    tuple(row.values())
                    for batch in operator.operator.run(iter(probe), changes, BatchInfo(0, 0))
                    for row in batch.to_pylist()  # type: ignore[union-attr]  # no step here has side outputs
                ]
            except Exception as error:
                if isinstance(error, StrandlineError) or "orruption" not in str(error):
                    raise
                raise Corrupted from error
            finally:
                changes.discard()
            state = {user: (n - 1, s) for user, n, s in output if n > 1}
            assert state == self.committed[uid]
            assert entries == len(state)

    def local_files(self) -> set[str]:
        """Everything in the slot's folder but open databases."""
        root = slot_folder(self.spec())
        return {
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.is_file() and "/db-" not in path.as_posix()
        }

    def teardown(self) -> None:
        try:
            if hasattr(self, "slot"):
                for operator in self.slot.operators.values():
                    operator.close()
                self.uploader.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class Corrupted(Exception):
    """RocksDB noticed a damaged block when it was read."""


class HeapSlots(SlotMachine):
    kind = "heap"


class RocksDBSlots(SlotMachine):
    kind = "rocksdb"


class FullSnapshotSlots(SlotMachine):
    kind = "rocksdb"
    incremental = False


SETTINGS = settings(
    max_examples=examples(30),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_the_segment_of_a_round_survives_an_older_one_that_was_still_held() -> None:
    machine = HeapSlots()
    try:
        machine.start(batch_memory=1 << 20)
        machine.work([("u1", 1)], 1, list(UIDS))
        machine.new_round(busy=True)
        machine.work([("u1", 2)], 1, list(UIDS))
        machine.slot_dies_at_the_commit({SUMS})
    finally:
        machine.teardown()


def test_snapshots_that_earlier_incarnations_left_go_with_the_next_one() -> None:
    machine = HeapSlots()
    try:
        machine.start(batch_memory=1 << 20)
        for _ in range(3):
            machine.whole_batch([("u1", 1)], 1)
            machine.whole_checkpoint()
            machine.slot_dies()
    finally:
        machine.teardown()


TestHeapSlot = HeapSlots.TestCase
TestHeapSlot.settings = SETTINGS
TestRocksDBSlot = RocksDBSlots.TestCase
TestRocksDBSlot.settings = SETTINGS
TestFullSnapshotSlot = FullSnapshotSlots.TestCase
TestFullSnapshotSlot.settings = settings(SETTINGS, max_examples=examples(10))
