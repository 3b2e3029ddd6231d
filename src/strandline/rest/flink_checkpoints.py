"""Flink's JSON about checkpoints: counts, summary, latest, history and one checkpoint with its vertices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
from strandline.observe.facts import JobFacts, vertex_id
from strandline.rest.statistics import StatsSummary, spread

HISTORY = 100
"""How many checkpoints `history` holds if a client does not say. Flink's own default is 10."""
MOST_HISTORY = 10_000

Status = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]


class Counts(Struct, frozen=True):
    """How many checkpoints there were."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


class Summary(Struct, frozen=True):
    """The spread of the figures of all completed checkpoints in the history. Sizes are bytes, durations ms."""

    checkpointed_size: StatsSummary
    state_size: StatsSummary
    end_to_end_duration: StatsSummary
    alignment_buffered: StatsSummary = StatsSummary()
    processed_data: StatsSummary = StatsSummary()
    persisted_data: StatsSummary = StatsSummary()


class TaskCheckpointStatistics(Struct, frozen=True):
    """One vertex in one checkpoint."""

    id: int
    status: Status
    latest_ack_timestamp: int
    checkpointed_size: int
    state_size: int
    end_to_end_duration: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    alignment_buffered: int = 0
    processed_data: int = 0
    persisted_data: int = 0


class CheckpointStatistics(Struct, frozen=True):
    """One checkpoint. Times are milliseconds since the epoch; -1 where there is none.

    `external_path` and `discarded` are those of a completed checkpoint, the `failure_…` those of a failed one. No rows
    wait for a barrier, so nothing is buffered, processed or persisted in flight.
    """

    className: Literal["completed", "failed", "in_progress"]
    id: int
    status: Status
    is_savepoint: bool
    savepointFormat: str | None
    trigger_timestamp: int
    latest_ack_timestamp: int
    checkpointed_size: int
    state_size: int
    end_to_end_duration: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    checkpoint_type: Literal["CHECKPOINT", "UNALIGNED_CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"]
    tasks: dict[str, TaskCheckpointStatistics] = {}
    alignment_buffered: int = 0
    processed_data: int = 0
    persisted_data: int = 0
    external_path: str | None = None
    discarded: bool | None = None
    failure_timestamp: int | None = None
    failure_message: str | None = None


class RestoredCheckpointStatistics(Struct, frozen=True):
    """What the job last started from."""

    id: int
    restore_timestamp: int
    is_savepoint: bool
    external_path: str | None


class LatestCheckpoints(Struct, frozen=True):
    """The newest checkpoint of each kind."""

    completed: CheckpointStatistics | None
    savepoint: CheckpointStatistics | None
    failed: CheckpointStatistics | None
    restored: RestoredCheckpointStatistics | None


class CheckpointingStatistics(Struct, frozen=True):
    """The checkpoints of a job, newest first."""

    counts: Counts
    summary: Summary
    latest: LatestCheckpoints
    history: list[CheckpointStatistics]


class CheckpointDuration(Struct, frozen=True, rename={"asynchronous": "async"}):
    """The synchronous and the asynchronous part of a checkpoint, in milliseconds."""

    sync: int
    asynchronous: int


class CheckpointAlignment(Struct, frozen=True):
    """How long a subtask waited for the others. Nothing is buffered meanwhile."""

    duration: int
    buffered: int = 0
    processed: int = 0
    persisted: int = 0


class SubtaskCheckpointStatistics(Struct, frozen=True, omit_defaults=True):
    """One subtask in one checkpoint. A subtask that has not acknowledged has an index and a status only."""

    className: Literal["completed", "pending_or_failed"]
    index: int
    status: Literal["completed", "pending_or_failed"]
    ack_timestamp: int | None = None
    end_to_end_duration: int | None = None
    checkpointed_size: int | None = None
    state_size: int | None = None
    checkpoint: CheckpointDuration | None = None
    alignment: CheckpointAlignment | None = None
    start_delay: int | None = None
    unaligned_checkpoint: bool | None = None
    aborted: bool | None = None


class DurationSummary(Struct, frozen=True, rename={"asynchronous": "async"}):
    """The spread of both parts of a checkpoint."""

    sync: StatsSummary
    asynchronous: StatsSummary


class AlignmentSummary(Struct, frozen=True):
    """The spread of the alignment."""

    duration: StatsSummary
    buffered: StatsSummary = StatsSummary()
    processed: StatsSummary = StatsSummary()
    persisted: StatsSummary = StatsSummary()


class SubtasksSummary(Struct, frozen=True):
    """The spread of the figures of a vertex's subtasks."""

    checkpointed_size: StatsSummary
    state_size: StatsSummary
    end_to_end_duration: StatsSummary
    checkpoint_duration: DurationSummary
    alignment: AlignmentSummary
    start_delay: StatsSummary


