"""The coordinator's decisions, one situation at a time."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from strandline.checkpoint import (
    CheckpointCoordinator,
    CompletionDecision,
    CompletionPlan,
    FileHandle,
    JobShape,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskAck,
    SubtaskState,
)
from strandline.checkpoint.decisions import FailDecision
from strandline.checkpoint.metadata import keyed_files
from strandline.errors import CheckpointError

SUBTASKS = [("count", 0), ("count", 1)]
SHAPE = JobShape("visits", 1, 2, 128, ("count",))


def coordinator(**options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator(**{"interval": 10.0, "subtasks": SUBTASKS, **options})


def handle(path: str) -> FileHandle:
    return FileHandle(path, 100, "crc32:00000000")


def ack(
    subtask: int, shared: dict[str, str], new: AbstractSet[str] = frozenset(), private: str = "", t: float = 0.0
) -> SubtaskAck:
    """`shared`: identity -> path; `new`: the paths among them that were uploaded now; `private`: one more upload."""
    files = [StateFile(f"{identity}.sst", identity, True, handle(path)) for identity, path in shared.items()]
    uploaded = [handle(path) for path in shared.values() if path in new]
    if private:
        files.append(StateFile("MANIFEST", "m", False, handle(private)))
        uploaded.append(handle(private))
    state = SubtaskState("count", subtask, subtask * 64, subtask * 64 + 64, "rocksdb", True, tuple(files))
    return SubtaskAck(
        state=state,
        uploaded=tuple(uploaded),
        barrier_time=t,
        ack_time=t + 1.0,
        sync_ms=10.0,
        async_ms=200.0,
        checkpointed_bytes=100 * len(uploaded),
        full_bytes=100 * len(files),
    )


def paths(handles: tuple[FileHandle, ...]) -> set[str]:
    return {found.path for found in handles}


def prepare(c: CheckpointCoordinator, id: int, now: float = 0.0) -> CompletionPlan:
    return c.prepare_completion(id, now, shape=SHAPE, source=SourcePosition(0, {}))


def complete(c: CheckpointCoordinator, id: int, now: float = 0.0) -> CompletionDecision:
    prepare(c, id, now)
    return c.confirm_completion(id, now)


def take(c: CheckpointCoordinator, now: float, batch: int, *acks: SubtaskAck) -> CompletionDecision:
    pending = c.trigger(now, now, batch)
    for one in acks:
        c.acknowledge(pending.id, "count", one.state.subtask, one)
    return complete(c, pending.id, now)


# --- triggering ----------------------------------------------------------------------------------


def test_the_first_checkpoint_is_due_one_interval_after_the_start() -> None:
    c = coordinator(start_time=100.0)
    assert not c.should_trigger(109.0, 0)
    assert c.due_at() == 110.0
    assert c.should_trigger(110.0, 0)


def test_nothing_is_due_while_nothing_was_committed() -> None:
    c = coordinator(covered_batch=5)
    assert not c.should_trigger(50.0, None)
    assert not c.should_trigger(50.0, 5)
    assert c.due_at() == math.inf
    assert c.should_trigger(60.0, 6)
    assert c.due_at() == 60.0, "work that came after a quiet time is due when it came, not an hour ago"


def test_no_second_checkpoint_of_the_same_batch_unless_forced() -> None:
    c = coordinator()
    take(c, 10.0, 3, ack(0, {}), ack(1, {}))
    assert not c.should_trigger(100.0, 3)
    assert c.should_trigger(100.0, 3, forced=True)


def test_the_interval_counts_from_when_the_last_one_was_due() -> None:
    c = coordinator()
    assert c.should_trigger(14.0, 0) is True
    pending = c.trigger(14.0, 10.0, 0)
    assert pending.trigger_time == 10.0
    assert pending.barrier_time == 14.0
    for subtask in (0, 1):
        c.acknowledge(1, "count", subtask, ack(subtask, {}))
    complete(c, 1, 15.0)
    assert not c.should_trigger(19.0, 1)
    assert c.should_trigger(20.0, 1)


def test_a_checkpoint_that_outlasts_the_interval_lets_the_next_start_at_once() -> None:
    c = coordinator()
    c.trigger(10.0, 10.0, 0)
    for subtask in (0, 1):
        c.acknowledge(1, "count", subtask, ack(subtask, {}))
    assert not c.should_trigger(35.0, 1)
    complete(c, 1, 40.0)
    assert c.due_at() == 40.0
    assert c.should_trigger(40.0, 1)
    c.trigger(40.0, 40.0, 1)
    assert [pending.id for pending in c.pending()] == [2]
    assert not coordinator(max_concurrent=2).should_trigger(9.0, 1)


def test_the_minimum_pause_holds_the_next_one_back() -> None:
    c = coordinator(min_pause=5.0, max_concurrent=3)
    c.trigger(10.0, 10.0, 0)
    assert not c.should_trigger(30.0, 1), "with a pause there is one at a time"
    for subtask in (0, 1):
        c.acknowledge(1, "count", subtask, ack(subtask, {}))
    complete(c, 1, 40.0)
    assert not c.should_trigger(44.0, 1)
    assert c.should_trigger(45.0, 1)


def test_concurrent_checkpoints_up_to_the_limit() -> None:
    c = coordinator(max_concurrent=2)
    c.trigger(10.0, 10.0, 0)
    assert not c.should_trigger(20.0, 0), "the pending one covers that batch already"
    assert c.should_trigger(21.0, 1)
    c.trigger(21.0, 21.0, 1)
    assert not c.should_trigger(50.0, 2)
    assert not c.should_trigger(50.0, 2, forced=True)
    with pytest.raises(CheckpointError, match="max_concurrent_checkpoints"):
        c.trigger(50.0, 50.0, 2)


# --- acknowledgements ----------------------------------------------------------------------------


def test_the_last_acknowledgement_makes_it_ready() -> None:
    c = coordinator()
    c.trigger(10.0, 10.0, 0)
    assert c.acknowledge(1, "count", 0, ack(0, {})).status == "waiting"
    assert c.pending()[0].missing() == [("count", 1)]
    assert c.ready() == ()
    with pytest.raises(CheckpointError, match="no acknowledgement from"):
        prepare(c, 1)
    assert c.acknowledge(1, "count", 1, ack(1, {})).status == "ready"
    assert c.ready() == (1,)


def test_a_repeated_acknowledgement_gives_up_only_what_it_uploaded_anew() -> None:
    c = coordinator()
    c.trigger(10.0, 10.0, 0)
    c.acknowledge(1, "count", 0, ack(0, {"a": "x"}, {"x"}))
    assert c.acknowledge(1, "count", 0, ack(0, {"a": "x"}, {"x"})).delete == ()
    again = c.acknowledge(1, "count", 0, ack(0, {"a": "y"}, {"y"}))
    assert (again.status, paths(again.delete)) == ("repeated", {"y"})


def test_a_late_acknowledgement_gives_up_its_new_uploads_only() -> None:
    c = coordinator(tolerable_failures=5)
    take(c, 10.0, 0, ack(0, {"a": "x"}, {"x"}), ack(1, {}))
    c.trigger(20.0, 20.0, 1)
    c.fail(2, "timed out", 30.0)
    late = c.acknowledge(2, "count", 0, ack(0, {"a": "x", "b": "y"}, {"y"}))
    assert (late.status, paths(late.delete)) == ("late", {"y"})
    assert c.acknowledge(1, "count", 0, ack(0, {"a": "x"}, {"x"})).delete == (), "completed, and in use"


def test_an_unknown_checkpoint_is_not_ours_to_judge() -> None:
    c = coordinator(first_checkpoint_id=5)
    for id in (4, 5):
        decision = c.acknowledge(id, "count", 0, ack(0, {"a": "x"}, {"x"}))
        assert (decision.status, decision.delete) == ("unknown", ())


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_checkpoint_gives_up_its_own_uploads() -> None:
    c = coordinator(tolerable_failures=1)
    take(c, 10.0, 0, ack(0, {"a": "x"}, {"x"}), ack(1, {}))
    c.trigger(20.0, 20.0, 1)
    c.acknowledge(2, "count", 0, ack(0, {"a": "x", "b": "y"}, {"y"}, private="p"))
    decision = c.fail(2, "the disk is full", 25.0)
    assert paths(decision.delete) == {"y", "p"}
    assert not decision.run_must_fail
    assert c.fail(2, "again", 26.0).failed == ()
    c.trigger(30.0, 30.0, 1)
    decision = c.fail(3, "the disk is full", 35.0)
    assert decision.run_must_fail
    assert "2 in a row, 1 tolerated" in decision.reason


def test_a_failed_savepoint_is_none_of_the_failures_in_a_row() -> None:
    c = coordinator(tolerable_failures=0)
    savepoint = c.trigger(10.0, 10.0, 0, kind="savepoint")
    decision = c.fail(savepoint.id, "the disk is full", 11.0)
    assert not decision.run_must_fail
    assert decision.reason == "Savepoint 1 failed: the disk is full"


def test_a_completed_checkpoint_ends_the_row_of_failures() -> None:
    c = coordinator(tolerable_failures=1)
    c.trigger(10.0, 10.0, 0)
    assert not c.fail(1, "x", 11.0).run_must_fail
    take(c, 20.0, 0, ack(0, {}), ack(1, {}))
    c.trigger(30.0, 30.0, 1)
    assert not c.fail(3, "x", 31.0).run_must_fail


def test_a_checkpoint_expires_but_not_while_it_is_being_completed() -> None:
    c = coordinator(timeout=60.0, max_concurrent=2)
    c.trigger(10.0, 10.0, 0)
    for subtask in (0, 1):
        c.acknowledge(1, "count", subtask, ack(subtask, {}))
    c.trigger(20.0, 20.0, 1)
    assert c.expire(69.0) == ()
    assert c.expire(70.0) == (1,)
    prepare(c, 1)
    assert c.expire(100.0) == (2,)


def test_the_end_of_a_run_leaves_a_completion_alone() -> None:
    c = coordinator(max_concurrent=2)
    c.trigger(10.0, 10.0, 0)
    for subtask in (0, 1):
        c.acknowledge(1, "count", subtask, ack(subtask, {f"a{subtask}": f"x{subtask}"}, {f"x{subtask}"}))
    c.trigger(20.0, 20.0, 1)
    c.acknowledge(2, "count", 0, ack(0, {"b": "y"}, {"y"}))
    prepare(c, 1)
    decision = c.fail_all("the run restarts", 30.0)
    assert (decision.failed, paths(decision.delete), decision.run_must_fail) == ((2,), {"y"}, False)


# --- completion ----------------------------------------------------------------------------------


def test_metadata_says_everything_in_the_order_of_subtasks() -> None:
    c = coordinator()
    c.trigger(12.0, 10.0, 7)
    c.acknowledge(1, "count", 1, ack(1, {}))
    c.acknowledge(1, "count", 0, ack(0, {"a": "x"}, {"x"}, private="p"))
    sink = SinkFile("out", "_s", "f", 1, 2)
    source = SourcePosition(7, {"offsets/7": b"v1"})
    plan = c.prepare_completion(1, 13.0, shape=SHAPE, source=source, sink_files=[sink], properties={"k": "v"})
    metadata = plan.metadata
    assert [state.subtask for state in metadata.subtasks] == [0, 1]
    assert (metadata.job, metadata.checkpoint_id, metadata.batch_id, metadata.kind) == ("visits", 1, 7, "checkpoint")
    assert (metadata.trigger_time, metadata.completed_time) == (10.0, 13.0)
    assert (metadata.source, metadata.sink_files, metadata.properties) == (source, (sink,), {"k": "v"})
    assert (plan.retained, plan.dropped) == ((1,), ())


def test_the_second_copy_of_a_file_is_replaced_by_the_first_confirmed_one() -> None:
    c = coordinator(max_concurrent=2, num_retained=2)
    for now, copy in ((10.0, "x1"), (20.0, "x2")):
        id = c.trigger(now, now, int(now)).id
        c.acknowledge(id, "count", 0, ack(0, {"a": copy}, {copy}))
        c.acknowledge(id, "count", 1, ack(1, {}))
    complete(c, 1)
    plan = prepare(c, 2)
    assert paths(tuple(dict(keyed_files(plan.metadata.subtasks)).values())) == {"x1"}
    assert paths(plan.duplicates) == {"x2"}
    assert paths(c.confirm_completion(2, 30.0).delete) == {"x2"}
    # The slot may not have heard of it, and refer to its own copy again.
    c.trigger(40.0, 40.0, 40)
    c.acknowledge(3, "count", 0, ack(0, {"a": "x2"}))
    c.acknowledge(3, "count", 1, ack(1, {}))
    assert paths(tuple(dict(keyed_files(prepare(c, 3).metadata.subtasks)).values())) == {"x1"}


def test_completing_a_checkpoint_aborts_older_pending_ones_and_drops_the_oldest_retained() -> None:
    c = coordinator(max_concurrent=2)
    take(c, 10.0, 0, ack(0, {"a": "x"}, {"x"}, private="p1"), ack(1, {}))
    c.trigger(20.0, 20.0, 1)
    c.trigger(30.0, 30.0, 2)
    c.acknowledge(2, "count", 0, ack(0, {"a": "x", "b": "y2"}, {"y2"}))
    c.acknowledge(3, "count", 0, ack(0, {"b": "y3"}, {"y3"}, private="p3"))
    c.acknowledge(3, "count", 1, ack(1, {}))
    decision = complete(c, 3, 40.0)
    assert decision.aborted == (2,)
    assert (decision.dropped, decision.retained) == ((1,), (3,))
    assert paths(decision.delete) == {"x", "p1", "y2"}
    assert c.confirm_completion(3, 41.0).delete == ()
    assert paths(c.drop_all().delete) == {"y3", "p3"}
    assert len(c.registry) == 0


def test_a_file_nobody_confirmed_cannot_become_part_of_a_checkpoint() -> None:
    c = coordinator()
    c.trigger(10.0, 10.0, 0)
    c.acknowledge(1, "count", 0, ack(0, {"a": "x"}))
    c.acknowledge(1, "count", 1, ack(1, {}))
    with pytest.raises(CheckpointError, match=r"'count', subtask 0: file 'a.sst' \(x\) is neither uploaded for it"):
        prepare(c, 1)
    assert len(c.registry) == 0
    assert c.fail(1, "unusable", 11.0).delete == ()


def test_one_checkpoint_completes_at_a_time() -> None:
    c = coordinator(max_concurrent=2)
    for now in (10.0, 20.0):
        id = c.trigger(now, now, int(now)).id
        for subtask in (0, 1):
            c.acknowledge(id, "count", subtask, ack(subtask, {}))
    prepare(c, 1)
    assert c.ready() == ()
    with pytest.raises(CheckpointError, match="wait until checkpoint 1"):
        prepare(c, 2)
    with pytest.raises(CheckpointError, match="not prepared"):
        c.confirm_completion(2, 0.0)
    c.confirm_completion(1, 30.0)
    assert c.ready() == (2,)


def test_metadata_that_cannot_be_written_fails_the_checkpoint_and_frees_its_files() -> None:
    c = coordinator(tolerable_failures=1)
    take(c, 10.0, 0, ack(0, {"a": "x"}, {"x"}), ack(1, {}))
    c.trigger(20.0, 20.0, 1)
    c.acknowledge(2, "count", 0, ack(0, {"a": "x", "b": "y"}, {"y"}))
    c.acknowledge(2, "count", 1, ack(1, {}))
    prepare(c, 2)
    prepare(c, 2)
    assert paths(c.fail(2, "storage is full", 22.0).delete) == {"y"}
    assert c.registry.checkpoints() == (1,)
    assert c.retained == (1,)


def test_a_savepoint_touches_no_other_checkpoint() -> None:
    c = coordinator(max_concurrent=1)
    c.trigger(10.0, 10.0, 0)
    savepoint = c.trigger(11.0, 11.0, 0, kind="savepoint")
    for subtask in (0, 1):
        c.acknowledge(savepoint.id, "count", subtask, ack(subtask, {"a": f"s{subtask}"}, {f"s{subtask}"}))
    decision = complete(c, savepoint.id)
    assert (decision.aborted, decision.dropped, decision.delete) == ((), (), ())
    assert c.retained == ()
    assert [pending.id for pending in c.pending()] == [1]
    assert c.acknowledge(savepoint.id, "count", 0, ack(0, {"a": "s0"}, {"s0"})).delete == ()


def test_a_new_coordinator_knows_what_the_retained_checkpoints_use() -> None:
    c = coordinator(num_retained=2)
    metadatas = []
    for index, shared in enumerate(({"a": "x", "b": "y"}, {"b": "y", "c": "z"}, {"c": "z"})):
        pending = c.trigger(index, index, index)
        known = {"x", "y"} if index == 0 else {"z"} if index == 1 else set()
        c.acknowledge(pending.id, "count", 0, ack(0, shared, known))
        c.acknowledge(pending.id, "count", 1, ack(1, {}))
        metadatas.append(prepare(c, pending.id).metadata)
        c.confirm_completion(pending.id, index)
    # The third dropped the first; the driver died before it deleted anything.
    fresh = coordinator(num_retained=2, first_checkpoint_id=4)
    assert paths(fresh.recover(metadatas[1:], metadatas[:1])) == {"x"}
    assert fresh.retained == (2, 3)
    assert paths(fresh.drop_all().delete) == {"y", "z"}


# --- figures -------------------------------------------------------------------------------------


def test_the_figures_of_a_checkpoint() -> None:
    c = coordinator()
    c.trigger(12.0, 10.0, 0)
    c.acknowledge(1, "count", 0, ack(0, {"a": "x"}, {"x"}, t=12.0))
    assert c.checkpoints()[0].acknowledged == 1
    c.acknowledge(1, "count", 1, ack(1, {}, t=12.5))
    prepare(c, 1, 14.0)
    c.confirm_completion(1, 14.0, "visits/chk-1")
    (stats,) = c.checkpoints()
    assert (stats.id, stats.status, stats.path, stats.batch_id) == (1, "completed", "visits/chk-1", 0)
    assert (stats.trigger_time, stats.end_to_end_ms, stats.start_delay_ms) == (10.0, 4000.0, 2000.0)
    assert (stats.barrier_to_completed_ms, stats.sync_ms, stats.async_ms) == (2000.0, 10.0, 200.0)
    assert (stats.alignment_ms, stats.checkpointed_bytes, stats.full_bytes) == (500.0, 100, 100)
    assert [(one.subtask, one.end_to_end_ms, one.start_delay_ms) for one in stats.subtasks] == [
        (0, 3000.0, 2790.0),
        (1, 3500.0, 3290.0),
    ]
    assert [one.alignment_ms for one in stats.subtasks] == [0.0, 500.0]


def test_a_pending_savepoint_takes_no_place_and_no_time_from_checkpoints() -> None:
    c = coordinator(min_pause=5.0)
    savepoint = c.trigger(1.0, 1.0, 0, kind="savepoint")
    assert c.should_trigger(10.0, 0)
    first = c.trigger(10.0, c.due_at(), 0)
    for subtask in range(2):
        c.acknowledge(first.id, "count", subtask, ack(subtask, {}, set()))
    complete(c, first.id, 11.0)
    c.fail(savepoint.id, "too slow", 19.0)
    assert c.should_trigger(20.0, 1)


def test_the_times_of_a_checkpoint_are_shown_as_seconds_since_the_epoch() -> None:
    c = coordinator()
    pending = c.trigger(12.0, 11.0, 0, epoch=1000.0)
    for subtask in range(2):
        c.acknowledge(pending.id, "count", subtask, ack(subtask, {}, set()))
    metadata = c.prepare_completion(pending.id, 14.0, shape=SHAPE, source=SourcePosition(0, {})).metadata
    assert (metadata.trigger_time, metadata.completed_time) == (1011.0, 1014.0)
    c.confirm_completion(pending.id, 15.0)
    (stats,) = c.history.checkpoints()
    assert (stats.trigger_time, stats.start_delay_ms, stats.end_to_end_ms) == (1011.0, 1000.0, 4000.0)


def test_a_checkpoint_whose_log_entry_may_exist_can_only_be_finished() -> None:
    c = coordinator()
    pending = c.trigger(10.0, 10.0, 0)
    for subtask in range(2):
        c.acknowledge(pending.id, "count", subtask, ack(subtask, {"a": f"a{subtask}"}, {f"a{subtask}"}))
    with pytest.raises(CheckpointError, match="not prepared"):
        c.enter(pending.id)
    c.prepare_completion(pending.id, 11.0, shape=SHAPE, source=SourcePosition(0, {}))
    c.enter(pending.id)
    assert c.fail(pending.id, "storage is away", 12.0) == FailDecision()
    assert c.fail_all("the run ended", 12.0) == FailDecision(reason="the run ended")
    assert c.expire(1e9) == ()
    assert c.confirm_completion(pending.id, 13.0).retained == (pending.id,)
