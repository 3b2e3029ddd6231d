"""Coordinator and registry under concurrency, failures, lost notifications and crashes, against a naive model."""

from __future__ import annotations

import itertools

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strandline.checkpoint import (
    CheckpointCoordinator,
    CheckpointMetadata,
    FileHandle,
    JobLog,
    JobShape,
    SourcePosition,
    StateFile,
    SubtaskAck,
    SubtaskState,
)
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import decode, encode, keyed_files
from tests.examples import examples

PARALLELISM = 2
SUBTASKS = [("count", index) for index in range(PARALLELISM)]
OUTCOMES = st.sampled_from(
    ["completes", "completes", "completes", "completes", "metadata fails", "crash before entry", "crash after entry"]
)
HEARD = st.sets(st.integers(0, PARALLELISM - 1))
CHANGES = st.lists(st.integers(0, PARALLELISM - 1), max_size=3)


class Slot:
    """A subtask with its local SSTs, and what it believes about uploaded ones."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ssts: set[str] = set()
        self.confirmed: dict[str, FileHandle] = {}
        self.acked: dict[int, dict[str, FileHandle]] = {}
        self.snapshots: dict[int, set[str]] = {}

    def restore(self, state: SubtaskState | None) -> None:
        self.acked, self.snapshots = {}, {}
        files = state.files if state is not None else ()
        self.confirmed = {file.identity: file.handle for file in files if file.shared and file.handle is not None}
        self.ssts = set(self.confirmed)


class CoordinatorMachine(RuleBasedStateMachine):
    """Storage is a set of paths. The model knows which paths each retained checkpoint's metadata names."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = itertools.count(1)
        self.names = itertools.count(1)
        self.batch = 0
        self.slots = [Slot(index) for index in range(PARALLELISM)]
        self.storage: set[str] = set()
        self.orphans: set[str] = set()
        self.metadata: dict[int, bytes] = {}
        self.log = JobLog().apply(JobLog().takeover_entry("driver", 0.0, "0"))
        self.start(1)

    def start(self, first_id: int) -> None:
        self.coordinator = CheckpointCoordinator(
            interval=0.0,
            subtasks=SUBTASKS,
            max_concurrent=3,
            tolerable_failures=1_000,
            num_retained=2,
            first_checkpoint_id=first_id,
        )
        self.sent: list[tuple[int, int, SubtaskAck]] = []

    def delete(self, handles: tuple[FileHandle, ...]) -> None:
        for handle in handles:
            assert handle.path not in self.needed(), f"{handle.path} is in use"
            self.storage.discard(handle.path)
            self.orphans.discard(handle.path)

    def retained(self) -> list[CheckpointMetadata]:
        return [decode(self.metadata[id], f"chk-{id}", Home("job", id)) for id in self.log.retained]

    def needed(self) -> set[str]:
        return {handle.path for metadata in self.retained() for _key, handle in keyed_files(metadata.subtasks)}

    # --- the job goes on

    @rule(slot=st.integers(0, PARALLELISM - 1))
    def flush(self, slot: int) -> None:
        self.slots[slot].ssts.add(f"sst-{next(self.names)}")

    @rule(slot=st.integers(0, PARALLELISM - 1), data=st.data())
    def compact(self, slot: int, data: st.DataObject) -> None:
        ssts = self.slots[slot].ssts
        if ssts:
            merged = data.draw(st.sets(st.sampled_from(sorted(ssts)), min_size=1))
            ssts -= merged
            ssts.add(f"sst-{next(self.names)}")

    # --- checkpoints

    @precondition(lambda self: len(self.coordinator.pending()) < 3)
    @rule()
    def trigger(self) -> None:
        self.batch += 1
        now = float(next(self.clock))
        assert self.coordinator.should_trigger(now, self.batch)
        pending = self.coordinator.trigger(now, self.coordinator.due_at(), self.batch)
        for slot in self.slots:
            slot.snapshots[pending.id] = set(slot.ssts)

    @precondition(lambda self: any(slot.snapshots for slot in self.slots))
    @rule(data=st.data())
    def upload_and_acknowledge(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.slots if slot.snapshots]), label="slot")
        self.upload(slot, data.draw(st.sampled_from(sorted(slot.snapshots)), label="checkpoint"))

    @precondition(lambda self: any(slot.snapshots for slot in self.slots))
    @rule(data=st.data())
    def everyone_acknowledges(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted({id for slot in self.slots for id in slot.snapshots})))
        for slot in self.slots:
            if id in slot.snapshots:
                self.upload(slot, id)

    def upload(self, slot: Slot, id: int) -> None:
        files, uploaded = [], []
        for identity in sorted(slot.snapshots.pop(id)):
            handle = slot.confirmed.get(identity)
            if handle is None:
                handle = FileHandle(f"job/shared/{next(self.names)}", 1, "crc32:0")
                uploaded.append(handle)
            files.append(StateFile(identity, identity, True, handle))
        private = FileHandle(f"job/chk-{id}/{next(self.names)}", 1, "crc32:0")
        files.append(StateFile("MANIFEST", f"manifest-{id}", False, private))
        uploaded.append(private)
        self.storage.update(handle.path for handle in uploaded)
        slot.acked[id] = {file.identity: file.handle for file in files if file.shared and file.handle is not None}
        ack = SubtaskAck(
            state=SubtaskState("count", slot.index, slot.index, slot.index + 1, "rocksdb", True, tuple(files)),
            uploaded=tuple(uploaded),
            barrier_time=0.0,
            ack_time=0.0,
            sync_ms=0.0,
            async_ms=0.0,
            checkpointed_bytes=0,
            full_bytes=0,
        )
        self.sent.append((id, slot.index, ack))
        self.acknowledge(id, slot.index, ack)

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data())
    def repeat_an_acknowledgement(self, data: st.DataObject) -> None:
        self.acknowledge(*data.draw(st.sampled_from(self.sent)))

    def acknowledge(self, id: int, subtask: int, ack: SubtaskAck) -> None:
        decision = self.coordinator.acknowledge(id, "count", subtask, ack)
        pending = {path for one in self.coordinator.pending() for path in one.uploaded_paths}
        assert pending.isdisjoint(handle.path for handle in decision.delete)
        self.delete(decision.delete)

    @precondition(lambda self: bool(self.coordinator.pending()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        pending = data.draw(st.sampled_from(self.coordinator.pending()))
        self.delete(self.coordinator.fail(pending.id, "some reason", float(next(self.clock))).delete)

    @precondition(lambda self: bool(self.coordinator.ready()))
    @rule(data=st.data(), outcome=OUTCOMES, heard=HEARD)
    def complete(self, data: st.DataObject, outcome: str, heard: set[int]) -> None:
        self.complete_one(data.draw(st.sampled_from(self.coordinator.ready())), outcome, heard)

    @precondition(lambda self: len(self.coordinator.pending()) < 3)
    @rule(changes=CHANGES, outcome=OUTCOMES, heard=HEARD)
    def take_a_whole_checkpoint(self, changes: list[int], outcome: str, heard: set[int]) -> None:
        """From the barrier to completion, over the heads of checkpoints that are still pending."""
        for slot in changes:
            self.flush(slot)
        self.trigger()
        id = self.coordinator.pending()[-1].id
        for one in self.slots:
            self.upload(one, id)
        self.complete_one(id, outcome, heard)

    @precondition(lambda self: len(self.coordinator.pending()) < 2)
    @rule(changes=CHANGES, outcomes=st.tuples(OUTCOMES, OUTCOMES), heard=st.tuples(HEARD, HEARD), order=st.booleans())
    def take_two_overlapping_checkpoints(
        self, changes: list[int], outcomes: tuple[str, str], heard: tuple[set[int], set[int]], order: bool
    ) -> None:
        """Both upload before either is confirmed, so both upload the same files; either may complete first."""
        for slot in changes:
            self.flush(slot)
        self.trigger()
        self.trigger()
        ids = [pending.id for pending in self.coordinator.pending()[-2:]]
        for id in ids:
            for one in self.slots:
                self.upload(one, id)
        for id, outcome, hears in zip(ids if order else ids[::-1], outcomes, heard, strict=True):
            if id in self.coordinator.ready():
                self.complete_one(id, outcome, hears)

    def complete_one(self, id: int, outcome: str, heard: set[int]) -> None:
        now = float(next(self.clock))
        plan = self.coordinator.prepare_completion(
            id, now, shape=JobShape("job", 1, PARALLELISM, 8, ("count",)), source=SourcePosition(self.batch, {})
        )
        named = {handle.path for handle in dict(keyed_files(plan.metadata.subtasks)).values()}
        event(f"completion: {outcome}")
        event(f"duplicates: {bool(plan.duplicates)}, drops: {bool(plan.dropped)}")
        assert named <= self.storage, "a completed checkpoint refers only to files that are there"
        assert named.isdisjoint(handle.path for handle in plan.duplicates)
        if outcome == "metadata fails":
            self.delete(self.coordinator.fail(id, "cannot write", now).delete)
            return
        self.metadata[id] = encode(plan.metadata)
        if outcome == "crash before entry":
            self.crash()
            return
        entry = self.log.completion_entry(
            id, f"chk-{id}", plan.metadata.batch_id, now, "n", plan.retained, plan.dropped
        )
        self.log = self.log.apply(entry)
        if outcome == "crash after entry":
            self.crash()
            return
        decision = self.coordinator.confirm_completion(id, now)
        assert (decision.retained, decision.dropped) == (plan.retained, plan.dropped)
        self.delete(decision.delete)
        for gone in decision.dropped:
            del self.metadata[gone]
        for index in heard:
            slot = self.slots[index]
            slot.confirmed = slot.acked[id]

    @precondition(lambda self: len(self.log.retained) == 2)
    @rule()
    def crash_between_checkpoints(self) -> None:
        self.crash()

    def crash(self) -> None:
        """A new driver: everything is forgotten but the storage and the log."""
        self.log = self.log.apply(self.log.takeover_entry("driver", 0.0, "n"))
        first_id = max([self.log.last_checkpoint_id, *self.metadata]) + 1
        self.start(first_id)
        leftovers = [
            decode(self.metadata[id], f"chk-{id}", Home("job", id)) for id in self.log.dropped if id in self.metadata
        ]
        retained = self.retained()
        self.delete(self.coordinator.recover(retained, leftovers))
        assert self.coordinator.retained == self.log.retained
        for gone in [id for id in self.metadata if id not in self.log.retained]:
            del self.metadata[gone]
        self.orphans = self.storage - self.needed()
        newest = {state.subtask: state for state in retained[-1].subtasks} if retained else {}
        for slot in self.slots:
            slot.restore(newest.get(slot.index))

    # --- what must hold

    @invariant()
    def every_file_of_a_retained_checkpoint_is_there(self) -> None:
        assert self.needed() <= self.storage

    @invariant()
    def the_registry_knows_exactly_the_retained_checkpoints(self) -> None:
        assert self.coordinator.registry.checkpoints() == self.log.retained

    def teardown(self) -> None:
        self.delete(self.coordinator.fail_all("the end", 0.0).delete)
        self.log = JobLog()
        self.delete(self.coordinator.drop_all().delete)
        assert len(self.coordinator.registry) == 0
        assert self.storage == self.orphans, "only what a crash left behind may be left"


CoordinatorMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestCoordinatorMachine = CoordinatorMachine.TestCase
