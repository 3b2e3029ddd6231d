"""The changelog of a task manager, with real slots and storage: what is durable when, and what failures leave."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.metadata import StateFile, SubtaskState, last_batch
from strandline.errors import CheckpointError, SegmentsLostError, StorageError
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.folders import slot_folder
from strandline.runtime.protocol.messages import RunInfo, Sealed, SegmentUpload
from strandline.runtime.taskmanager.changelog.changelog import Changelog
from strandline.runtime.taskmanager.changelog.segment_uploader import THREADS
from strandline.runtime.taskmanager.changelog.tuning import ChangelogTuning
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.runtime.taskmanager.changelog.host import (
    JOB,
    MEMORY,
    QUICK,
    Host,
    State,
    changelog_settings,
    key,
    run_info,
    slot_spec,
)
from tests.waiting import wait_until

A0, A1, B0, B1 = key(0, "a"), key(1, "a"), key(0, "b"), key(1, "b")
S0, S1 = ("op", 0), ("op", 1)


class World:
    """Storage that can fail, and the hosts that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = LocalStorage(str(folder / "durable"))
        self.switch = folder / "switch"
        self.faulty = self.with_faults()
        self.hosts: list[Host] = []

    def with_faults(self, **options: str) -> FaultyStorage:
        return FaultyStorage(
            f"faulty+file://{self.storage.root}",
            {"switch": str(self.switch), "fail_pattern": "^(upload|write) ", **options},
        )

    def run(self, **changelog: Any) -> RunInfo:
        return run_info(self.folder, self.storage, changelog_settings(**changelog))

    def host(self, tuning: ChangelogTuning = QUICK, **changelog: Any) -> Host:
        self.hosts.append(Host(self.run(**changelog), self.faulty, tuning))
        return self.hosts[-1]

    def started(self, tuning: ChangelogTuning = QUICK, **changelog: Any) -> Host:
        """A host with two slots that begin without state."""
        host = self.host(tuning, **changelog)
        host.start(*(slot_spec(host.run, index) for index in range(2)))
        return host

    def fail(self) -> None:
        self.switch.touch()

    def work_again(self) -> None:
        self.switch.unlink()

    def stored(self) -> set[str]:
        return {file.path for file in self.storage.list()}

    def state(self, state: SubtaskState) -> State:
        """What a slot makes of an acknowledged state."""
        folder = self.folder / f"restored-{time.time_ns()}"
        run = run_info(folder, self.storage, None)
        host = Host(run, self.storage)
        try:
            host.start(slot_spec(run, state.subtask, restore=[state], restore_batch=5, decided_batch=5))
            return host.contents()[state.operator, state.subtask]
        finally:
            host.kill()


@pytest.fixture
def world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="strandline-log-", dir=MEMORY))
    world = World(folder)
    try:
        yield world
    finally:
        world.switch.unlink(missing_ok=True)
        for host in world.hosts:
            host.kill()
        shutil.rmtree(folder, ignore_errors=True)


def files(host: Host, subtask: tuple[str, int] = S0) -> list[str]:
    return [file.name for file in host.changelog.files[subtask].files]


def batches(host: Host, subtask: tuple[str, int] = S0) -> list[int]:
    return [last_batch(file) for file in host.changelog.files[subtask].segments]


def paths(state: SubtaskState) -> set[str]:
    return {file.handle.path for file in state.files if file.handle is not None}


# --- segments ----------------------------------------------------------------------------------------


