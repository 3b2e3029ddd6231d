"""Coordinator, registry and log over a storage that fails at any call, with drivers that crash between any two steps.

A driver here does what the runtime does, one storage call at a time. Each step of a completion and of a takeover is a
`yield`, where the machine may crash it, leave it behind as a fenced driver that goes on later, or do something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

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
    Verdict,
    judge_conflict,
)
from strandline.checkpoint.home import Home
from strandline.checkpoint.job_log import Entry, decode_entry, encode_entry
from strandline.checkpoint.metadata import decode, encode, keyed_files
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    FencedError,
    NotFoundError,
    StorageError,
    UnknownOutcomeError,
)
from strandline.storage import JobPaths
from tests.examples import examples

PARALLELISM = 2
SUBTASKS = [("count", index) for index in range(PARALLELISM)]
SLOTS = st.integers(0, PARALLELISM - 1)
CONCURRENT = 2
RETAINED = 2
PATHS = JobPaths("job")

CHANGES = st.lists(st.tuples(SLOTS, st.booleans()), max_size=3)
"""Which slots flush a new SST, and whether a compaction replaces an older one with it."""
FAULTS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["before", "unknown", "after"])), max_size=1)
"""Which of the next storage calls fails, and whether it took effect."""
HEARD = st.sets(SLOTS)
ENDS = st.sampled_from([("go on", 100)] * 3 + [(how, at) for how in ("crash", "fenced", "wait") for at in range(7)])
"""After how many steps of a completion something else comes in between, and what."""
STEPS = st.sampled_from([100, 100, *range(6)])


class Storage:
    """Files by path. A planned fault hits one of the next calls, before or after it took effect."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.writers: dict[str, int] = {}
        self.faults: dict[int, str] = {}
        self.may_stay: set[str] = set()
        """Files that a fault or a crash left behind: only for them is it right that nobody refers to them."""
        self.check_delete: Callable[[str], None] = lambda _path: None
        self._calls = 0

    def plan_fault(self, distance: int, kind: str) -> None:
        self.faults[self._calls + distance] = kind

    def create(self, path: str, data: bytes, generation: int) -> None:
        """Fails for good before, or with an unknown outcome before or after it took effect."""
        fault = self._call()
        if fault == "before":
            raise StorageError(path)
        if fault != "unknown" and path in self.files:
            raise AlreadyExistsError(path)
        if fault != "unknown":
            self.files[path] = data
            self.writers[path] = generation
        if fault is not None:
            raise UnknownOutcomeError(path)

    def delete(self, paths: Iterable[str]) -> None:
        """A fault may come when some of the files are gone."""
        for path in paths:
            fault = self._call()
            if fault in ("before", "unknown"):
                self.may_stay.update(paths)
                raise StorageError(path)
            if path in self.files:
                self.check_delete(path)
                del self.files[path]
            if fault is not None:
                self.may_stay.update(paths)
                raise StorageError(path)

    def read(self, path: str) -> bytes:
        if self._call() is not None:
            raise StorageError(path)
        if path not in self.files:  # a driver that was fenced while it took over reads what its successor has dropped
            raise NotFoundError(path)
        return self.files[path]

    def _call(self) -> str | None:
        self._calls += 1
        return self.faults.pop(self._calls, None)


class Slot:
    """A subtask with its local SSTs, and what it believes about uploaded ones."""

    def __init__(self, index: int, state: SubtaskState | None) -> None:
        self.index = index
        self.held: dict[int, dict[str, FileHandle]] = {}
        self.snapshots: dict[int, set[str]] = {}
        files = state.files if state is not None else ()
        self.confirmed = {file.identity: file.handle for file in files if file.shared and file.handle is not None}
        self.ssts = set(self.confirmed)

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        held = self.held.pop(checkpoint_id, None)
        if held is not None:
            self.confirmed = {identity: replaced.get(identity, handle) for identity, handle in held.items()}
        self.held = {id: files for id, files in self.held.items() if id > checkpoint_id}


