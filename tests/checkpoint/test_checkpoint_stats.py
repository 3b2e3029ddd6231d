"""The bounded history of checkpoints."""

from __future__ import annotations

from dataclasses import replace

from strandline.checkpoint import CheckpointHistory, CheckpointStats, PendingCheckpoint, SubtaskStats
from strandline.checkpoint.stats import CheckpointCounts, RestoredCheckpoint, Status, checkpoint_stats


def stats(id: int, status: Status, subtasks: int = 0) -> CheckpointStats:
    pending = PendingCheckpoint(id, "checkpoint", 0, 0.0, 0.0, frozenset())
    figures = checkpoint_stats(pending, status, 1.0)
    one = SubtaskStats("count", 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    return CheckpointStats(
        **{name: getattr(figures, name) for name in CheckpointStats.__slots__ if name != "subtasks"},
        subtasks=(one,) * subtasks,
    )


def test_every_checkpoint_is_counted_once_however_often_it_is_recorded() -> None:
    history = CheckpointHistory()
    for _ in range(3):
        history.record(stats(1, "in_progress"))
    assert history.counts == CheckpointCounts(total=1, in_progress=1)
    history.record(stats(1, "completed"))
    history.record(stats(2, "in_progress"))
    history.record(stats(2, "failed"))
    history.record_restored(RestoredCheckpoint(1, "chk-1", "checkpoint", 5.0))
    assert history.counts == CheckpointCounts(total=2, completed=1, failed=1, restored=1)
    assert history.last_completed is not None
    assert history.last_completed.id == 1
    assert history.last_failed is not None
    assert history.last_failed.id == 2


def test_an_id_that_comes_again_after_a_restart_is_another_checkpoint() -> None:
    history = CheckpointHistory()
    for status in ("in_progress", "failed", "in_progress", "completed"):
        history.record(stats(7, status))
    assert history.counts == CheckpointCounts(total=2, completed=1, failed=1)


def test_the_oldest_go_first_and_the_counts_stay() -> None:
    history = CheckpointHistory(limit=3)
    history.record(stats(1, "in_progress"))
    for id in range(2, 12):
        history.record(stats(id, "completed"))
    assert [entry.id for entry in history.checkpoints()] == [1, 10, 11]
    assert history.get(5) is None
    history.record(stats(1, "completed"))
    assert history.counts == CheckpointCounts(total=11, completed=11)


def test_figures_of_subtasks_are_bounded_too() -> None:
    history = CheckpointHistory(subtask_limit=25)
    for id in range(1, 6):
        history.record(stats(id, "in_progress", subtasks=10))
        history.record(stats(id, "completed", subtasks=10))
    assert [len(entry.subtasks) for entry in history.checkpoints()] == [0, 0, 0, 10, 10]
    history.record(stats(6, "completed", subtasks=100))
    assert [len(entry.subtasks) for entry in history.checkpoints()] == [0, 0, 0, 0, 0, 100]


def test_the_end_of_every_checkpoint_is_told_once() -> None:
    told: list[tuple[int, str]] = []
    history = CheckpointHistory(on_end=lambda one: told.append((one.id, one.status)))
    ends: list[tuple[int, Status]] = [(1, "in_progress"), (2, "in_progress"), (1, "completed"), (2, "failed")]
    for id, status in ends:
        history.record(stats(id, status))
    assert told == [(1, "completed"), (2, "failed")]


def test_a_checkpoint_is_shown_in_one_line() -> None:
    done = replace(stats(7, "completed", subtasks=3), checkpointed_bytes=1234, full_bytes=56789, end_to_end_ms=2000.0)
    assert repr(done) == (
        "<CheckpointStats checkpoint 7 at batch 0: 1,234 of 56,789 bytes uploaded, completed in 2,000 ms>"
    )
    failed = replace(stats(8, "failed"), failure="storage is full\nTraceback ...")
    assert repr(failed).endswith("failed: storage is full>")
    assert "in progress, 0 of 0 subtasks" in repr(stats(9, "in_progress"))


def test_a_completed_checkpoint_says_when_its_entry_was_won_and_how_long_its_rows_took_to_be_visible() -> None:
    pending = PendingCheckpoint(3, "checkpoint", 0, 10.0, 11.0, frozenset(), epoch=1000.0)
    done = checkpoint_stats(pending, "completed", 14.0, "chk-3", entry_time=13.5)
    assert (done.completed_time, done.publish_ms, done.end_to_end_ms) == (1013.5, 500.0, 4000.0)
    for unfinished in (checkpoint_stats(pending, "in_progress"), checkpoint_stats(pending, "failed", 14.0)):
        assert (unfinished.completed_time, unfinished.publish_ms) == (None, 0.0)


def test_a_savepoint_knows_its_format_and_publishes_nothing() -> None:
    pending = PendingCheckpoint(3, "savepoint", 0, 10.0, 11.0, frozenset(), savepoint_format="native")
    done = checkpoint_stats(pending, "completed", 14.0, "saved")
    assert (done.savepoint_format, done.completed_time, done.publish_ms) == ("native", 14.0, 0.0)


def test_a_dropped_checkpoint_is_marked_without_being_counted_or_told_again() -> None:
    told: list[int] = []
    history = CheckpointHistory(on_end=lambda one: told.append(one.id))
    for id in (1, 2):
        history.record(stats(id, "completed"))
    history.record_discarded([1, 99])
    assert [one.discarded for one in history.checkpoints()] == [True, False]
    assert (told, history.counts.completed) == ([1, 2], 2)