def test_the_segments_of_all_slots_become_one_file_as_soon_as_all_are_sealed(world: World) -> None:
    host = world.started()
    host.prepare(1, 0, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    wait_until(lambda: len(world.stored()) == 1)  # nobody has asked yet
    before = host.changelog.figures().upload_requests
    outcomes = host.wait_until_durable(1, 0)
    assert host.changelog.figures().upload_requests == before == 1
    found = [outcome for log in outcomes.values() for outcome in log.values()]
    assert [(one.durable, one.file.name) for one in found if one.file] == [(True, "00000000000000000001.segment")] * 2
    assert {one.file.handle.path for one in found if one.file and one.file.handle} == world.stored()


def test_without_hints_settling_uploads_what_is_sealed(world: World) -> None:
    host = world.started()
    host.hints = False
    host.prepare(1, 0, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    assert world.stored() == set()
    assert all(upload.durable for uploads in host.wait_until_durable(1, 0).values() for upload in uploads.values())
    assert len(world.stored()) == 1


def test_every_step_has_a_file_of_its_own(world: World) -> None:
    host = world.host()
    host.start(*(slot_spec(host.run, index, ("op", "other")) for index in range(2)))
    host.batch(1, {(uid, index): {key(index, "a"): b"1"} for uid in ("op", "other") for index in range(2)})
    acks = host.acknowledged(1)
    assert [(ack.state.operator, ack.state.subtask) for ack in acks] == [
        (u, i) for u in ("op", "other") for i in (0, 1)
    ]
    assert len(world.stored()) == len({path for ack in acks for path in paths(ack.state)}) <= 2


def test_empty_segments_are_not_uploaded_and_hold_nobody_up(world: World) -> None:
    host = world.started()
    host.batch(1, {})
    assert world.stored() == set()
    host.prepare(2, 0, {S1: {A1: b"1"}})
    wait_until(lambda: len(world.stored()) == 1)  # with the empty one, all slots have told
    assert host.wait_until_durable(2, 0)[0]["op"] == SegmentUpload(durable=True, file=None)
    host.commit(2)
    assert (batches(host, S0), batches(host, S1)) == ([], [2])
    assert [ack.state.files != () for ack in host.acknowledged(1)] == [False, True]


def test_a_new_round_replaces_what_was_sealed(world: World) -> None:
    host = world.started()
    host.prepare(1, 0, {S0: {A0: b"void"}, S1: {A1: b"void"}})
    host.wait_until_durable(1, 0)
    void = world.stored()
    host.discard(1, 1)
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}}, round_=1)
    acks = host.acknowledged(1)
    assert {path for ack in acks for path in paths(ack.state)} == world.stored() - void
    assert {handle.path for handle in acks[0].obsolete} == void
    assert world.state(acks[0].state) == {A0: b"1"}


def test_an_upload_of_a_round_that_was_replaced_meanwhile_is_deleted(world: World) -> None:
    host = world.started()
    slow = threading.Event()
    uploaded = host.changelog.queue._uploaded

    def wait(group: Any, handles: Any) -> None:
        assert slow.wait(10)
        uploaded(group, handles)

    host.changelog.queue._uploaded = wait  # type: ignore[method-assign]
    host.prepare(1, 0, {S0: {A0: b"void"}, S1: {A1: b"void"}})
    wait_until(lambda: len(world.stored()) == 1)
    void = world.stored()
    host.discard(1, 1)
    host.prepare(1, 1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    slow.set()
    host.wait_until_durable(1, 1)
    host.commit(1)
    wait_until(lambda: not void & world.stored())
    assert host.acknowledged(1)[0].obsolete == ()


def test_word_of_a_segment_may_come_late_twice_or_from_an_older_round(world: World) -> None:
    host = world.started()
    host.prepare(1, 0, {S0: {A0: b"0"}})
    (old,) = host.slots[0].status(NOTHING).sealed
    host.discard(1, 1)
    host.prepare(1, 1, {S0: {A0: b"1"}})
    (new,) = host.slots[0].status(NOTHING).sealed
    for sealed in (old, new, old):
        host.changelog.queue.offer(sealed)
    host.wait_until_durable(1, 1)
    host.commit(1)
    for sealed in (old, new):
        host.changelog.queue.offer(sealed)
    assert host.changelog.queue._newest == {}
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"1"}


def test_many_batches_are_one_state(world: World) -> None:
    host = world.started()
    for batch in range(1, 6):
        host.batch(batch, {S0: {key(0, str(batch)): b"x", A0: str(batch).encode()}, S1: {A1: b"y"}})
    host.batch(6, {S0: {key(0, "1"): None}})
    ack = host.acknowledged(1)[0]
    assert world.state(ack.state) == host.contents()[S0] == {A0: b"5", **{key(0, str(n)): b"x" for n in range(2, 6)}}
    assert ack.full_bytes == ack.checkpointed_bytes > 0
    assert host.acknowledged(2)[0].checkpointed_bytes == 0
    figures = host.changelog.figures()
    assert (figures.segments, figures.behind_bytes, figures.upload_attempts) == (11, 0, 6)


# --- failing storage ---------------------------------------------------------------------------------


