"""The time of every batch, and the batches without rows that fire timers.

The processing time of a batch is the one in Spark's offset log, but it never goes back. The watermarks of a batch
follow from the batches before it; see `watermarks`. So every subtask and every retry of a batch sees the same time. The
checkpoint of a batch holds what the time of the next one follows from, and a restore brings it back.

If a step has timers, the query also reads the tick source, which never has rows. Spark runs a batch whenever the number
in the tick source's file changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from strandline.checkpoint.metadata import Times
from strandline.operators.base import TimeMode
from strandline.runtime.driver.spark_times import batch_timestamp
from strandline.runtime.driver.watermarks import Seen, WatermarkPlan, advanced
from strandline.runtime.protocol.messages import BatchTime, StepWatermarks
from strandline.runtime.protocol.slot_calls import NextTimers

log = logging.getLogger(__name__)

CLOCK_BEHIND_MS = 1000
"""A clock that is set back by less is not worth a warning."""


class Clock:
    """Knows the time of every batch of one generation, and requests a batch when a timer is due."""

    def __init__(
        self, scratch: Path, plan: WatermarkPlan, modes: Mapping[str, TimeMode], restored: Times | None = None
    ) -> None:
        """`scratch` is Spark's checkpoint folder; `modes` are the clocks of the job's steps, by uid.

        `restored` are the times of the checkpoint from which the generation starts.
        """
        self._scratch = scratch
        self._plan = plan
        self._modes = {uid: mode for uid, mode in modes.items() if mode != "none"}
        self._times = plan.restored(restored)
        self._brought: dict[int, int] = {}
        """For every source: the processing time of the last batch with rows of it, or of the first batch."""
        self._timers: NextTimers = {}
        self._unknown = restored is not None
        """Whether some slot's timers are not known. After a restore they are known once a batch has run."""
        self._tick_requested = False
        self._warned = False

    @property
    def ticks(self) -> Path | None:
        """The file of the tick source; None if no step has timers."""
        return self._scratch / "tick" if self._modes else None

    @property
    def times(self) -> Times:
        """The times after the last committed batch, for its checkpoint."""
        return self._times

    def of(self, spark_batch: int) -> BatchTime:
        """The time of the batch after the last committed one, which is Spark's batch `spark_batch`."""
        before = self._times.steps
        return BatchTime(
            self._monotone(batch_timestamp(self._scratch, spark_batch)),
            {uid: StepWatermarks(watermark, before.get(uid)) for uid, watermark in self._upcoming().items()},
        )

    def now(self) -> int:
        """The processing time, in milliseconds since the epoch. It does not go back if the computer's clock does."""
        return self._monotone(int(time.time() * 1000))

    def committed(self, when: BatchTime, seen: Mapping[int, Seen], timers: Iterable[NextTimers]) -> None:
        """A batch is committed: its time, what its rows have shown by source, and what each slot waits for next."""
        latest = list(self._times.latest)
        for source, one in seen.items():
            latest[source] = advanced(latest[source], one.latest_ms)
        for source in range(len(latest)):
            if source not in self._brought or (source in seen and seen[source].rows):
                self._brought[source] = when.processing_ms
        steps = {uid: one.watermark_ms for uid, one in when.steps.items() if one.watermark_ms is not None}
        steps = {**self._times.steps, **steps}
        self._times = Times(when.processing_ms, tuple(latest), steps, self._times.columns)
        self._timers = {}
        for slot in timers:
            for uid, due in slot.items():
                self._timers[uid] = min(due, self._timers.get(uid, due))
        self._unknown = self._tick_requested = False

    def forget_timers(self) -> None:
        """A slot was replaced, so its timers are not known before the next batch."""
        self._unknown = True

    def tick_if_due(self) -> None:
        """Request a batch if a timer is due and no batch was requested for it already."""
        if self._modes and not self._tick_requested and self._due():
            self.tick()

    def tick(self) -> None:
        """Have Spark run a batch, even if no source has new rows."""
        assert self.ticks is not None
        self._tick_requested = True
        temporary = self.ticks.with_suffix(".new")
        temporary.write_text(str(time.time_ns()))
        temporary.replace(self.ticks)

    def watermark_moved(self) -> bool:
        """Whether a step with timers in event time will have a later watermark in the next batch than in the last."""
        before, after = self._times.steps, self._upcoming()
        return any(mode == "event" and after.get(uid) != before.get(uid) for uid, mode in self._modes.items())

    def event_timer_due(self) -> bool:
        """Whether the watermarks of the next batch will fire an event-time timer."""
        return self._fires(self._upcoming())

    def _due(self) -> bool:
        if self._unknown:
            return True
        now = self.now()
        if any(mode == "processing" and self._timers.get(uid, now + 1) <= now for uid, mode in self._modes.items()):
            return True
        if self.event_timer_due():
            return True
        # A batch without rows says that a source is idle, and the next batch has the watermark that follows from it.
        idle = self._idle(now)
        return idle != self._idle(self._times.processing_ms) and self._fires(self._plan.watermarks(self._times, idle))

    def _fires(self, watermarks: Mapping[str, int]) -> bool:
        return any(
            mode == "event" and uid in watermarks and self._timers.get(uid, watermarks[uid] + 1) <= watermarks[uid]
            for uid, mode in self._modes.items()
        )

    def _upcoming(self) -> dict[str, int]:
        """The watermarks of the next batch."""
        return self._plan.watermarks(self._times, self._idle(self._times.processing_ms))

    def _idle(self, now: int) -> frozenset[int]:
        """The sources that have been without rows for their `idle_after` at the processing time `now`."""
        return frozenset(
            number
            for number, source in enumerate(self._plan.sources)
            if source.idle_after_ms is not None and now - self._brought.get(number, now) >= source.idle_after_ms
        )

    def _monotone(self, stamp: int) -> int:
        least = self._times.processing_ms
        if stamp < least - CLOCK_BEHIND_MS and not self._warned:
            self._warned = True
            log.warning(
                "the clock of this computer is %.1f s behind the processing time of the last batch; processing time "
                "stands still until the clock has caught up",
                (least - stamp) / 1000,
            )
        return max(stamp, least)
