"""Random lives of a job with a changelog: real slots, logs and storage, and plain dicts side by side.

The machine plays the batch function, the coordinator's thread and whatever is lost. State that comes back must be that
of the model, every retained checkpoint must restore to its model, and nothing may stay in storage that nobody needs.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, all_files, file_paths
from strandline.checkpoint.restore import plan_restore
from strandline.errors import CheckpointError, SegmentsLostError, StorageError
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.protocol.folders import slot_folder
from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.taskmanager.changelog.changelog import Barrier
from strandline.runtime.taskmanager.changelog.tuning import ChangelogTuning
from strandline.runtime.taskmanager.changelog.upload_pace import UploadPace
from strandline.storage.local import LocalStorage
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import (
    GROUPS,
    JOB,
    MEMORY,
    PARALLELISM,
    Host,
    State,
    Subtask,
    changelog_settings,
    key,
    run_info,
    slot_spec,
)

TUNING = ChangelogTuning(upkeep_interval=1e9, merge_from=3, merge_at_least=2, retry_delay=0.0)
"""Merges early, and does nothing on its own: the machine says when."""
SLOTS = range(PARALLELISM)
VALUES = st.none() | st.binary(max_size=3)
CHANGES = st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from("abcd")), VALUES, max_size=5)
"""By subtask and key; taken modulo the subtasks that there are."""
BATCH = st.tuples(CHANGES, st.none() | CHANGES, st.booleans(), st.none() | st.integers(0, 1))
"""What changes; what a round before it changed, which came to nothing; whether slots tell of segments when they are
sealed; and a slot that dies when the batch is decided, before it hears of it."""
BATCHES = st.lists(BATCH, min_size=1, max_size=2)
BROKEN = st.sampled_from(["", "", "", "fails", "hangs"])
"""Storage takes nothing for as long as the rule lasts; or uploads of segments hang, and end well much later."""
ENDS = st.sampled_from(["completed"] * 4 + ["unheard", "interrupted", "failed", "later"])


class Storage(LocalStorage):
    """Takes nothing while it `fails`. An upload of segments that begins while it `hangs` goes on when it is woken."""

    broken = ""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asleep: list[str] = []
        self._wake = threading.Event()

    def wake(self) -> None:
        self._wake.set()
        self._wake = threading.Event()
        self.asleep = []

    def write(self, path: str, data: bytes) -> None:
        self._check(path)
        super().write(path, data)

    def upload(self, source: Path, path: str) -> None:
        self._check(path)
        super().upload(source, path)

    def _check(self, path: str) -> None:
        if self.broken == "fails":
            raise StorageError(f"{path}: broken")
        if self.broken == "hangs" and path.endswith("-log"):
            self.asleep.append(path)
            assert self._wake.wait(60)


class Patience(UploadPace):
    """Nobody waits for uploads that hang; nobody gives up others."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(20.0)
        self._storage = storage

    def patience(self, size: int) -> float:
        return 0.005 if self._storage.broken == "hangs" else 20.0


