"""When the next checkpoint is due."""

from __future__ import annotations

import math


class TriggerSchedule:
    """Computes the next due time from the interval, the pause, the limit of concurrent checkpoints and new commits."""

    def __init__(
        self, interval: float, min_pause: float, max_concurrent: int, start_time: float, covered_batch: int | None
    ) -> None:
        self._interval = interval
        self._min_pause = min_pause
        self._max_concurrent = max(1, max_concurrent)
        self._interval_start = start_time
        self._last_end = -math.inf
        self._freed_at = -math.inf
        self._running: dict[int, int] = {}
        """The checkpoints in progress, each with the batch it covers. Savepoints take no place among them."""
        self._covered = -1 if covered_batch is None else covered_batch
        self._committed = -1
        self._work_since = math.inf

    def committed(self, batch: int, now: float) -> None:
        """Record that `batch` is committed."""
        if batch > self._committed:
            self._committed = batch
            self._update_work(now)

    def due_at(self) -> float:
        """The time when the next checkpoint is due, past or future; infinity while something else must happen first.

        It is due when one interval has passed since the last one was due, `min_pause` has passed since the last one
        ended, fewer than `max_concurrent` are in progress, and a batch is committed that no checkpoint covers.
        """
        if self._full():
            return math.inf
        return max(
            self._interval_start + self._interval, self._last_end + self._min_pause, self._freed_at, self._work_since
        )

    def has_place(self) -> bool:
        """Whether fewer than `max_concurrent` checkpoints are in progress."""
        return len(self._running) < self._max_concurrent

    def begin(self, checkpoint_id: int, barrier: int, due_time: float, now: float) -> None:
        """Record that a checkpoint was triggered. `barrier` is the batch it covers."""
        self._running[checkpoint_id] = barrier
        # The interval counts from the due time, so that waiting for the end of a batch does not stretch it. A schedule
        # that is late by a whole interval restarts from now and does not catch up.
        self._interval_start = due_time if now - due_time < self._interval else now
        self._update_work(now)

    def end(self, checkpoint_id: int, now: float, completed: bool) -> None:
        """Record that a checkpoint completed or failed."""
        if self._full():
            self._freed_at = now
        barrier = self._running.pop(checkpoint_id)
        self._last_end = max(self._last_end, now)
        if completed:
            self._covered = max(self._covered, barrier)
        self._update_work(now)

    def _full(self) -> bool:
        # The pause counts from the end of the last checkpoint. So with a pause, only one can be in progress.
        return len(self._running) >= (1 if self._min_pause > 0 else self._max_concurrent)

    def _update_work(self, now: float) -> None:
        covered = max(self._covered, *self._running.values(), -1)
        self._work_since = min(self._work_since, now) if self._committed > covered else math.inf