class Driver:
    """One generation: what the runtime does with the coordinator's decisions, as steps."""

    def __init__(self, storage: Storage, clock: Iterator[int], names: Iterator[int]) -> None:
        self.storage = storage
        self.clock = clock
        self.names = names
        self.log = JobLog()
        self.coordinator: CheckpointCoordinator | None = None
        self.slots: list[Slot] = []
        self.sent: list[tuple[int, SubtaskAck]] = []
        self.told: list[tuple[int, dict[str, FileHandle]]] = []
        self.work: Iterator[str] = self._take_over()
        self.at = "begin"

    @property
    def now(self) -> float:
        return float(next(self.clock))

    @property
    def idle(self) -> bool:
        return self.at == "idle"

    @property
    def ended(self) -> bool:
        return self.at in ("fenced", "failed")

    def step(self) -> None:
        """Go on to the next step; a storage that fails where the runtime gives up ends the generation."""
        try:
            self.at = next(self.work, "idle")
        except FencedError:
            self.at = "fenced"
        except StorageError:
            self.at = "failed"

    # --- beginning

    def _take_over(self) -> Iterator[str]:
        while True:
            self.log = self._load()
            yield "log read"
            entry = self.log.takeover_entry("driver", self.now, f"n{next(self.names)}")
            if self._create(entry) is Verdict.OURS:
                break
        self.log = self.log.apply(entry)
        yield "taken over"
        numbers = [number for path in self.storage.files if (number := PATHS.parse_metadata(path)) is not None]
        coordinator = CheckpointCoordinator(
            interval=0.0,
            subtasks=SUBTASKS,
            max_concurrent=CONCURRENT,
            tolerable_failures=1_000,
            num_retained=RETAINED,
            first_checkpoint_id=max([self.log.next_checkpoint_id, *(number + 1 for number in numbers)]),
        )
        retained = [self._metadata(number) for number in reversed(self.log.retained)]
        gone = [self._metadata(number) for number in self.log.dropped if PATHS.metadata(number) in self.storage.files]
        leftovers = coordinator.recover(retained, gone)
        assert coordinator.retained == self.log.retained
        yield "registry rebuilt"
        self.storage.delete([handle.path for handle in leftovers])
        yield "leftovers deleted"
        self.storage.delete([PATHS.metadata(metadata.checkpoint_id) for metadata in gone])
        newest = {state.subtask: state for state in retained[0].subtasks} if retained else {}
        self.slots = [Slot(index, newest.get(index)) for index in range(PARALLELISM)]
        self.coordinator = coordinator

    def _load(self) -> JobLog:
        numbers = [number for path in self.storage.files if (number := PATHS.parse_log_entry(path)) is not None]
        return JobLog.replay([self._entry(max(numbers))] if numbers else [])

    def _entry(self, number: int) -> Entry:
        return decode_entry(self.storage.read(PATHS.log_entry(number)), str(number))

    def _metadata(self, number: int) -> CheckpointMetadata:
        return decode(self.storage.read(PATHS.metadata(number)), f"chk-{number}", Home(PATHS.job, number))

    def _create(self, entry: Entry) -> Verdict:
        path = PATHS.log_entry(entry.sequence)
        while True:
            try:
                self.storage.create(path, encode_entry(entry), entry.generation)
                return Verdict.OURS
            except AlreadyExistsError:
                return judge_conflict(entry.nonce, self._entry(entry.sequence))
            except UnknownOutcomeError:
                if path in self.storage.files:
                    return judge_conflict(entry.nonce, self._entry(entry.sequence))

    # --- snapshots

    def upload(self, slot: Slot, id: int) -> SubtaskAck | None:
        """Make a snapshot durable; None if that failed, and the slot declined."""
        files: list[StateFile] = []
        uploaded: list[FileHandle] = []
        try:
            for identity in sorted(slot.snapshots.pop(id)):
                handle = slot.confirmed.get(identity)
                if handle is None:
                    handle = self._put(PATHS.shared(str(next(self.names))), uploaded)
                files.append(StateFile(identity, identity, True, handle))
            private = self._put(PATHS.exclusive(id, str(next(self.names))), uploaded)
            files.append(StateFile("MANIFEST", f"manifest-{id}", False, private))
        except StorageError:
            self.delete(uploaded)
            return None
        slot.held[id] = {file.identity: file.handle for file in files if file.shared and file.handle is not None}
        return SubtaskAck(
            state=SubtaskState("count", slot.index, slot.index, slot.index + 1, "rocksdb", True, tuple(files)),
            uploaded=tuple(uploaded),
            barrier_time=0.0,
            ack_time=0.0,
            sync_ms=0.0,
            async_ms=0.0,
            checkpointed_bytes=0,
            full_bytes=0,
        )

    def _put(self, path: str, uploaded: list[FileHandle]) -> FileHandle:
        handle = FileHandle(path, 1, "crc32:0")
        uploaded.append(handle)
        self.storage.create(path, b"x", self.log.generation)
        return handle

    # --- completion

    def complete(self, id: int, record: Callable[[CheckpointMetadata, set[str]], None]) -> None:
        self.work = self._complete(id, record)
        self.at = "acknowledged"

    def _complete(self, id: int, record: Callable[[CheckpointMetadata, set[str]], None]) -> Iterator[str]:
        coordinator = self.coordinator
        assert coordinator is not None
        own = {path for pending in coordinator.pending() if pending.id == id for path in pending.uploaded_paths}
        path = PATHS.metadata(id)
        try:
            plan = coordinator.prepare_completion(
                id,
                self.now,
                shape=JobShape("job", self.log.generation, PARALLELISM, 8, ("count",)),
                source=SourcePosition(id, {}),
            )
            yield "registered"
            self._write_metadata(path, encode(plan.metadata))
        except FencedError:
            raise
        except (StorageError, CheckpointError) as error:
            event(f"given up: {type(error).__name__}")
            self.storage.may_stay.add(path)
            self.delete(coordinator.fail(id, str(error), self.now).delete)
            return
        yield "metadata written"
        entry = self.log.completion_entry(
            id, path, plan.metadata.batch_id, self.now, f"n{next(self.names)}", plan.retained, plan.dropped
        )
        if self._create(entry) is Verdict.FENCED:
            raise FencedError("another driver was first")
        self.log = self.log.apply(entry)
        record(plan.metadata, own)
        yield "entry won"
        if self.storage._call() is not None:
            raise StorageError("publishing failed for good")
        yield "published"
        decision = coordinator.confirm_completion(id, self.now)
        assert (decision.retained, decision.dropped) == (plan.retained, plan.dropped)
        again = coordinator.confirm_completion(id, self.now)
        assert not again.delete
        assert not again.dropped
        handles = {file.identity: file.handle for state in plan.metadata.subtasks for file in state.files}
        self.told.append((id, {identity: handle for identity, handle in handles.items() if handle is not None}))
        yield "confirmed"
        self.delete(decision.delete)
        yield "files deleted"
        self.storage.delete([PATHS.metadata(gone) for gone in decision.dropped])

    def _write_metadata(self, path: str, data: bytes) -> None:
        try:
            self.storage.create(path, data, self.log.generation)
        except AlreadyExistsError:
            if PATHS.log_entry(self.log.next_sequence) in self.storage.files:
                raise FencedError("entries of another driver follow") from None
            raise CheckpointError("written by another driver") from None

    def delete(self, handles: Iterable[FileHandle]) -> None:
        """Deleting is tidying up: what cannot be deleted is an orphan."""
        paths = [handle.path for handle in handles]
        try:
            self.storage.delete(paths)
        except StorageError:
            event("a deletion failed")
            self.storage.may_stay.update(paths)