class ChangelogMachine(RuleBasedStateMachine):
    decided: int
    truth: dict[Subtask, State]
    durable: DurableSegments
    coordinator: CheckpointCoordinator
    base: CheckpointMetadata | None
    news: tuple[int, dict[str, Any]] | None
    deaf: list[Host]
    """Who has not heard the news."""

    @initialize(
        kind=st.sampled_from(["heap", "rocksdb"]),
        uids=st.sampled_from([("op",), ("op",), ("op", "other")]),
        hosts=st.integers(1, 2),
        retained=st.integers(1, 2),
        changelog=st.sampled_from([True, True, True, False]),
        inline=st.sampled_from([0, 20_000]),
    )
    def begin(self, kind: str, uids: tuple[str, ...], hosts: int, retained: int, changelog: bool, inline: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="strandline-log-", dir=MEMORY))
        self.storage = Storage(str(self.root / "durable"))
        self.kind, self.uids, self.inline, self.num_retained = kind, uids, inline, retained
        self.subtasks: list[Subtask] = [(uid, index) for uid in uids for index in SLOTS]
        self.home = [0, hosts - 1]
        """The host of each slot."""
        self.numbers = count(1)
        self.retained: dict[int, CheckpointMetadata] = {}
        self.frozen: dict[int, dict[Subtask, State]] = {}
        """What the state was at the barrier of each checkpoint."""
        self.released: list[CheckpointMetadata] = []
        """Checkpoints that are the user's: restored with no_claim."""
        self.strays: set[str] = set()
        """What dead task managers left: only `gc` deletes it."""
        self.generation = self.next_checkpoint = 1
        self.changelog = changelog
        self.begin_run()
        self.begin_generation(None)

    # --- batches -------------------------------------------------------------------------------------

    @rule(batches=BATCHES, broken=BROKEN)
    def work(self, batches: list[Any], broken: str) -> None:
        self.wake()
        with self.breaking(broken):
            for batch in batches:
                self.batch(*batch)

    def wake(self) -> None:
        """Uploads that hang end well, and count for whoever still needs them."""
        self.storage.wake()
        for host in self.hosts:
            if host.has_changelog:
                uploader = host.changelog._uploader
                with uploader._changed:
                    assert uploader._changed.wait_for(lambda one=uploader: not one._busy, 30)  # type: ignore[misc]

    @contextmanager
    def breaking(self, broken: str) -> Iterator[None]:
        self.storage.broken = broken
        try:
            yield
        finally:
            self.storage.broken = ""

    def batch(self, changes: Any, void: Any, hints: bool, dies: int | None) -> None:
        batch = max(self.decided + 1, first_batch(self.generation))
        round_ = 0
        for host in self.hosts:
            host.hints = hints
        if void is not None:
            for host in self.hosts:
                host.prepare(batch, round_, self.spread(void))
                host.wait_until_durable(batch, round_)
            round_ += 1
            for host in self.hosts:
                host.discard(batch, round_)
        net = self.spread(changes)
        for host in self.hosts:
            host.prepare(batch, round_, net)
        for host in self.hosts:
            for index, log in host.wait_until_durable(batch, round_).items():
                self.durable.prepared(batch, index, log)
        self.durable.decided(batch, has_changelog=self.changelog)
        self.decided = batch
        for subtask, changed in net.items():
            state = {**self.truth[subtask], **changed}
            self.truth[subtask] = {name: value for name, value in state.items() if value is not None}
        if dies is not None:
            self.slot_dies_now(dies, files=True)
        if self.decided == batch:  # the run did not have to go back
            for host in self.hosts:
                host.commit(batch)

    def spread(self, changes: Mapping[tuple[int, str], bytes | None]) -> dict[Subtask, dict[bytes, bytes | None]]:
        net: dict[Subtask, dict[bytes, bytes | None]] = {subtask: {} for subtask in self.subtasks}
        for (number, name), value in changes.items():
            uid, index = self.subtasks[number % len(self.subtasks)]
            net[uid, index][key(index, name)] = value
        return net

    # --- materializations ----------------------------------------------------------------------------

    @precondition(lambda self: self.changelog)
    @rule(index=st.sampled_from(SLOTS), before=BATCHES, during=BATCHES, broken=BROKEN)
    def materialize(self, index: int, before: list[Any], during: list[Any], broken: str) -> None:
        """Batches are committed, and the slot may die, while it is uploaded."""
        self.work(before, broken="")
        generation = self.generation
        materializer = self.hosts[self.home[index]].changelog.materializer
        frozen = materializer.freeze(index)
        self.work(during, broken)
        with self.breaking(broken):
            try:
                materializer.upload(frozen)
            except StorageError:
                assert broken
            except CheckpointError:
                assert self.generation > generation
            finally:
                materializer.release([frozen])

    @precondition(lambda self: self.changelog)
    @rule(before=BATCHES, again=BATCHES, broken=BROKEN)
    def merge(self, before: list[Any], again: list[Any], broken: str) -> None:
        self.work(before, broken="")
        self.work(again, broken)
        with self.breaking(broken):
            for host in self.hosts:
                host.changelog.merger.merge_next()

    # --- checkpoints ---------------------------------------------------------------------------------

    @precondition(lambda self: self.coordinator.should_trigger(0.0, 1, forced=True))
    @rule(before=BATCHES, during=BATCHES, broken=BROKEN, end=ENDS, files=st.booleans(), full=st.booleans())
    def checkpoint(self, before: list[Any], during: list[Any], broken: str, end: str, files: bool, full: bool) -> None:
        """Barrier, acknowledgements, completion; batches go on meanwhile."""
        self.work(before, broken)
        number = self.barrier(full)
        self.work(during, broken)
        if end == "later" or (number not in self.barriers and number not in self.coordinator.ready()):
            return
        self.acknowledge(number)
        if end == "failed":
            self.fail(number)
        elif number in self.coordinator.ready():
            heard = [] if end == "unheard" else self.hosts
            self.complete(number, heard, (self.hosts[0], files) if end == "interrupted" else None)

    def barrier(self, full: bool = False) -> int:
        number = self.coordinator.trigger(0.0, 0.0, self.decided).id
        self.next_checkpoint = number + 1
        self.frozen[number] = dict(self.truth)
        if self.changelog:
            self.barriers[number] = [(host, host.changelog.barrier(number, full)) for host in self.hosts]
        else:
            for host in self.hosts:
                self.take_in(number, host.upload_snapshots(number))
        return number

    def acknowledge(self, number: int) -> None:
        self.wake()
        for host, barrier in self.barriers.pop(number, []):
            try:
                self.take_in(number, host.acknowledge(barrier))
            except CheckpointError:  # given up, or the state was materialized anew meanwhile
                self.fail(number)

    def take_in(self, number: int, acks: Iterable[Any]) -> None:
        for ack in acks:
            assert ack.full_bytes >= 0
            decision = self.coordinator.acknowledge(number, ack.state.operator, ack.state.subtask, ack)
            self.delete(decision.delete)

    @precondition(lambda self: self.barriers)
    @rule(data=st.data(), before=BATCHES)
    def acknowledge_later(self, data: st.DataObject, before: list[Any]) -> None:
        self.work(before, broken="")
        if self.barriers:
            self.acknowledge(data.draw(st.sampled_from(sorted(self.barriers))))

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data(), heard=st.sets(st.integers(0, 1)))
    def complete_later(self, data: st.DataObject, heard: set[int]) -> None:
        """Not always the oldest; and not everyone hears of it."""
        number = data.draw(st.sampled_from(self.coordinator.ready()))
        self.complete(number, [host for at, host in enumerate(self.hosts) if at in heard], None)

    def complete(self, number: int, heard: list[Host], interrupted: tuple[Host, bool] | None) -> None:
        """`interrupted`: a host is lost in the middle of it, with its files or not."""
        shape = JobShape(JOB, self.generation, PARALLELISM, GROUPS, self.uids)
        try:
            plan = self.coordinator.prepare_completion(number, 0.0, shape=shape, source=SourcePosition(0, {}))
        except CheckpointError:
            assert self.deaf  # only who missed news may name what is gone
            self.fail(number)
            self.tell()
            return
        if interrupted is not None and self.changelog and self.durable.complete:
            lost, files = interrupted
            self.host_dies_now(lost, files)
            heard = self.hosts
        decision = self.coordinator.confirm_completion(number, 0.0)
        self.retained[number] = plan.metadata
        for gone in decision.dropped:
            del self.retained[gone]
        for gone in decision.aborted:
            self.abandon(gone)
        self.base, self.owned = plan.metadata, True
        self.durable.truncate(plan.metadata.batch_id)
        replaced = {f.identity: f.handle for _state, f in all_files(plan.metadata) if f.shared and f.handle is not None}
        self.news = (number, replaced if plan.duplicates else {})
        self.deaf = list(self.hosts)
        self.tell(heard)
        self.delete(decision.delete)
        for metadata in (*self.retained.values(), *self.released):
            assert file_paths(metadata) <= self.stored()

    @precondition(lambda self: self.news)
    @rule()
    def tell_again(self) -> None:
        self.tell()

    def tell(self, hosts: list[Host] | None = None) -> None:
        """Word of the last completion."""
        assert self.news is not None
        for host in self.hosts if hosts is None else hosts:
            if self.changelog:
                host.changelog.completed(self.news[0])
            else:
                host.uploader.completed(*self.news)
            self.deaf = [one for one in self.deaf if one is not host]

    @precondition(lambda self: self.coordinator.pending())
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        self.fail(data.draw(st.sampled_from([pending.id for pending in self.coordinator.pending()])))

    def fail(self, number: int) -> None:
        self.delete(self.coordinator.fail(number, "declined", 0.0).delete)
        for host in self.hosts:
            if self.changelog:
                host.changelog.aborted(number)
            else:
                host.uploader.aborted(number)
        self.abandon(number)

    def abandon(self, number: int) -> None:
        """Who is still making it durable goes on to the end, and nobody wants it."""
        for host, barrier in self.barriers.pop(number, []):
            if barrier.behind or barrier.frozen:
                self.wake()
                try:
                    self.take_in(number, host.acknowledge(barrier))
                except (CheckpointError, StorageError):
                    continue

    def delete(self, handles: Iterable[Any]) -> None:
        self.storage.delete([handle.path for handle in handles])

    # --- what goes wrong -----------------------------------------------------------------------------

    @rule(index=st.sampled_from(SLOTS), before=BATCHES, broken=BROKEN, files=st.booleans())
    def slot_dies(self, index: int, before: list[Any], broken: str, files: bool) -> None:
        self.work(before, broken)
        self.slot_dies_now(index, files)
        self.compare()

    def slot_dies_now(self, index: int, files: bool) -> None:
        """`files`: its local files are still there."""
        self.give_up_pending()
        host = self.hosts[self.home[index]]
        slot = host.slots.pop(index)
        slot.kill()
        if not files:
            shutil.rmtree(slot_folder(slot.spec))
            self.rootless.add(index)
        self.start(host, [index])

    @rule(which=st.integers(0, 1), before=BATCHES, broken=BROKEN, files=st.booleans())
    def host_dies(self, which: int, before: list[Any], broken: str, files: bool) -> None:
        self.work(before, broken)
        self.host_dies_now(self.hosts[self.home[which]], files)
        self.compare()

    def host_dies_now(self, host: Host, files: bool) -> None:
        self.give_up_pending()
        indices = sorted(host.slots)
        self.kill(host, files)
        if not files:
            self.rootless.update(indices)
        at = self.hosts.index(host)
        self.hosts[at] = self.new_host()
        self.deaf = [one for one in self.deaf if one is not host]
        if self.news is not None:
            self.deaf.append(self.hosts[at])  # it starts from a checkpoint, but never heard of one
        self.start(self.hosts[at], indices)

    def kill(self, host: Host, files: bool) -> None:
        if host.has_changelog:
            known = host.changelog.files
            self.strays.update(known._users, known._obsolete, self.storage.asleep)
        host.kill(files)

    def start(self, host: Host, indices: list[int]) -> None:
        """At the last decided batch; where too much is lost for that, the run goes back to its checkpoint."""
        try:
            host.start(*(self.spec(index) for index in indices))
        except SegmentsLostError:
            assert not self.durable.complete
            assert self.rootless.intersection(indices)
            self.restart_now()

    def give_up_pending(self) -> None:
        decision = self.coordinator.fail_all("a slot was lost", 0.0)
        self.delete(decision.delete)
        for number in decision.failed:
            self.fail(number)

    @rule(before=BATCHES, broken=BROKEN)
    def restart(self, before: list[Any], broken: str) -> None:
        """The run goes back to its last checkpoint, on the same hosts."""
        self.work(before, broken)
        self.restart_now()
        self.compare()

    def restart_now(self) -> None:
        self.give_up_pending()
        self.begin_generation(max(self.retained, default=None))

    @rule(before=BATCHES, changelog=st.booleans(), orderly=st.booleans(), claimed=st.sampled_from([True, True, False]))
    def another_run(self, before: list[Any], changelog: bool, orderly: bool, claimed: bool) -> None:
        """The next start of the job, with the changelog on or off; the last checkpoint is its own, or the user's."""
        self.work(before, broken="")
        self.give_up_pending()
        for host in self.hosts:
            if orderly:
                host.end()
            else:
                self.kill(host, files=True)
        newest = max(self.retained, default=None)
        self.changelog = changelog
        self.begin_run()
        self.begin_generation(newest, claimed)
        self.compare()

    def begin_run(self) -> None:
        log = changelog_settings(upload_timeout=20)
        name = f"run-{next(self.numbers)}"
        self.run = run_info(self.root, self.storage, log if self.changelog else None, name, self.inline)
        self.hosts = [self.new_host() for _ in set(self.home)]

    def new_host(self) -> Host:
        host = Host(self.run, self.storage, TUNING)
        if host.has_changelog:
            host.changelog._uploader._pace = Patience(self.storage)
        return host

    def begin_generation(self, newest: int | None, claimed: bool = True) -> None:
        self.generation += 1
        self.base = self.retained[newest] if newest is not None else None
        self.owned = claimed
        self.truth = dict(self.frozen[newest]) if newest is not None else {subtask: {} for subtask in self.subtasks}
        self.decided = self.base.batch_id if self.base else -1
        if not claimed and self.base is not None:
            self.released.append(self.base)
            self.strays.update(path for metadata in self.retained.values() for path in file_paths(metadata))
            self.retained = {}
        self.durable = DurableSegments(self.decided)
        self.barriers: dict[int, list[tuple[Host, Barrier]]] = {}
        self.news = None
        self.deaf = []
        self.rootless: set[int] = set()
        """Slots whose local files do not reach back to a base."""
        self.coordinator = CheckpointCoordinator(
            interval=1.0,
            subtasks=self.subtasks,
            max_concurrent=2,
            num_retained=self.num_retained,
            first_checkpoint_id=self.next_checkpoint,
            tolerable_failures=1 << 30,
        )
        self.coordinator.recover(self.retained.values())
        for at, host in enumerate(self.hosts):
            host.start(*(self.spec(index) for index in SLOTS if self.home[index] == at))

    def spec(self, index: int, base: CheckpointMetadata | None = None) -> SlotSpec:
        restored = base or self.base
        states = plan_restore(restored) if restored is not None else ()
        return slot_spec(
            self.run,
            index,
            self.uids,
            self.kind,
            generation=self.generation,
            incarnation=next(self.numbers),
            restore=[state for state in states if state.subtask == index],
            restore_batch=restored.batch_id if restored is not None else -1,
            decided_batch=self.decided,
            restore_owned=self.owned,
            segments=self.durable.of(index),
            segments_complete=self.durable.complete,
        )

    # --- what must hold ------------------------------------------------------------------------------

    def compare(self) -> None:
        for host in self.hosts:
            for subtask, state in host.contents().items():
                assert state == self.truth[subtask]

    def stored(self) -> set[str]:
        return {file.path for file in self.storage.list()}

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        try:
            if hasattr(self, "coordinator"):
                self.compare()
                self.check_storage()
                self.check_checkpoints()
        finally:
            self.storage.wake()
            for host in getattr(self, "hosts", []):
                host.kill()
            shutil.rmtree(self.root, ignore_errors=True)

    def check_storage(self) -> None:
        """Two completed checkpoints later only what is needed is there, and after the end only checkpoints."""
        self.wake()
        self.give_up_pending()
        if self.news is not None:
            self.tell()
        for _ in range(2 if self.decided >= 0 else 0):
            number = self.barrier()
            self.acknowledge(number)
            self.complete(number, self.hosts, None)
            assert number in self.retained
        named = {path for one in (*self.retained.values(), *self.released) for path in file_paths(one)}
        logs = {
            file.handle.path
            for host in self.hosts
            if host.has_changelog
            for subtask in host.changelog.files.subtasks()
            for file in host.changelog.files[subtask].files
            if file.handle is not None
        }
        assert named <= self.stored()
        assert self.stored() - named - logs <= self.strays
        for host in self.hosts:
            host.end()
        assert named <= self.stored()
        assert self.stored() - named <= self.strays

    def check_checkpoints(self) -> None:
        for metadata in (*self.retained.values(), *self.released):
            self.generation += 1
            self.decided = metadata.batch_id
            self.durable = DurableSegments(self.decided)
            host = Host(msgspec.structs.replace(self.run, changelog=None), self.storage, TUNING)
            try:
                host.start(*(self.spec(index, metadata) for index in SLOTS))
                assert host.contents() == self.frozen[metadata.checkpoint_id]
            finally:
                host.kill()


def test_whatever_happens_the_changelog_leads_to_the_state_of_the_model() -> None:
    run_state_machine_as_test(
        ChangelogMachine,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