def test_while_uploads_fail_batches_go_on_and_checkpoints_do_not(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    world.fail()
    for batch in (2, 3):
        assert host.batch(batch, {S0: {A0: str(batch).encode()}})[S0] == SegmentUpload(durable=False, file=None)
    assert host.changelog.figures().behind_bytes > 0
    barrier = host.changelog.barrier(1)
    assert not barrier.durable
    with pytest.raises(StorageError, match="could not be uploaded"):
        host.acknowledge(barrier)
    world.work_again()
    acks = host.acknowledge(barrier)
    assert world.state(acks[0].state) == {A0: b"3"}
    assert batches(host) == [1, 2, 3]
    assert host.changelog.figures().behind_bytes == 0
    assert host.changelog.barrier(2).durable


def test_what_is_behind_is_uploaded_with_the_next_batch_in_its_place(world: World) -> None:
    host = world.started()
    world.fail()
    host.batch(1, {S0: {A0: b"1", B0: b"1"}})
    world.work_again()
    assert host.batch(2, {S0: {A0: b"2"}, S1: {A1: b"2"}})[S0].durable
    assert batches(host) == [1, 2]
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"2", B0: b"1"}
    assert not list(slot_folder(host.slots[0].spec).rglob("*.behind"))


def test_uploads_that_are_slower_than_all_tries_become_durable_by_themselves(world: World) -> None:
    world.faulty = world.with_faults(fail_mode="hang")
    host = world.started(upload_timeout=0.02, upload_attempts=3)
    world.fail()
    for batch in range(1, 13):
        outcome = host.batch(batch, {S0: {A0: str(batch).encode()}, S1: {key(1, str(batch)): b"x"}})
        assert outcome[S0] == SegmentUpload(durable=False, file=None)
    assert len(host.changelog.queue.behind) == 24
    assert host.changelog.figures().upload_attempts <= THREADS  # so is the memory that they take up
    world.work_again()
    (first, *_) = host.changelog.queue.behind
    wait_until(lambda: first.durable)  # nobody has asked again
    acks = host.acknowledged(1)
    assert batches(host) == list(range(1, 13))
    assert host.changelog.figures().behind_bytes == 0
    assert world.state(acks[0].state) == {A0: b"12"}
    wait_until(lambda: world.stored() == {path for ack in acks for path in paths(ack.state)})


def test_a_late_acknowledgement_has_nothing_that_was_committed_since_its_barrier(world: World) -> None:
    host = world.started()
    world.fail()
    host.batch(1, {S0: {A0: b"1"}})
    barrier = host.changelog.barrier(1)
    host.batch(2, {S0: {A0: b"2"}})
    world.work_again()
    host.batch(3, {S0: {A0: b"3"}})
    host.changelog.materializer.materialize(0)
    assert world.state(host.acknowledge(barrier)[0].state) == {A0: b"1"}
    assert world.state(host.acknowledged(2)[0].state) == {A0: b"3"}


def test_what_is_behind_survives_the_slots_own_files(world: World) -> None:
    """A local snapshot makes the slot delete its segments; if it cannot be uploaded, they are still needed."""
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    world.fail()
    host.batch(2, {S0: {A0: b"2"}})
    with pytest.raises(StorageError):
        host.changelog.materializer.materialize(0)
    wait_until(lambda: not list(slot_folder(host.slots[0].spec).rglob("seg-*.segment")))
    world.work_again()
    assert host.batch(3, {S0: {B0: b"3"}})[S0].durable
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"2", B0: b"3"}


def test_a_segment_that_becomes_durable_after_its_state_was_materialized_does_no_harm(world: World) -> None:
    host = world.started()
    world.fail()
    host.batch(1, {S0: {A0: b"1"}})
    host.changelog.queue.behind[0].error = None
    behind, host.changelog.queue.behind = host.changelog.queue.behind, []  # its turn comes late
    world.work_again()
    host.batch(2, {S0: {A0: b"2"}})
    host.changelog.materializer.materialize(0)
    host.changelog.queue.behind = behind
    assert host.changelog.barrier(1).durable
    host.batch(3, {S0: {B0: b"3"}})
    assert batches(host) == [3]
    assert world.state(host.acknowledged(2)[0].state) == {A0: b"2", B0: b"3"}


def test_processing_waits_when_too_much_is_behind(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host = world.started(max_behind_bytes=600)
    world.fail()
    # one segment is less than that
    assert host.batch(1, {S0: {A0: b"1"}})[S0] == SegmentUpload(durable=False, file=None)
    host.prepare(2, 0, {S0: {A0: b"2"}})
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(host.wait_until_durable(2, 0)))
    waiting.start()
    wait_until(lambda: caplog.text.count("processing waits for storage") >= 2)  # so it did not go on after the first
    assert answers == []
    world.work_again()
    waiting.join(10)
    assert answers[0][0]["op"].durable
    host.commit(2)
    assert batches(host) == [1, 2]
    assert host.changelog.figures().wait_ms > 0