class TaskCheckpointStatisticsWithSubtasks(TaskCheckpointStatistics, frozen=True, kw_only=True):
    """One vertex in one checkpoint, with its subtasks."""

    summary: SubtasksSummary
    subtasks: list[SubtaskCheckpointStatistics]


def checkpointing_statistics(facts: JobFacts, history: int = HISTORY) -> CheckpointingStatistics:
    """`GET /jobs/:jobid/checkpoints`."""
    known, counts = facts.checkpoints, facts.checkpoints.counts
    completed = [one for one in known.history if one.status == "completed"]
    newest = list(reversed(known.history[-history:])) if history else []
    return CheckpointingStatistics(
        Counts(counts.restored, counts.total, counts.in_progress, counts.completed, counts.failed),
        Summary(
            spread(one.checkpointed_bytes for one in completed),
            spread(one.full_bytes for one in completed),
            spread(one.end_to_end_ms for one in completed),
        ),
        LatestCheckpoints(
            completed=_latest(known.last_completed),
            savepoint=_latest(known.last_savepoint),
            failed=_latest(known.last_failed),
            restored=_restored(facts),
        ),
        [checkpoint_statistics(one) for one in newest],
    )


def checkpoint_statistics(
    stats: CheckpointStats, tasks: dict[str, TaskCheckpointStatistics] | None = None
) -> CheckpointStatistics:
    """One checkpoint as in `history`; in `GET …/details/:checkpointid` it has its tasks."""
    completed, failed = stats.status == "completed", stats.status == "failed"
    return CheckpointStatistics(
        className=stats.status,
        id=stats.id,
        status=_status(stats),
        is_savepoint=stats.kind == "savepoint",
        savepointFormat=stats.savepoint_format.upper() if stats.savepoint_format is not None else None,
        trigger_timestamp=_ms(stats.trigger_time),
        latest_ack_timestamp=-1 if stats.latest_ack_time is None else _ms(stats.latest_ack_time),
        checkpointed_size=stats.checkpointed_bytes,
        state_size=stats.full_bytes,
        end_to_end_duration=round(stats.end_to_end_ms),
        num_subtasks=stats.expected,
        num_acknowledged_subtasks=stats.acknowledged,
        checkpoint_type="SAVEPOINT" if stats.kind == "savepoint" else "CHECKPOINT",
        tasks=tasks or {},
        external_path=stats.path,
        discarded=stats.discarded if completed else None,
        failure_timestamp=_ms(stats.end_time) if failed else None,
        failure_message=(stats.failure or "")[:20_000] if failed else None,
    )


def checkpoint_details(facts: JobFacts, stats: CheckpointStats) -> CheckpointStatistics:
    """`GET /jobs/:jobid/checkpoints/details/:checkpointid`."""
    operators = sorted({one.operator for one in stats.subtasks})
    ids = {vertex.name: vertex.id for vertex in facts.steps}
    tasks = {
        ids.get(operator, vertex_id("step", operator)): _task(stats, _of(stats, operator), max(1, len(operators)))
        for operator in operators
    }
    return checkpoint_statistics(stats, tasks)


