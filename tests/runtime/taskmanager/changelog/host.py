"""A task manager with its slots in this process: real slots, a real changelog, and no wires between them."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from strandline.checkpoint.pending import SubtaskAck
from strandline.checkpoint.steps import StepDescription
from strandline.errors import StrandlineError
from strandline.operators.base import BatchInfo, Operator, SubtaskInfo
from strandline.runtime.protocol.address import NOWHERE
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.exchange import ExchangeHeader
from strandline.runtime.protocol.folders import run_folder, slot_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    BatchTime,
    ChangelogSettings,
    OperatorSpec,
    RunInfo,
    Sealed,
    SegmentUpload,
    SlotSpec,
    StorageSettings,
    UploadSettings,
)
from strandline.runtime.protocol.slot_calls import BatchRound, Commit, Freeze, SnapshotRef
from strandline.runtime.slot.process import Slot
from strandline.runtime.taskmanager.changelog.changelog import Barrier, Changelog
from strandline.runtime.taskmanager.changelog.tuning import ChangelogTuning
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range
from strandline.storage import Storage

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where it exists, nothing waits for a disk: what a sync is good for is not what is tried here."""
JOB = "log"
PARALLELISM = 2
GROUPS = 4

QUICK = ChangelogTuning(upkeep_interval=0.02, retry_delay=0.01)
"""Does not wait long."""

Subtask = tuple[str, int]
State = dict[bytes, bytes]
Changes = Mapping[bytes, bytes | None]

_ROWS = pa.schema([("key", pa.binary()), ("value", pa.binary())])


class Puts(Operator):
    """Its rows are changes of its state."""

    output_schema = pa.schema([])
    key_columns = ()
    sorted_input = False

    def __init__(self, uid: str) -> None:
        self.uid = uid

    def open(self, info: SubtaskInfo) -> None: ...

    def states(self) -> list[Any]:
        return []

    def describe(self) -> StepDescription:
        return StepDescription(self.uid, "process", ())

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        for some in rows:
            changes.put_many(some.column(0).to_pylist(), some.column(1).to_pylist())
        return iter(())


def key(index: int, name: str) -> bytes:
    """A key that belongs to subtask `index`."""
    return key_group_range(index, PARALLELISM, GROUPS).start.to_bytes(2, "big") + name.encode()


def upload_settings(**changes: Any) -> UploadSettings:
    """The options' defaults, but for `changes`."""
    defaults = {"inline_bytes": 20 << 10, "small_bytes": 1 << 20, "max_amplification": 2.0}
    return UploadSettings(**{**defaults, **changes})


def changelog_settings(**changes: Any) -> ChangelogSettings:
    """Nothing is materialized but on demand; else the options' defaults, but for `changes`."""
    defaults = {
        "upload_timeout": 5.0,
        "upload_attempts": 1,
        "max_behind_bytes": 100 << 20,
        "materialization_interval": 1e9,
        "max_amplification": 1.5,
        "storage": None,
    }
    return ChangelogSettings(**{**defaults, **changes})


def run_info(
    folder: Path, storage: Storage, changelog: ChangelogSettings | None, run_id: str = "run", inline_bytes: int = 0
) -> RunInfo:
    return RunInfo(
        job=JOB,
        run_id=run_id,
        secret="secret",
        coordinator=NOWHERE,
        local_dir=str(folder / "local"),
        bind_host="127.0.0.1",
        heartbeat_timeout=8.0,
        storage=StorageSettings(storage.url, {}),
        sys_path=[],
        uploads=upload_settings(inline_bytes=inline_bytes),
        changelog=changelog,
    )