class StorageMachine(RuleBasedStateMachine):
    """One living driver, and those it took the job from, which may not have noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = itertools.count(1)
        self.names = itertools.count(1)
        self.storage = Storage()
        self.storage.check_delete = self.nobody_needs
        self.retained: dict[int, set[str]] = {}
        """The model: the files of every checkpoint that the log retains."""
        self.fenced: list[Driver] = []
        self.driver = self.new_driver()
        self.go_on(100)

    def new_driver(self) -> Driver:
        return Driver(self.storage, self.clock, self.names)

    def nobody_needs(self, path: str) -> None:
        assert path not in self.needed(), f"{path} is deleted, but a retained checkpoint refers to it"

    def needed(self) -> set[str]:
        files = set().union(*self.retained.values()) if self.retained else set()
        return files | {PATHS.metadata(number) for number in self.retained}

    def won(self, metadata: CheckpointMetadata, own: set[str]) -> None:
        """A log entry was won: from here on, this checkpoint counts."""
        named = {handle.path for handle in dict(keyed_files(metadata.subtasks)).values()}
        confirmed = own.union(*self.retained.values())
        assert named <= confirmed, "a completed checkpoint refers to a file that was never confirmed"
        self.retained[metadata.checkpoint_id] = named
        self.retained = {id: self.retained[id] for id in sorted(self.retained)[-RETAINED:]}
        event("completed")

    @property
    def coordinator(self) -> CheckpointCoordinator:
        assert self.driver.coordinator is not None
        return self.driver.coordinator

    def running(self) -> bool:
        return self.driver.coordinator is not None and not self.driver.ended

    # --- the job goes on

    def change(self, changes: list[tuple[int, bool]]) -> None:
        for index, compaction in changes:
            ssts = self.driver.slots[index].ssts
            if compaction and ssts:
                ssts.remove(min(ssts))
            ssts.add(f"sst-{next(self.names)}")

    def can_trigger(self) -> bool:
        return self.running() and len(self.coordinator.pending()) < CONCURRENT

    @precondition(can_trigger)
    @rule(changes=CHANGES)
    def trigger(self, changes: list[tuple[int, bool]]) -> None:
        self.change(changes)
        now = self.driver.now
        pending = self.coordinator.trigger(now, now, int(now))
        for one in self.driver.slots:
            one.snapshots[pending.id] = set(one.ssts)

    @rule(changes=CHANGES, faults=FAULTS, end=ENDS, heard=HEARD)
    def take_a_checkpoint(
        self, changes: list[tuple[int, bool]], faults: list[tuple[int, str]], end: tuple[str, int], heard: set[int]
    ) -> None:
        """From the barrier to completion, or to where a crash comes in between."""
        self.come_to_rest()
        if self.can_trigger():
            self.trigger(changes)
        self.plan(faults)
        self.upload_everything(self.coordinator.pending()[-1].id)
        self.complete_one(-1, end, heard)

    @rule(changes=CHANGES, faults=FAULTS, order=st.booleans(), ends=st.tuples(ENDS, ENDS), heard=HEARD)
    def take_overlapping_checkpoints(
        self,
        changes: list[tuple[int, bool]],
        faults: list[tuple[int, str]],
        order: bool,
        ends: tuple[tuple[str, int], tuple[str, int]],
        heard: set[int],
    ) -> None:
        """All upload the same files before any is confirmed, and any may complete first."""
        self.come_to_rest()
        while self.can_trigger():
            self.trigger(changes)
        for pending in self.coordinator.pending():
            self.upload_everything(pending.id)
        self.plan(faults)
        self.complete_one(-1 if order else 0, ends[0], heard)
        self.come_to_rest()
        self.complete_one(-1, ends[1], heard)

    def come_to_rest(self) -> None:
        while not self.driver.idle:
            self.go_on(100)

    def upload_everything(self, chosen: int) -> None:
        for index, id in self.snapshots():
            if id == chosen:
                self.upload_one(index, id, lost=False)

    def complete_one(self, which: int, end: tuple[str, int], heard: set[int]) -> None:
        """Complete one of those that are ready; slots in `heard` hear of it at once."""
        if not self.coordinator.ready():
            return
        how, steps = end
        self.driver.complete(self.coordinator.ready()[which], self.won)
        told = len(self.driver.told)
        for _step in range(steps):
            if not self.driver.idle and not self.driver.ended:
                self.driver.step()
        for news in self.driver.told[told:]:
            for index in heard:
                self.driver.slots[index].completed(*news)
        if self.driver.ended or how in ("crash", "fenced"):
            self.take_from(self.driver, alive=how == "fenced")
            self.go_on(100)

    # --- notifications

    def snapshots(self) -> list[tuple[int, int]]:
        return [(slot.index, id) for slot in self.driver.slots for id in sorted(slot.snapshots)]

    @precondition(lambda self: self.running() and bool(self.snapshots()))
    @rule(data=st.data(), lost=st.booleans())
    def upload(self, data: st.DataObject, lost: bool) -> None:
        """The acknowledgement may be lost, to arrive later or never."""
        self.upload_one(*data.draw(st.sampled_from(self.snapshots())), lost)

    def upload_one(self, index: int, id: int, lost: bool) -> None:
        ack = self.driver.upload(self.driver.slots[index], id)
        if ack is None:
            self.driver.delete(self.coordinator.fail(id, "declined", self.driver.now).delete)
            return
        self.driver.sent.append((id, ack))
        if lost:
            self.storage.may_stay.update(handle.path for handle in ack.uploaded)
        else:
            self.acknowledge(id, ack)

    @precondition(lambda self: self.running() and bool(self.driver.sent))
    @rule(data=st.data())
    def an_acknowledgement_arrives_late_or_again(self, data: st.DataObject) -> None:
        self.acknowledge(*data.draw(st.sampled_from(self.driver.sent)))

    def acknowledge(self, id: int, ack: SubtaskAck) -> None:
        decision = self.coordinator.acknowledge(id, "count", ack.state.subtask, ack)
        wanted = {path for one in self.coordinator.pending() for path in one.uploaded_paths}
        assert wanted.isdisjoint(handle.path for handle in decision.delete)
        self.driver.delete(decision.delete)

    @precondition(lambda self: self.running() and bool(self.driver.told))
    @rule(data=st.data(), slots=st.sets(SLOTS, min_size=1))
    def slots_hear_of_a_completion(self, data: st.DataObject, slots: set[int]) -> None:
        """In any order, any number of times, or never."""
        id, replaced = data.draw(st.sampled_from(self.driver.told))
        for slot in slots:
            self.driver.slots[slot].completed(id, replaced)

    # --- how checkpoints end

    @precondition(lambda self: self.running() and bool(self.coordinator.pending()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        pending = data.draw(st.sampled_from(self.coordinator.pending()))
        if not pending.completing:  # the runtime's one thread completes, or lets expire
            self.driver.delete(self.coordinator.fail(pending.id, "timeout", self.driver.now).delete)

    @precondition(lambda self: self.running() and self.driver.idle and bool(self.coordinator.ready()))
    @rule(which=st.sampled_from([0, -1]), end=ENDS, heard=HEARD)
    def complete(self, which: int, end: tuple[str, int], heard: set[int]) -> None:
        self.complete_one(which, end, heard)

    @precondition(lambda self: not self.driver.idle)
    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _step in range(steps):
            if self.driver.ended:
                self.crash()
            if self.driver.idle:
                return
            self.driver.step()

    # --- what goes wrong

    def plan(self, faults: list[tuple[int, str]]) -> None:
        for distance, kind in faults:
            self.storage.plan_fault(distance, kind)

    @precondition(lambda self: bool(self.retained))
    @rule(faults=FAULTS, steps=STEPS, alive=st.booleans())
    def crash_and_recover(self, faults: list[tuple[int, str]], steps: int, alive: bool) -> None:
        """Another driver takes the job over; the old one is dead, or does not know yet."""
        self.plan(faults)
        self.take_from(self.driver, alive)
        self.go_on(steps)

    def take_from(self, old: Driver, alive: bool) -> None:
        event(f"{'fenced' if alive else 'crash'} at: {old.at}")
        if alive and not old.ended and not old.idle:
            self.fenced.append(old)
        self.crash()

    def crash(self) -> None:
        self.storage.may_stay.update(self.storage.files)
        self.driver = self.new_driver()

    @precondition(lambda self: bool(self.fenced))
    @rule(data=st.data())
    def a_fenced_driver_goes_on(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.fenced))
        old.step()
        if old.idle or old.ended:
            event(f"the fenced driver ended: {old.at}")
            self.fenced.remove(old)
        self.storage.may_stay.update(self.storage.files)

    # --- what must hold

    def collect_garbage(self, live_generation: int | None) -> None:
        """What `strandline checkpoints gc` does: the newest generation's uploads may be about to be referred to."""
        last = Driver(self.storage, self.clock, self.names)._load()
        for path in list(self.storage.files):
            number = PATHS.parse_metadata(path)
            if path in self.needed() or path.startswith(PATHS.log_dir):
                continue
            if self.storage.writers[path] == live_generation:
                continue
            if live_generation is not None and number is not None and number > last.last_checkpoint_id:
                continue
            del self.storage.files[path]

    @precondition(lambda self: not self.storage.faults)
    @rule()
    def collect_garbage_beside_a_live_run(self) -> None:
        numbers = [number for path in self.storage.files if (number := PATHS.parse_log_entry(path)) is not None]
        self.collect_garbage(self.storage.writers[PATHS.log_entry(max(numbers))])

    @invariant()
    def every_file_of_every_retained_checkpoint_exists(self) -> None:
        missing = self.needed() - self.storage.files.keys()
        assert not missing

    @invariant()
    def the_registry_protects_every_retained_checkpoint(self) -> None:
        if self.running() and self.driver.idle:
            assert self.coordinator.registry.checkpoints() == tuple(self.retained)

    def teardown(self) -> None:
        """At quiescence only what faults and crashes left is unreferenced, and collecting garbage leaves nothing."""
        self.storage.faults.clear()
        while not self.driver.idle:
            self.go_on(100)
        self.driver.delete(self.coordinator.fail_all("the run ended", self.driver.now).delete)
        data = {path for path in self.storage.files if not path.startswith(PATHS.log_dir)}
        assert data - self.needed() <= self.storage.may_stay
        self.collect_garbage(live_generation=None)
        assert {path for path in self.storage.files if not path.startswith(PATHS.log_dir)} == self.needed()


StorageMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
TestStorageMachine = StorageMachine.TestCase