@pytest.mark.parametrize("end", [Changelog.close, Changelog.end])
def test_who_waits_for_storage_ends_with_the_changelog_or_its_generation(
    world: World, caplog: pytest.LogCaptureFixture, end: Callable[[Changelog], None]
) -> None:
    host = world.started(max_behind_bytes=0)
    world.fail()
    host.prepare(1, 0, {S0: {A0: b"1"}})
    waiting = threading.Thread(target=host.wait_until_durable, args=(1, 0))
    waiting.start()
    wait_until(lambda: "processing waits for storage" in caplog.text)
    end(host.changelog)
    waiting.join(10)
    assert not waiting.is_alive()
    assert host.changelog.queue.waiters == 0
    world.work_again()


def test_those_who_wait_do_not_end_each_others_uploads(world: World) -> None:
    """A checkpoint and a batch wait for segments at the same time: neither is forgotten when the other is done."""
    host = world.started()
    for batch in range(1, 16, 2):
        world.fail()
        host.batch(batch, {S0: {A0: b"1"}})
        world.work_again()
        late = threading.Thread(target=host.acknowledge, args=(host.changelog.barrier(batch),))
        host.hints = False
        host.prepare(batch + 1, 0, {S1: {A1: b"1"}})
        late.start()
        host.wait_until_durable(batch + 1, 0)
        late.join(10)
        assert not late.is_alive()
        host.commit(batch + 1)


def test_the_upload_thread_survives_the_end(world: World) -> None:
    host = world.started(upload_timeout=0.05, upload_attempts=20)
    world.fail()
    host.prepare(1, 0, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    time.sleep(0.03)  # the end comes between two attempts, or in the middle of one
    host.changelog.close()
    for thread in host.changelog._threads:
        thread.join(10)
        assert not thread.is_alive()


# --- slots that come back ----------------------------------------------------------------------------


def respawned(host: Host, index: int, **more: Any) -> None:
    """The slot dies and is started again on this host, from its local files."""
    spec = host.slots[index].spec
    host.start(msgspec.structs.replace(spec, incarnation=spec.incarnation + 1, **more))


def test_a_slot_that_dies_between_the_decision_and_the_commit_keeps_the_batch(world: World) -> None:
    host = world.started()
    host.prepare(1, 0, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    host.wait_until_durable(1, 0)
    respawned(host, 0, decided_batch=1)
    assert host.contents()[S0] == {A0: b"1"}
    host.commit(1)
    assert [world.state(ack.state) for ack in host.acknowledged(1)] == [{A0: b"1"}, {A1: b"1"}]


def test_the_same_when_its_segment_was_not_durable(world: World) -> None:
    host = world.started()
    world.fail()
    host.prepare(1, 0, {S0: {A0: b"1"}})
    host.wait_until_durable(1, 0)
    respawned(host, 0, decided_batch=1, segments_complete=False)
    world.work_again()
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"1"}


def test_a_slot_that_dies_before_the_decision_leaves_nothing_of_the_batch(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    kept = world.stored()
    host.prepare(2, 0, {S0: {A0: b"void"}, S1: {A1: b"void"}})
    host.wait_until_durable(2, 0)
    respawned(host, 0, decided_batch=1)
    host.discard(2, 1)
    host.batch(2, {S0: {A0: b"2"}}, round_=1)
    acks = host.acknowledged(1)
    assert world.state(acks[0].state) == {A0: b"2"}
    assert world.state(acks[1].state) == {}
    named = {path for ack in acks for path in paths(ack.state)}
    assert {handle.path for handle in acks[0].obsolete} == world.stored() - named
    assert kept < named


def test_a_slot_that_is_replaced_here_goes_on_with_the_log_it_had(world: World) -> None:
    """Also if it could not be started at once; the log is not begun anew from the checkpoint."""
    host = world.started()
    for batch in (1, 2):
        host.batch(batch, {S0: {A0: str(batch).encode()}})
    host.changelog.materializer.materialize(0)
    host.batch(3, {S0: {A0: b"3"}})
    before = files(host)
    host.slots.pop(0).kill()
    spec = slot_spec(host.run, 0, incarnation=2, decided_batch=3)
    host.changelog.slot_starting(spec)  # and it died again
    host.start(msgspec.structs.replace(spec, incarnation=3))
    assert files(host) == before
    assert len(before) == 2
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"3"}


def test_a_lost_segment_of_a_committed_batch_makes_a_new_materialization_necessary(world: World) -> None:
    host = world.started()
    world.fail()
    host.prepare(1, 0, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    host.wait_until_durable(1, 0)
    shutil.rmtree(slot_folder(host.slots[0].spec))
    host.changelog.queue.commit(1)
    assert host.changelog.files.without_base() == [S0]
    with pytest.raises(SegmentsLostError):
        respawned(host, 0, decided_batch=1, segments_complete=False)


def lost(world: World, host: Host, decisions: list[tuple[int, Any]], base: list[SubtaskState], batch: int) -> Host:
    """The host is gone with its files: another one begins with the checkpoint `base` and what the driver noted."""
    durable = DurableSegments(batch)
    decided = batch
    for decided, outcomes in decisions:
        for (uid, index), outcome in outcomes.items():
            durable.prepared(decided, index, {uid: outcome})
        durable.decided(decided, has_changelog=True)
    host.kill(local_files=False)
    other = world.host()
    other.start(
        *(
            slot_spec(
                other.run,
                index,
                incarnation=2,
                restore=[state for state in base if state.subtask == index],
                restore_batch=batch,
                decided_batch=decided,
                segments=durable.of(index),
                segments_complete=durable.complete,
            )
            for index in range(2)
        )
    )
    return other


def test_a_lost_host_is_replaced_from_durable_segments(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    host.changelog.materializer.materialize(0)
    host.batch(2, {S0: {B0: b"2"}})
    acks = host.acknowledged(1)
    host.changelog.completed(1)
    outcomes = [(batch, host.batch(batch, {S0: {A0: b"x"}, S1: {B1: b"y"}})) for batch in (3, 4)]
    other = lost(world, host, outcomes, [ack.state for ack in acks], 2)
    assert other.contents() == {S0: {A0: b"x", B0: b"2"}, S1: {A1: b"1", B1: b"y"}}
    assert batches(other) == [2, 3, 4]
    other.batch(5, {S0: {A0: b"5"}})
    again = other.acknowledged(2)
    assert world.state(again[0].state) == {A0: b"5", B0: b"2"}
    # What the checkpoint does not name, the coordinator has to be told of.
    assert set(again[0].beforehand) == {path for ack in again for path in paths(ack.state)} - {
        path for ack in acks for path in paths(ack.state)
    }


def test_a_gap_in_the_durable_log_cannot_be_bridged(world: World) -> None:
    host = world.started()
    outcomes = [(1, host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}}))]
    world.fail()
    outcomes.append((2, host.batch(2, {S0: {A0: b"2"}})))
    world.work_again()
    outcomes.append((3, host.batch(3, {S0: {A0: b"3"}})))
    with pytest.raises(SegmentsLostError):
        lost(world, host, outcomes, [], -1)


