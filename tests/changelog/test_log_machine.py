"""Random lives of a changelog: the real log of a task manager, real backends and storage, and plain dicts side by side.

The machine plays slots, batch function, coordinator and whatever is lost. After every loss the state that is rebuilt
must be that of the model at that batch; whatever a retained checkpoint names must be there, and restore to its model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strandline.changelog.durable import DurableLog
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, SubtaskState, file_paths
from strandline.errors import SegmentsLostError, StorageError, StrandlineError
from strandline.runtime import task_log
from strandline.runtime.local_files import OperatorFolder
from strandline.runtime.messages import (
    BackendSettings,
    ChangelogSettings,
    OperatorSpec,
    RunInfo,
    Sealed,
    SlotSpec,
    SnapshotReport,
    StorageSettings,
)
from strandline.runtime.rebuild import rebuild
from strandline.runtime.task_log import TaskLog
from strandline.runtime.uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.backend import StateBackend
from strandline.state.keys import key_group_range
from strandline.state.segment import SegmentHeader, write_segment
from strandline.storage.local import LocalStorage

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
JOB, UID, PARALLELISM, GROUPS = "machine", "op", 2, 4
KEYS = [number.to_bytes(1, "big") for number in range(8)]
CHANGES = st.lists(
    st.tuples(st.integers(0, PARALLELISM - 1), st.sampled_from(KEYS), st.none() | st.binary(max_size=3)), max_size=6
)
State = dict[bytes, bytes]


class Operator:
    """As much of one as a rebuild asks for."""

    uid = UID

    def states(self) -> list[Any]:
        return []


class Storage(LocalStorage):
    """Fails to write while it is `broken`."""

    broken = False

    def write(self, path: str, data: bytes) -> None:
        self._check(path)
        super().write(path, data)

    def upload(self, source: Path, path: str) -> None:
        self._check(path)
        super().upload(source, path)

    def _check(self, path: str) -> None:
        if self.broken:
            raise StorageError(f"{path}: broken")


class LogMachine(RuleBasedStateMachine):
    @initialize(backend=st.sampled_from(["heap", "rocksdb"]), retained=st.integers(1, 2))
    def begin(self, backend: str, retained: int) -> None:
        self.root = Path(tempfile.mkdtemp(dir=MEMORY))
        self.storage = Storage(str(self.root / "storage"))
        self.kind = backend
        self.num_retained = retained
        self.settings = ChangelogSettings(upload_timeout=20, upload_attempts=1, max_behind_bytes=1 << 30)
        self.generation = 0
        self.batch = -1
        self.round = 0
        self.models: list[State] = [{}, {}]
        self.history: dict[int, list[State]] = {-1: [{}, {}]}
        self.metadata: dict[int, CheckpointMetadata] = {}
        self.next_checkpoint = 1
        self.backends: list[StateBackend | None] = [None, None]
        self.log: TaskLog | None = None
        self.numbers = iter(range(1, 1 << 60))
        self._restart(None)

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        try:
            self._close()
            self._check_retained()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    # --- batches ---------------------------------------------------------------------------------

    @rule(changes=CHANGES, first_try=st.none() | CHANGES, hinted=st.booleans())
    def run_batch(self, changes: Any, first_try: Any, hinted: bool) -> None:
        """A batch, perhaps with a round that comes to nothing before it."""
        assert self.log is not None
        batch = max(self.batch, self.generation * 1000) + 1
        for tried in [first_try] * (first_try is not None) + [changes]:
            self.round += 1
            sealed = [self._seal(index, batch, tried) for index in range(PARALLELISM)]
            if hinted:
                for one in sealed:
                    self.log.offer(one)
            outcomes = self.log.settle(sealed)
            for index in range(PARALLELISM):
                self.durable.settled(batch, index, {UID: outcomes[UID, index]})
        self.durable.decided(batch, True)
        self.log.committed(batch)
        self.batch = batch
        for index, backend in enumerate(self.backends):
            assert backend is not None
            net = self._net(index, changes)
            backend.apply(list(net), list(net.values()))
            for key, value in net.items():
                if value is None:
                    self.models[index].pop(key, None)
                else:
                    self.models[index][key] = value
        self.history[batch] = [dict(model) for model in self.models]

    def _net(self, index: int, changes: Any) -> dict[bytes, bytes | None]:
        group = key_group_range(index, PARALLELISM, GROUPS).start.to_bytes(2, "big")
        return dict(sorted({group + key: value for slot, key, value in changes if slot == index}.items()))

    def _seal(self, index: int, batch: int, changes: Any) -> Sealed:
        net = self._net(index, changes)
        path = self._folder(index).segment(self.batch, batch)
        header = SegmentHeader(self.generation, batch, self.round, UID, index, 0)
        segment = write_segment(path, header, [(list(net), list(net.values()))] if net else [])
        return Sealed(UID, index, batch, self.round, str(path), segment.size_bytes, segment.entries)

    # --- storage, materialization, merging -------------------------------------------------------------

    @rule()
    def storage_breaks_or_is_mended(self) -> None:
        self.storage.broken = not self.storage.broken

    @rule(index=st.integers(0, PARALLELISM - 1))
    def materialize(self, index: int) -> None:
        assert self.log is not None
        try:
            self.log._materialize(index)
        except StorageError:
            assert self.storage.broken

    @rule()
    def merge(self) -> None:
        assert self.log is not None
        self.log._merge_if_many()

    def _freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        backend = self.backends[index]
        assert backend is not None
        folder, batch = self._folder(index), self.batch
        snapshot = backend.snapshot(folder.snapshot(number))

        def files() -> list[SubtaskSnapshot]:
            written = snapshot.write()
            folder.mark(number, batch, written)
            folder.drop_segments(batch)
            listed = [(f.name, str(f.path), f.size, f.identity, f.shared) for f in written]
            report = SnapshotReport(UID, listed, [], batch, 0.0, 0.0)
            groups = key_group_range(index, PARALLELISM, GROUPS)
            return [SubtaskSnapshot(index, groups, self.kind, self.kind == "rocksdb", report, 0.0)]

        return files

    # --- checkpoints -----------------------------------------------------------------------------

    @precondition(lambda self: self.batch in self.history and len(self.coordinator.pending()) < 2 and self.batch >= 0)
    @rule()
    def begin_checkpoint(self) -> None:
        assert self.log is not None
        pending = self.coordinator.trigger(0.0, 0.0, self.batch, forced=True)
        self.next_checkpoint = pending.id + 1
        try:
            barrier = self.log.barrier(pending.id)
            acks = self.log.acknowledge(barrier)
        except StorageError:
            assert self.storage.broken
            self._delete(self.coordinator.fail(pending.id, "storage is broken", 0.0).delete)
            self.log.aborted(pending.id)
            return
        for ack in acks:
            self.coordinator.acknowledge(pending.id, ack.state.operator, ack.state.subtask, ack)

    @precondition(lambda self: self.coordinator.ready())
    @rule(newest=st.booleans(), heard=st.booleans())
    def complete_checkpoint(self, newest: bool, heard: bool) -> None:
        assert self.log is not None
        number = self.coordinator.ready()[-1 if newest else 0]
        try:
            plan = self.coordinator.prepare_completion(
                number, 0.0, shape=self.shape, source=SourcePosition(0, {}), sink_files=()
            )
        except StrandlineError:
            # Only a task manager that missed news may name what is gone; it hears of it now, and the next one works.
            assert self.unheard is not None
            self._delete(self.coordinator.fail(number, "stranger", 0.0).delete)
            self.log.aborted(number)
            self.log.completed(self.unheard)
            self.unheard = None
            return
        decision = self.coordinator.confirm_completion(number, 0.0)
        self.metadata[number] = plan.metadata
        self.base = plan.metadata
        self.durable.truncate(plan.metadata.batch_id)
        if heard:
            self.log.completed(number)
        self.unheard = None if heard else number
        self._delete(decision.delete)
        for gone in decision.dropped:
            del self.metadata[gone]

    @precondition(lambda self: self.coordinator.pending())
    @rule()
    def fail_checkpoint(self) -> None:
        assert self.log is not None
        number = self.coordinator.pending()[0].id
        self._delete(self.coordinator.fail(number, "chance", 0.0).delete)
        self.log.aborted(number)

    def _delete(self, handles: Any) -> None:
        self.storage.delete([handle.path for handle in handles])

    # --- losses ----------------------------------------------------------------------------------

    @rule(index=st.integers(0, PARALLELISM - 1), files=st.booleans())
    def lose_slot(self, index: int, files: bool) -> None:
        """Its process is gone, and with it all its local files, or not."""
        self._give_up_pending()
        self._lose(index, files)
        self._bring_back([index])

    @rule(files=st.booleans())
    def lose_manager(self, files: bool) -> None:
        self._give_up_pending()
        assert self.log is not None
        self.log.close()
        for index in range(PARALLELISM):
            self._lose(index, files)
        self.log = self._new_log()
        self._bring_back(range(PARALLELISM))

    @rule()
    def restart(self) -> None:
        """The run goes back to its newest completed checkpoint, in a new generation."""
        self._restart(self.base)

    def _give_up_pending(self) -> None:
        self._delete(self.coordinator.fail_all("a slot was lost", 0.0).delete)

    def _lose(self, index: int, files: bool) -> None:
        backend = self.backends[index]
        if backend is not None:
            backend.close()
        if files:
            shutil.rmtree(self._folder(index).root)

    def _bring_back(self, indices: Any) -> None:
        assert self.log is not None
        specs = [self._spec(index) for index in indices]
        for spec in specs:
            self.log.slot_starts(spec)
        for spec in specs:
            try:
                self._rebuild(spec)
            except SegmentsLostError:
                assert not self.durable.complete  # only what storage refused to take can be lost
                self._restart(self.base)
                return

    def _rebuild(self, spec: SlotSpec) -> None:
        assert self.log is not None
        backend, _how = rebuild(spec, Operator(), self._folder(spec.index), None)  # type: ignore[arg-type]
        self.backends[spec.index] = backend
        self.log.slot_opened(spec.index, {UID: []})
        assert dict(backend.scan(b"")) == self.models[spec.index]

    def _restart(self, base: CheckpointMetadata | None) -> None:
        self.generation += 1
        self.coordinator = CheckpointCoordinator(
            interval=1.0,
            subtasks=[(UID, index) for index in range(PARALLELISM)],
            max_concurrent=2,
            num_retained=self.num_retained,
            first_checkpoint_id=self.next_checkpoint,
        )
        self.coordinator.recover(self.metadata.values())
        self.shape = JobShape(JOB, self.generation, PARALLELISM, GROUPS, (UID,))
        self.base = base
        self.unheard: int | None = None
        self.batch = base.batch_id if base else -1
        self.models = [dict(model) for model in self.history[self.batch]]
        self.durable = DurableLog(self.batch)
        for backend in self.backends:
            if backend is not None:
                backend.close()
        if self.log is None:
            self.log = self._new_log()
        self._bring_back(range(PARALLELISM))

    # --- what they need --------------------------------------------------------------------------

    def _new_log(self) -> TaskLog:
        log = TaskLog(self.storage, JOB, self.settings, SnapshotUploader(self.storage, JOB), self.root / "merge")
        log.start(self._freeze, lambda _index, _number: None)
        return log

    def _folder(self, index: int) -> OperatorFolder:
        return OperatorFolder(self.root / f"gen-{self.generation}" / f"slot-{index}")

    def _spec(self, index: int) -> SlotSpec:
        place = StorageSettings(str(self.root / "storage"), {})
        run = RunInfo(JOB, "run", "secret", [], str(self.root), "127.0.0.1", 5.0, place, [], changelog=self.settings)
        states: list[SubtaskState] = [s for s in self.base.subtasks if s.subtask == index] if self.base else []
        return SlotSpec(
            run=run,
            generation=self.generation,
            index=index,
            incarnation=next(self.numbers),
            parallelism=PARALLELISM,
            max_parallelism=GROUPS,
            backend=BackendSettings(self.kind, 1 << 20, 1 << 20, True, "none"),
            operators=[OperatorSpec(UID, b"")],
            restore=states,
            restore_batch=self.base.batch_id if self.base else -1,
            decided_batch=self.batch,
            log=self.durable.of(index),
            log_complete=self.durable.complete,
        )

    def _close(self) -> None:
        if self.log is not None:
            self.log.end()
            self.log.close()
        for backend in self.backends:
            if backend is not None:
                backend.close()

    def _check_retained(self) -> None:
        """Every retained checkpoint restores to its model, after everything else was cleaned away."""
        there = {file.path for file in self.storage.list(JOB)}
        for metadata in self.metadata.values():
            assert file_paths(metadata) <= there
            self.generation += 1
            self.base, self.batch = metadata, metadata.batch_id
            self.models = self.history[self.batch]
            self.durable = DurableLog(self.batch)
            for index in range(PARALLELISM):
                backend, _how = rebuild(self._spec(index), Operator(), self._folder(index), None)  # type: ignore[arg-type]
                assert dict(backend.scan(b"")) == self.models[index]
                backend.close()


@pytest.fixture(autouse=True)
def _merge_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_log, "MERGE_FROM", 3)
    monkeypatch.setattr(task_log, "MERGE_AT_LEAST", 2)
    monkeypatch.setattr("strandline.changelog.uploader.RETRY_DELAY", 0.0)


def test_whatever_happens_the_log_leads_to_the_state_of_the_model() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    started = time.monotonic()
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=int(os.environ.get("STRANDLINE_LOG_EXAMPLES", "60")),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{time.monotonic() - started:.1f} s")