def subtask_details(
    facts: JobFacts, stats: CheckpointStats, vertex: str
) -> TaskCheckpointStatisticsWithSubtasks | None:
    """`GET …/details/:checkpointid/subtasks/:vertexid`; None if the job has no such step."""
    step = next((one for one in facts.steps if one.id == vertex), None)
    if step is None:
        return None
    known = _of(stats, step.name)
    task = _task(stats, known, max(1, len(facts.steps)))
    acknowledged = {one.subtask for one in known}
    # A history keeps the subtasks of the newest checkpoints only. Without any, nobody knows which are pending.
    missing = [index for index in range(task.num_subtasks) if index not in acknowledged] if known else []
    subtasks = [_subtask(one) for one in known]
    subtasks += [SubtaskCheckpointStatistics("pending_or_failed", index, "pending_or_failed") for index in missing]
    return TaskCheckpointStatisticsWithSubtasks(
        **{name: getattr(task, name) for name in TaskCheckpointStatistics.__struct_fields__},
        summary=_subtasks_summary(known),
        subtasks=sorted(subtasks, key=lambda one: one.index),
    )


def _task(stats: CheckpointStats, subtasks: Sequence[SubtaskStats], operators: int) -> TaskCheckpointStatistics:
    return TaskCheckpointStatistics(
        id=stats.id,
        status=_status(stats),
        latest_ack_timestamp=max((_ms(one.ack_time) for one in subtasks), default=-1),
        checkpointed_size=sum(one.checkpointed_bytes for one in subtasks),
        state_size=sum(one.full_bytes for one in subtasks),
        end_to_end_duration=round(max((one.end_to_end_ms for one in subtasks), default=-1)),
        num_subtasks=max(len(subtasks), stats.expected // operators),
        num_acknowledged_subtasks=len(subtasks),
    )


def _subtask(one: SubtaskStats) -> SubtaskCheckpointStatistics:
    return SubtaskCheckpointStatistics(
        className="completed",
        index=one.subtask,
        status="completed",
        ack_timestamp=_ms(one.ack_time),
        end_to_end_duration=round(one.end_to_end_ms),
        checkpointed_size=one.checkpointed_bytes,
        state_size=one.full_bytes,
        checkpoint=CheckpointDuration(round(one.sync_ms), round(one.async_ms)),
        alignment=CheckpointAlignment(round(one.alignment_ms)),
        start_delay=round(one.start_delay_ms),
        unaligned_checkpoint=False,
        aborted=False,
    )


def _subtasks_summary(subtasks: Sequence[SubtaskStats]) -> SubtasksSummary:
    return SubtasksSummary(
        checkpointed_size=spread(one.checkpointed_bytes for one in subtasks),
        state_size=spread(one.full_bytes for one in subtasks),
        end_to_end_duration=spread(one.end_to_end_ms for one in subtasks),
        checkpoint_duration=DurationSummary(
            spread(one.sync_ms for one in subtasks), spread(one.async_ms for one in subtasks)
        ),
        alignment=AlignmentSummary(spread(one.alignment_ms for one in subtasks)),
        start_delay=spread(one.start_delay_ms for one in subtasks),
    )


def _latest(stats: CheckpointStats | None) -> CheckpointStatistics | None:
    return None if stats is None else checkpoint_statistics(stats)


def _restored(facts: JobFacts) -> RestoredCheckpointStatistics | None:
    restored = facts.checkpoints.restored
    if restored is None:
        return None
    return RestoredCheckpointStatistics(
        restored.id, _ms(restored.restore_time), restored.kind == "savepoint", restored.path
    )


def _of(stats: CheckpointStats, operator: str) -> list[SubtaskStats]:
    return [one for one in stats.subtasks if one.operator == operator]


_STATUSES: dict[str, Status] = {"in_progress": "IN_PROGRESS", "completed": "COMPLETED", "failed": "FAILED"}


def _status(stats: CheckpointStats) -> Status:
    return _STATUSES[stats.status]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