def test_what_a_lost_host_uploaded_is_not_deleted_by_the_next(world: World) -> None:
    host = world.started()
    outcomes = [(1, host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}}))]
    other = lost(world, host, outcomes, [], -1)
    uploaded = world.stored()
    for index in range(2):
        other.changelog.materializer.materialize(index)
    assert {handle.path for handle in other.acknowledged(1)[0].obsolete} == uploaded
    other.changelog.end()
    assert world.stored() >= uploaded  # whether anybody refers to it, only the coordinator knows


# --- checkpoints that are not its own ----------------------------------------------------------------


def checkpoint(world: World, host: Host, number: int) -> list[SubtaskState]:
    states = [ack.state for ack in host.acknowledged(number)]
    host.changelog.completed(number)
    return states


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
def test_after_no_claim_the_first_checkpoint_refers_to_nothing_that_was_restored(world: World, kind: str) -> None:
    before = world.host()
    before.start(*(slot_spec(before.run, index, kind=kind) for index in range(2)))
    before.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    before.changelog.materializer.materialize(0)
    before.batch(2, {S0: {B0: b"2"}})
    states = checkpoint(world, before, 1)
    theirs = {path for state in states for path in paths(state)}
    host = world.host()
    host.start(
        *(
            slot_spec(
                host.run,
                index,
                kind=kind,
                generation=2,
                restore=[states[index]],
                restore_batch=2,
                decided_batch=2,
                restore_owned=False,
            )
            for index in range(2)
        )
    )
    assert host.changelog.files.without_base() == [S0, S1]
    barrier = host.changelog.barrier(2)
    host.batch(
        first_batch(2), {S0: {A0: b"3"}}
    )  # nothing of it is in the checkpoint, though its state is uploaded only now
    acks = host.acknowledge(barrier)
    assert [world.state(ack.state) for ack in acks] == [{A0: b"1", B0: b"2"}, {A1: b"1"}]
    assert not {path for ack in acks for path in paths(ack.state)} & theirs
    host.changelog.completed(2)
    assert world.state(host.acknowledged(3)[0].state) == {A0: b"3", B0: b"2"}
    host.changelog.end()
    assert theirs <= world.stored()