def slot_spec(run: RunInfo, index: int, uids: tuple[str, ...] = ("op",), kind: str = "heap", **more: Any) -> SlotSpec:
    """A slot that begins without state, but for what `more` says."""
    plain = SlotSpec(
        run=run,
        generation=0,
        index=index,
        incarnation=1,
        parallelism=PARALLELISM,
        max_parallelism=GROUPS,
        backend=BackendSettings(kind, 8 << 20, 1 << 20, True, "lz4"),
        operators=[OperatorSpec(uid, pickle.dumps(Puts(uid))) for uid in uids],
        restore=[],
        restore_batch=-1,
        decided_batch=-1,
        segments_complete=True,
    )
    return msgspec.structs.replace(plain, **more)


class HostedSlot(Slot):
    """A slot that tells of its segments by a call."""

    def __init__(self, spec: SlotSpec, tell: Callable[[Sealed], None]) -> None:
        self._tell = tell
        super().__init__(spec)

    def _tell_sealed(self, sealed: Sealed) -> None:
        self._tell(sealed)

    def contents(self) -> dict[Subtask, State]:
        """The whole state, as committed."""
        found = {}
        for uid, operator in self.operators.items():
            operator._applied.result()
            found[uid, self.spec.index] = dict(operator._backend.scan(b""))
        return found

    def kill(self) -> None:
        """What a killed process leaves: its files, as they are."""
        for operator in self.operators.values():
            operator._worker.shutdown()
            operator._writer.shutdown()
            # The next incarnation has a database of its own. RocksDB waits for seconds when it is thrown away open.
            operator._backend.close()


