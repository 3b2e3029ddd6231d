"""The figures of each checkpoint, kept in a bounded history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from strandline.checkpoint.metadata import Kind
from strandline.checkpoint.pending import PendingCheckpoint, SavepointFormat

Status = Literal["in_progress", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class SubtaskStats:
    """The figures of one subtask in one checkpoint. Durations are milliseconds, times seconds since the epoch."""

    operator: str
    subtask: int
    ack_time: float
    end_to_end_ms: float
    """From the time the checkpoint was due to the subtask's acknowledgement."""
    start_delay_ms: float
    """`end_to_end_ms` minus the synchronous and the asynchronous part."""
    sync_ms: float
    async_ms: float
    alignment_ms: float
    """How long after the first subtask this one reached the barrier."""
    checkpointed_bytes: int
    full_bytes: int
    files: int
    alignment_bytes: int = 0
    """Always 0. A barrier lies between two commits, so no subtask holds rows back while it waits for another one."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """The figures of one checkpoint. Durations are milliseconds, times seconds since the epoch."""

    id: int
    status: Status
    kind: Kind
    batch_id: int
    trigger_time: float
    """When the checkpoint was due."""
    end_to_end_ms: float
    """From `trigger_time` to completion, or to the latest acknowledgement while the checkpoint is in progress."""
    sync_ms: float
    """The longest synchronous part of any subtask."""
    async_ms: float
    """The longest asynchronous part of any subtask."""
    start_delay_ms: float
    """From `trigger_time` to the barrier."""
    alignment_ms: float
    """The time between the first and the last subtask that reached the barrier."""
    barrier_to_completed_ms: float
    checkpointed_bytes: int
    """The bytes that were uploaded for this checkpoint."""
    full_bytes: int
    """The size of the whole state."""
    path: str | None = None
    subtasks: tuple[SubtaskStats, ...] = ()
    failure: str | None = None
    acknowledged: int = 0
    expected: int = 0
    alignment_bytes: int = 0
    """Always 0. A barrier lies between two commits, so no subtask holds rows back while it waits for another one."""
    completed_time: float | None = None
    """When its entry in the job's log was won, and of a savepoint, when its metadata was written. From then on it can
    be restored. None unless it is completed."""
    publish_ms: float = 0.0
    """How long it took, after that, until the rows that it covers were visible."""
    savepoint_format: SavepointFormat | None = None
    """The format of a savepoint; None for a checkpoint."""
    discarded: bool = False
    """Whether the job has dropped it since: `num_retained` newer ones were completed."""
    latest_ack_time: float | None = None
    """When the latest subtask acknowledged it; None if none has. It stays when the figures of the subtasks do not."""

    @property
    def end_time(self) -> float:
        """When it was completed, or failed; the latest acknowledgement while it is in progress."""
        return self.trigger_time + self.end_to_end_ms / 1000 if self.completed_time is None else self.completed_time

    def __repr__(self) -> str:
        if self.status == "in_progress":
            how = f"in progress, {self.acknowledged} of {self.expected} subtasks"
        elif self.status == "failed":
            how = f"failed: {next(iter((self.failure or '').splitlines()), '')[:200]}"
        else:
            how = f"completed in {self.end_to_end_ms:,.0f} ms"
        sizes = f"{self.checkpointed_bytes:,} of {self.full_bytes:,} bytes uploaded"
        return f"<CheckpointStats {self.kind} {self.id} at batch {self.batch_id}: {sizes}, {how}>"


def checkpoint_stats(
    pending: PendingCheckpoint,
    status: Status,
    end_time: float | None = None,
    path: str | None = None,
    failure: str | None = None,
    entry_time: float | None = None,
) -> CheckpointStats:
    """The figures of `pending`: as it ended at `end_time`, or as it stands now without `end_time`.

    `entry_time` is when its entry in the job's log was won. Rows were published from then on until `end_time`.
    """
    won = (end_time if entry_time is None else entry_time) if status == "completed" else None
    acks = pending.acks
    trigger, barrier = pending.trigger_time + pending.epoch, pending.barrier_time + pending.epoch
    barriers = [ack.barrier_time for ack in acks.values()]
    first = min(barriers, default=barrier)
    if end_time is None:
        end = max((ack.ack_time for ack in acks.values()), default=barrier)
    else:
        end = end_time + pending.epoch
    subtasks = []
    for (operator, subtask), ack in sorted(acks.items()):
        end_to_end = _ms(ack.ack_time - trigger)
        subtasks.append(
            SubtaskStats(
                operator=operator,
                subtask=subtask,
                ack_time=ack.ack_time,
                end_to_end_ms=end_to_end,
                start_delay_ms=max(0.0, end_to_end - ack.sync_ms - ack.async_ms),
                sync_ms=ack.sync_ms,
                async_ms=ack.async_ms,
                alignment_ms=_ms(ack.barrier_time - first),
                checkpointed_bytes=ack.checkpointed_bytes,
                full_bytes=ack.full_bytes,
                files=len(ack.state.files),
            )
        )
    return CheckpointStats(
        id=pending.id,
        status=status,
        kind=pending.kind,
        batch_id=pending.batch,
        trigger_time=trigger,
        end_to_end_ms=_ms(end - trigger),
        sync_ms=max((ack.sync_ms for ack in acks.values()), default=0.0),
        async_ms=max((ack.async_ms for ack in acks.values()), default=0.0),
        start_delay_ms=_ms(barrier - trigger),
        alignment_ms=_ms(max(barriers, default=first) - first),
        barrier_to_completed_ms=_ms(end - barrier),
        checkpointed_bytes=sum(ack.checkpointed_bytes for ack in acks.values()),
        full_bytes=sum(ack.full_bytes for ack in acks.values()),
        path=path,
        subtasks=tuple(subtasks),
        failure=failure,
        acknowledged=len(acks),
        expected=len(pending.subtasks),
        completed_time=None if won is None else won + pending.epoch,
        publish_ms=0.0 if won is None or end_time is None else _ms(end_time - won),
        savepoint_format=pending.savepoint_format,
        latest_ack_time=max((ack.ack_time for ack in acks.values()), default=None),
    )


def _ms(seconds: float) -> float:
    return max(0.0, seconds * 1000.0)


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint that a run started from."""

    id: int
    path: str
    kind: Kind
    restore_time: float


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """The number of checkpoints since the run began, including those that left the history."""

    total: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0


