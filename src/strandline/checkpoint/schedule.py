"""When the next checkpoint is due."""

from __future__ import annotations

import math


class TriggerSchedule:
    """Knows the interval, the pause, the places for concurrent checkpoints, and the work no checkpoint covers yet."""

    def __init__(
        self, interval: float, min_pause: float, max_concurrent: int, start_time: float, covered_batch: int | None
    ) -> None:
        self._interval = interval
        self._min_pause = min_pause
        self._max_concurrent = max(1, max_concurrent)
        self._base = start_time
        self._last_end = -math.inf
        self._freed_at = -math.inf
        self._running: dict[int, int | None] = {}
        self._covered = -1 if covered_batch is None else covered_batch
        self._committed = -1
        self._work_since = math.inf

    def committed(self, batch: int, now: float) -> None:
        """Note that `batch` is committed."""
        if batch > self._committed:
            self._committed = batch
            self._update_work(now)

    def due_at(self) -> float:
        """When the next checkpoint is due, or was; infinity if it takes another fact to make it due.

        That is one interval after the last one was, not before `min_pause` since the last one ended, not before there
        is a place for it, and not before a batch was committed that no checkpoint covers.
        """
        if self._full():
            return math.inf
        return max(self._base + self._interval, self._last_end + self._min_pause, self._freed_at, self._work_since)

    def has_place(self) -> bool:
        """Whether one more checkpoint may be in progress."""
        return len(self._running) < self._max_concurrent

    def begin(self, checkpoint_id: int, barrier: int | None, due_time: float, now: float) -> None:
        """Note that a checkpoint was triggered; `barrier` is the batch it covers, None for a savepoint."""
        self._running[checkpoint_id] = barrier
        if barrier is not None:
            # Counted from when it was due, so that waiting for the end of a batch does not stretch the interval; but a
            # schedule that fell behind by a whole interval begins anew instead of catching up.
            self._base = due_time if now - due_time < self._interval else now
            self._update_work(now)

    def end(self, checkpoint_id: int, now: float, completed: bool) -> None:
        """Note that a checkpoint is completed, or given up."""
        if self._full():
            self._freed_at = now
        barrier = self._running.pop(checkpoint_id)
        self._last_end = max(self._last_end, now)
        if completed and barrier is not None:
            self._covered = max(self._covered, barrier)
        self._update_work(now)

    def _full(self) -> bool:
        # A pause counts from the end of the last checkpoint, so with one there can be only one at a time.
        return len(self._running) >= (1 if self._min_pause > 0 else self._max_concurrent)

    def _update_work(self, now: float) -> None:
        covered = max(self._covered, *(barrier for barrier in self._running.values() if barrier is not None), -1)
        self._work_since = min(self._work_since, now) if self._committed > covered else math.inf