class Host:
    """Does what `TaskManager` does with its slots and its changelog."""

    def __init__(self, run: RunInfo, storage: Storage, tuning: ChangelogTuning = QUICK) -> None:
        self.run = run
        self.hints = True
        self.failures: list[StrandlineError] = []
        self.slots: dict[int, HostedSlot] = {}
        self.uploader = SnapshotUploader(storage, JOB, run.uploads, threads=1)
        scratch = run_folder(run.local_dir, run.job, run.run_id) / f"log-{time.time_ns()}"
        self._changelog = (
            Changelog(
                storage,
                JOB,
                run.changelog,
                self.uploader,
                self,
                scratch,
                tuning=tuning,
                on_failure=self.failures.append,
            )
            if run.changelog
            else None
        )
        if self._changelog is not None:
            self._changelog.start()

    @property
    def has_changelog(self) -> bool:
        return self._changelog is not None

    @property
    def changelog(self) -> Changelog:
        assert self._changelog is not None
        return self._changelog

    # --- slots ---------------------------------------------------------------------------------------

    def start(self, *specs: SlotSpec) -> None:
        for spec in specs:
            old = self.slots.pop(spec.index, None)
            if old is not None:
                old.kill()
            if self._changelog is not None:
                self._changelog.slot_starting(spec)
            else:
                for op in spec.operators:
                    states = [state for state in spec.restore if state.operator == op.uid]
                    self.uploader.start_from((op.uid, spec.index), states, spec.restore_owned)
        for spec in specs:
            slot = self.slots[spec.index] = HostedSlot(spec, self._sealed)
            if self._changelog is not None:
                described = {uid: op.described_states() for uid, op in slot.operators.items()}
                self._changelog.slot_opened(spec, described, {one.operator for one in slot.rebuilt if one.changed})

    def _sealed(self, sealed: Sealed) -> None:
        if self._changelog is not None and self.hints:
            self._changelog.queue.offer(sealed)

    def freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        slot = self.slots[index]
        slot.freeze(Freeze(number))
        return lambda: self._snapshots(slot, number)

    def _snapshots(self, slot: HostedSlot, number: int) -> list[SubtaskSnapshot]:
        spec = slot.spec
        groups = key_group_range(spec.index, PARALLELISM, GROUPS)
        incremental = spec.backend.incremental and spec.backend.kind == "rocksdb"
        reports = slot.report(SnapshotRef(number))
        return [SubtaskSnapshot(spec.index, groups, spec.backend.kind, incremental, one, 0.0) for one in reports]

    def release(self, index: int, number: int) -> None:
        if index in self.slots:
            self.slots[index].release(SnapshotRef(number))

    def compact(self, index: int) -> None:
        self.slots[index].compact(NOTHING)

    def contents(self) -> dict[Subtask, State]:
        return {subtask: state for slot in self.slots.values() for subtask, state in slot.contents().items()}

    # --- batches -------------------------------------------------------------------------------------

    def prepare(self, batch: int, round_: int, changes: Mapping[Subtask, Changes]) -> None:
        """Every operator of every slot works on the batch; what `changes` does not name has no rows."""
        for index, slot in self.slots.items():
            for uid, operator in slot.operators.items():
                rows = changes.get((uid, index), {})
                header = ExchangeHeader(slot.spec.generation, batch, round_, uid, index, 0, BatchTime(0))
                columns = [pa.array(list(rows), pa.binary()), pa.array(list(rows.values()), pa.binary())]
                arrow = pa.RecordBatch.from_arrays(columns, schema=_ROWS)
                fresh = partial(slot._check_fresh, header, operator)
                operator.work(header, partial(iter, [arrow]), lambda: False, fresh)

    def discard(self, batch: int, round_: int) -> None:
        for slot in self.slots.values():
            slot.discard(BatchRound(batch, round_))

    def wait_until_durable(self, batch: int, round_: int) -> dict[int, dict[str, SegmentUpload]]:
        if self._changelog is None:
            return {index: {} for index in self.slots}
        sealed = [
            one
            for slot in self.slots.values()
            for one in slot.status(NOTHING).sealed
            if (one.batch, one.round) == (batch, round_)
        ]
        answers: dict[int, dict[str, SegmentUpload]] = {index: {} for index in self.slots}
        for (operator, index), outcome in self._changelog.queue.wait_until_durable(sealed).items():
            answers[index][operator] = outcome
        return answers

    def commit(self, batch: int) -> None:
        if self._changelog is not None:
            self._changelog.queue.commit(batch)
        for slot in self.slots.values():
            slot.commit(Commit(batch))

    def batch(self, batch: int, changes: Mapping[Subtask, Changes], round_: int = 0) -> dict[Subtask, Any]:
        """A whole batch; what `wait_until_durable` said of each subtask."""
        self.prepare(batch, round_, changes)
        outcomes = self.wait_until_durable(batch, round_)
        self.commit(batch)
        return {(uid, index): outcome for index, log in outcomes.items() for uid, outcome in log.items()}

    # --- checkpoints ---------------------------------------------------------------------------------

    def acknowledged(self, checkpoint_id: int) -> list[SubtaskAck]:
        """Barrier and acknowledgement at once."""
        return self.changelog.acknowledge(self.changelog.barrier(checkpoint_id))

    def upload_snapshots(self, checkpoint_id: int) -> list[SubtaskAck]:
        """A checkpoint without a changelog."""
        snapshots = [one for index in self.slots for one in self.freeze(index, checkpoint_id)()]
        try:
            return self.uploader.upload(checkpoint_id, snapshots)
        finally:
            for index in self.slots:
                self.release(index, checkpoint_id)

    def acknowledge(self, barrier: Barrier) -> list[SubtaskAck]:
        return self.changelog.acknowledge(barrier)

    # --- the end -------------------------------------------------------------------------------------

    def kill(self, local_files: bool = True) -> None:
        """It dies with all its slots; also its local files, if said so."""
        if self._changelog is not None:
            # Its threads end first: in this process, unlike a real one, they would go on without the slots.
            self._changelog.close()
            self._changelog.join()
        for slot in self.slots.values():
            slot.kill()
            if not local_files:
                shutil.rmtree(slot_folder(slot.spec), ignore_errors=True)
        self.slots.clear()
        self.uploader.close()

    def end(self) -> None:
        """The run ends in an orderly way."""
        if self._changelog is not None:
            self._changelog.end()
        self.kill()