class CheckpointHistory:
    """The newest `limit` checkpoints, and counts of all of them.

    At most `subtask_limit` figures of subtasks are kept, and the oldest checkpoints lose theirs first. So a job with
    ten thousand subtasks does not keep ten million figures.
    """

    def __init__(
        self,
        limit: int = 1000,
        subtask_limit: int = 100_000,
        on_end: Callable[[CheckpointStats], None] = lambda _stats: None,
    ) -> None:
        """`on_end` is called with every checkpoint that was completed or has failed. It must not wait."""
        self._limit = max(1, limit)
        self._subtask_limit = max(0, subtask_limit)
        self._entries: OrderedDict[int, CheckpointStats] = OrderedDict()
        self._detailed: OrderedDict[int, int] = OrderedDict()
        self._subtasks = 0
        self._on_end = on_end
        self._counts = CheckpointCounts()
        self.restored: RestoredCheckpoint | None = None
        """The checkpoint that the run last started from."""
        self.last_completed: CheckpointStats | None = None
        self.last_failed: CheckpointStats | None = None
        self.last_savepoint: CheckpointStats | None = None

    @property
    def counts(self) -> CheckpointCounts:
        """Totals since the run began."""
        return self._counts

    def record(self, stats: CheckpointStats) -> None:
        """Record the figures of a checkpoint. They replace earlier figures of the same id."""
        before = self._entries.get(stats.id)
        self._count(before, stats)
        self._entries[stats.id] = stats
        self._subtasks += len(stats.subtasks) - self._detailed.pop(stats.id, 0)
        self._detailed[stats.id] = len(stats.subtasks)
        if stats.status == "failed":
            self.last_failed = stats
        elif stats.status == "completed" and stats.kind == "savepoint":
            self.last_savepoint = stats
        elif stats.status == "completed":
            self.last_completed = stats
        self._shrink(stats.id)
        if stats.status != "in_progress":
            self._on_end(stats)

    def record_discarded(self, checkpoint_ids: Iterable[int]) -> None:
        """Record that the job has dropped checkpoints. Nobody is told: they had ended before."""
        for checkpoint_id in checkpoint_ids:
            known = self._entries.get(checkpoint_id)
            if known is not None:
                self._entries[checkpoint_id] = replace(known, discarded=True)

    def record_restored(self, restored: RestoredCheckpoint) -> None:
        """Record that the run started, or restarted, from a checkpoint."""
        self.restored = restored
        self._counts = replace(self._counts, restored=self._counts.restored + 1)

    def get(self, checkpoint_id: int) -> CheckpointStats | None:
        """The figures of one checkpoint, or None if the history does not contain it."""
        return self._entries.get(checkpoint_id)

    def checkpoints(self) -> list[CheckpointStats]:
        """The checkpoints in the history, oldest first."""
        return list(self._entries.values())

    def _count(self, before: CheckpointStats | None, now: CheckpointStats) -> None:
        changes = {name: getattr(self._counts, name) for name in ("total", "in_progress", "completed", "failed")}
        if before is None or (now.status == "in_progress" and before.status != "in_progress"):
            # After a restart, the id of a checkpoint that never completed may be used again.
            changes["total"] += 1
        else:
            changes[before.status] -= 1
        changes[now.status] += 1
        self._counts = replace(self._counts, **changes)

    def _shrink(self, newest: int) -> None:
        while len(self._entries) > self._limit:
            # A checkpoint in progress stays. Otherwise its end would be counted as a second checkpoint.
            victim = next((id for id, entry in self._entries.items() if entry.status != "in_progress"), None)
            if victim is None:
                break
            del self._entries[victim]
            self._subtasks -= self._detailed.pop(victim, 0)
        while self._subtasks > self._subtask_limit:
            oldest, count = self._detailed.popitem(last=False)
            if oldest == newest:
                self._detailed[oldest] = count
                break
            self._subtasks -= count
            self._entries[oldest] = replace(self._entries[oldest], subtasks=())