def test_a_checkpoint_that_others_acknowledged_makes_everything_be_materialized_anew(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    host.changelog.completed(7)
    assert host.changelog.files.without_base() == [S0, S1]
    acks = host.acknowledged(8)
    assert [world.state(ack.state) for ack in acks] == [{A0: b"1"}, {A1: b"1"}]
    host.changelog.completed(8)
    host.changelog.completed(8)  # said again, and of an older one
    host.changelog.completed(7)
    assert host.changelog.files.without_base() == []


def test_an_unusable_log_still_builds_on_the_files_of_the_checkpoint(world: World) -> None:
    """The host's task manager died, its files did not: the state is there, and what of it was uploaded before."""
    large = Random(0).randbytes(30_000)
    host = world.host()
    host.start(*(slot_spec(host.run, index, kind="rocksdb") for index in range(2)))
    host.batch(1, {S0: {A0: large}, S1: {A1: b"1"}})
    for index in range(2):
        host.changelog.materializer.materialize(index)
    states = checkpoint(world, host, 1)
    kept = {path for state in states for path in paths(state)}
    host.batch(2, {S0: {B0: b"2"}})
    host.kill()
    other = world.host()
    more: dict[str, Any] = {"incarnation": 2, "restore_batch": 1, "decided_batch": 2, "segments_complete": False}
    other.start(*(slot_spec(other.run, i, kind="rocksdb", restore=[states[i]], **more) for i in range(2)))
    acks = other.acknowledged(2)
    assert world.state(acks[0].state) == {A0: large, B0: b"2"}
    assert {path for ack in acks for path in paths(ack.state)} & kept
    other.changelog.aborted(2)
    other.changelog.end()  # before any checkpoint of its own is complete
    assert kept <= world.stored()
    assert world.state(states[0]) == {A0: large}


# --- materialization ---------------------------------------------------------------------------------


def test_a_materialization_truncates_the_log(world: World) -> None:
    host = world.started()
    for batch in (1, 2):
        host.batch(batch, {S0: {A0: str(batch).encode()}, S1: {A1: b"1"}})
    host.changelog.materializer.materialize(0)
    host.batch(3, {S0: {B0: b"3"}})
    assert (batches(host, S0), batches(host, S1)) == ([3], [1, 2])
    acks = host.acknowledged(1)
    assert world.state(acks[0].state) == {A0: b"2", B0: b"3"}
    assert acks[0].obsolete == ()  # the other slot's segments are in the same files
    host.changelog.materializer.materialize(1)
    assert len(host.acknowledged(2)[0].obsolete) == 2
    figures = host.changelog.figures()
    assert figures.materializations == 2
    assert figures.base_bytes == figures.materialized_bytes > 0


def test_nothing_new_is_not_materialized(world: World) -> None:
    host = world.started()
    host.changelog.materializer.materialize(0)
    host.batch(1, {S0: {A0: b"1"}})
    host.changelog.materializer.materialize(0)
    host.changelog.materializer.materialize(0)
    host.changelog.materializer.materialize(5)  # there is no such slot
    assert host.changelog.materializer.figures.materializations == 1


def test_a_failed_materialization_fails_no_checkpoint(world: World) -> None:
    host = world.started(materialization_interval=0.05)
    host.batch(1, {S0: {A0: b"1"}})
    world.fail()
    wait_until(lambda: host.changelog.materializer.figures.failed_materializations > 1)
    acks = host.acknowledged(1)
    assert world.state(acks[0].state) == {A0: b"1"}
    world.work_again()
    wait_until(lambda: host.changelog.materializer.figures.materializations > 0)
    wait_until(lambda: batches(host) == [])
    assert world.state(host.acknowledged(2)[0].state) == {A0: b"1"}


def test_a_changelog_that_has_grown_too_large_is_materialized_early(world: World) -> None:
    host = world.started(replace(QUICK, early_bytes=2000), max_amplification=2.0)
    for batch in range(1, 30):
        host.batch(batch, {S0: {key(0, str(batch)): b"x"}})
        time.sleep(0.002)  # the thread that materializes gets its turn
    wait_until(lambda: host.changelog.materializer.figures.early_materializations > 0)
    wait_until(lambda: host.changelog.materializer.figures.materializations > 0)
    assert world.state(host.acknowledged(1)[0].state) == host.contents()[S0]


@pytest.mark.parametrize("again", ["generation", "checkpoint"])
def test_a_materialization_of_a_log_that_was_begun_anew_is_deleted(world: World, again: str) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    frozen = host.changelog.materializer.freeze(0)
    if again == "checkpoint":
        host.changelog.completed(9)
    else:
        host.start(*(slot_spec(host.run, index, generation=2) for index in range(2)))
    before = world.stored()
    with pytest.raises(CheckpointError, match="started anew"):
        host.changelog.materializer.upload(frozen)
    assert world.stored() == before
    if again == "generation":
        assert before == set()


def test_an_older_state_does_not_replace_a_newer_one(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    frozen = host.changelog.materializer.freeze(0)
    host.batch(2, {S0: {A0: b"2"}})
    host.changelog.materializer.materialize(0)
    with pytest.raises(CheckpointError):
        host.changelog.materializer.upload(frozen)
    assert world.state(host.acknowledged(1)[0].state) == {A0: b"2"}


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
def test_a_full_checkpoint_uploads_the_state_as_of_its_barrier_and_names_nothing_older(world: World, kind: str) -> None:
    host = world.host()
    host.start(*(slot_spec(host.run, index, kind=kind) for index in range(2)))
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    for index in (0, 1):
        host.changelog.materializer.materialize(index)
    host.batch(2, {S0: {B0: b"2"}})
    older = {path for ack in host.acknowledged(1) for path in paths(ack.state)}
    host.changelog.completed(1)
    barrier = host.changelog.barrier(2, full=True)
    host.batch(3, {S0: {A0: b"3"}})
    acks = host.changelog.acknowledge(barrier)
    assert older
    assert older.isdisjoint(path for ack in acks for path in paths(ack.state))
    assert not any(file.is_segment for ack in acks for file in ack.state.files)
    assert all(ack.checkpointed_bytes == ack.full_bytes > 0 for ack in acks)
    assert [world.state(ack.state) for ack in acks] == [{A0: b"1", B0: b"2"}, {A1: b"1"}]
    host.changelog.completed(2)
    assert batches(host, S0) == [3]  # the next checkpoint builds on what the full one uploaded
    assert world.state(host.acknowledged(3)[0].state) == {A0: b"3", B0: b"2"}


def test_nobody_else_materializes_a_slot_while_a_full_checkpoint_waits_for_it(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    barrier = host.changelog.barrier(1, full=True)
    host.batch(2, {S0: {A0: b"2"}})
    host.changelog.materializer.materialize(0)  # it would be newer than the checkpoint's
    assert world.state(host.changelog.acknowledge(barrier)[0].state) == {A0: b"1"}
    host.changelog.materializer.materialize(0)
    assert batches(host, S0) == []
    assert world.state(host.acknowledged(2)[0].state) == {A0: b"2"}


def test_a_full_checkpoint_that_fails_leaves_the_changelog_as_it_was(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    host.acknowledged(1)
    host.changelog.completed(1)
    barrier = host.changelog.barrier(2, full=True)
    world.fail()
    with pytest.raises(StorageError):
        host.changelog.acknowledge(barrier)
    world.work_again()
    host.changelog.aborted(2)
    assert world.state(host.acknowledged(3)[0].state) == {A0: b"1"}
    host.batch(2, {S0: {A0: b"2"}})
    host.changelog.materializer.materialize(0)
    assert batches(host, S0) == []


# --- the end -----------------------------------------------------------------------------------------


def test_the_end_of_a_run_deletes_what_no_checkpoint_refers_to(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    states = checkpoint(world, host, 1)
    host.batch(2, {S0: {A0: b"2"}})
    pending = host.acknowledged(2)  # nobody has said what became of it
    host.batch(3, {S0: {A0: b"3"}})
    host.changelog.materializer.materialize(0)
    host.prepare(4, 0, {S0: {A0: b"4"}})
    host.wait_until_durable(4, 0)
    named = {path for state in (*states, *(ack.state for ack in pending)) for path in paths(state)}
    assert world.stored() > named
    host.changelog.end()
    assert world.stored() == named
    assert world.state(pending[0].state) == {A0: b"2"}


def test_a_new_generation_begins_with_what_it_restores(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    states = checkpoint(world, host, 1)
    world.fail()
    host.batch(2, {S0: {A0: b"2"}})
    world.work_again()
    host.prepare(3, 0, {S0: {A0: b"3"}})
    host.start(
        *(slot_spec(host.run, i, generation=2, restore=[states[i]], restore_batch=1, decided_batch=1) for i in range(2))
    )
    assert host.contents() == {S0: {A0: b"1"}, S1: {A1: b"1"}}
    named = {path for state in states for path in paths(state)}
    wait_until(lambda: world.stored() == named)
    host.batch(2_000_000_000, {S1: {A1: b"x"}})
    acks = host.acknowledged(2)
    assert [world.state(ack.state) for ack in acks] == [{A0: b"1"}, {A1: b"x"}]
    assert len(acks[0].beforehand) == 1


def test_a_storage_that_cannot_delete_is_no_failure_at_the_end(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    world.storage.root.rename(world.folder / "away")
    (world.storage.root).write_text("not a folder")
    host.changelog.end()


def test_an_unknown_segment_of_an_older_generation_is_not_taken_for_a_new_one(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    states = checkpoint(world, host, 1)
    host.start(
        *(slot_spec(host.run, i, generation=2, restore=[states[i]], restore_batch=1, decided_batch=1) for i in range(2))
    )
    host.changelog.queue.offer(Sealed("op", 0, 2, 0, str(world.folder / "gone"), 100, 1))
    assert host.batch(2_000_000_000, {S0: {A0: b"2"}, S1: {A1: b"2"}})[S0].durable
    assert world.state(host.acknowledged(2)[0].state) == {A0: b"2"}


def test_segments_of_a_restored_log_are_looked_for_where_they_are(world: World) -> None:
    """The checkpoint came from another storage; what the run uploaded since is in its own."""
    elsewhere = LocalStorage(str(world.folder / "elsewhere"))
    first = Host(world.run(), elsewhere)
    world.hosts.append(first)
    first.start(*(slot_spec(first.run, index) for index in range(2)))
    first.batch(1, {S0: {A0: b"1"}, S1: {A1: b"1"}})
    states = [ack.state for ack in first.acknowledged(1)]
    more: dict[str, Any] = {
        "generation": 2,
        "restore_batch": 1,
        "restore_owned": False,
        "restore_storage": msgspec.structs.replace(first.run.storage, url=elsewhere.url),
    }
    host = world.host()
    host.start(*(slot_spec(host.run, i, restore=[states[i]], decided_batch=1, **more) for i in range(2)))
    log: list[tuple[str, StateFile]] = [("op", host.batch(first_batch(2), {S0: {B0: b"2"}})[S0].file)]
    host.kill(local_files=False)
    other = world.host()
    decided = first_batch(2)
    other.start(
        slot_spec(other.run, 0, restore=[states[0]], decided_batch=decided, segments=log, incarnation=2, **more)
    )
    assert other.contents()[S0] == {A0: b"1", B0: b"2"}


def test_the_job_has_one_folder(world: World) -> None:
    host = world.started()
    host.batch(1, {S0: {A0: b"1"}})
    host.changelog.materializer.materialize(0)
    assert all(path.startswith(f"{JOB}/shared/") for path in world.stored())


class OddStorage(LocalStorage):
    """A storage plugin that raises what its library raises."""

    broken = False

    def _fail_if_broken(self) -> None:
        if self.broken:
            raise ValueError("an error of the library")

    def upload(self, source: Path, path: str) -> None:
        self._fail_if_broken()
        super().upload(source, path)

    def write(self, path: str, data: bytes) -> None:
        self._fail_if_broken()
        super().write(path, data)

    def create(self, path: str, data: bytes) -> None:
        self._fail_if_broken()
        super().create(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        self._fail_if_broken()
        super().delete(paths)


def test_a_storage_that_raises_an_error_of_another_kind_does_not_end_the_threads(tmp_path: Path) -> None:
    storage = OddStorage(str(tmp_path / "durable"))
    host = Host(run_info(tmp_path, storage, changelog_settings()), storage, tuning=QUICK)
    try:
        host.start(slot_spec(host.run, 0), slot_spec(host.run, 1))
        host.batch(1, {S0: {A0: b"1"}})
        storage.broken = True
        assert host.batch(2, {S0: {A0: b"2"}})[S0] == SegmentUpload(durable=False, file=None)
        storage.broken = False
        assert host.batch(3, {S0: {A0: b"3"}})[S0].durable
        assert batches(host) == [1, 2, 3]
    finally:
        host.kill()


def test_a_thread_of_the_changelog_that_dies_is_reported_with_its_traceback(world: World) -> None:
    broken = replace(QUICK, upkeep_interval="soon")  # type: ignore[arg-type]  # what no caller does
    host = world.host(broken)
    (error,) = wait_until(lambda: host.failures, what="the report")
    assert "changelog-upkeep has died: TypeError" in str(error)
    assert "_upkeep_loop" in str(error)
