"""The time of every batch, and the batches without rows that fire timers.

The processing time of a batch is the one in Spark's offset log, but it never goes back. The watermarks of a batch
follow from the batches before it; see `watermarks`. So every subtask and every retry of a batch sees the same time. The
checkpoint of a batch holds what the time of the next one follows from, and a restore brings it back.

If a step has timers, the query also reads the tick source, which never has rows. Spark runs a batch whenever the number
in the tick source's file changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from strandline.checkpoint.metadata import Times
from strandline.errors import StorageError
from strandline.operators.base import TimeMode
from strandline.runtime.driver.spark_times import batch_timestamp
from strandline.runtime.driver.watermarks import Seen, WatermarkPlan, advanced
from strandline.runtime.protocol.messages import BatchTime, StepWatermarks
from strandline.runtime.protocol.slot_calls import NextTimers

log = logging.getLogger(__name__)

END_OF_TIME_MS = 253_402_300_799_999
"""The watermark of a step that is drained: the last millisecond of the year 9999."""
CLOCK_BEHIND_MS = 1000
"""A clock that is set back by less is not worth a warning."""


class Clock:
    """Knows the time of every batch of one generation, and requests a batch when a timer is due."""

    def __init__(
        self,
        scratch: Path,
        plan: WatermarkPlan,
        modes: Mapping[str, TimeMode],
        restored: Times | None = None,
        *,
        asks_spark: bool = True,
    ) -> None:
        """`scratch` is Spark's checkpoint folder; `modes` are the clocks of the job's steps, by uid.

        `restored` are the times of the checkpoint from which the generation starts. `asks_spark` says whether Spark
        runs the batches without rows. In real time it does not: whoever cuts epochs asks `due`.
        """
        self._scratch = scratch
        self._plan = plan
        self._modes = {uid: mode for uid, mode in modes.items() if mode != "none"}
        self._asks_spark = asks_spark
        self._times = plan.restored(restored)
        self._brought: dict[int, int] = {}
        """For every source: the processing time of the last batch with rows of it, or of the first batch."""
        self._timers: NextTimers = {}
        self._unknown = restored is not None
        """Whether some slot's timers are not known. After a restore they are known once a batch has run."""
        self._tick_requested = False
        self._ticking = threading.Lock()
        """Held while the tick source's file is replaced: the supervisor and callers of the run both do it."""
        self._warned = False

    @property
    def ticks(self) -> Path | None:
        """The file of the tick source; None if no step has timers, or Spark is not asked for batches."""
        return self._scratch / "tick" if self._modes and self._asks_spark else None

    @property
    def times(self) -> Times:
        """The times after the last committed batch, for its checkpoint."""
        return self._times

    def of(self, spark_batch: int) -> BatchTime:
        """The time of the batch after the last committed one, which is Spark's batch `spark_batch`."""
        return self._next(self._monotone(batch_timestamp(self._scratch, spark_batch)))

    def of_epoch(self) -> BatchTime:
        """The time of an epoch that begins now."""
        return self._next(self.now())

    def _next(self, processing_ms: int) -> BatchTime:
        before = self._times.steps
        watermarks = self._upcoming()
        return BatchTime(
            processing_ms, {uid: StepWatermarks(watermark, before.get(uid)) for uid, watermark in watermarks.items()}
        )

    def of_drain(self, ended: Collection[str] = ()) -> BatchTime:
        """The time of a batch of a drain. For the steps in `ended`, event time is at its end.

        For other steps it goes no further than in the next batch of Spark's. Processing time stands still.
        """
        before, upcoming = self._times.steps, self._upcoming()
        watermarks = {**upcoming, **dict.fromkeys(ended, END_OF_TIME_MS)}
        return BatchTime(
            self._times.processing_ms,
            {uid: StepWatermarks(watermark, before.get(uid)) for uid, watermark in watermarks.items()},
        )

    def waits_for_end(self, ended: Collection[str]) -> bool:
        """Whether some step in `ended` still waits for an event time."""
        return any(self._timers.get(uid, END_OF_TIME_MS + 1) <= END_OF_TIME_MS for uid in ended)

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
        if self.ticks is not None and not self._tick_requested and self.due():
            self.tick()

    def tick(self) -> None:
        """Have Spark run a batch, even if no source has new rows. Raises `StorageError` if the disk refuses."""
        assert self.ticks is not None
        temporary = self.ticks.with_suffix(".new")
        try:
            with self._ticking:
                temporary.write_text(str(time.time_ns()))
                temporary.replace(self.ticks)
        except OSError as error:
            raise StorageError(
                f"cannot write the file {self.ticks}, by which the driver asks Spark for a batch: "
                f"{error.strerror or error}; look at the disk of the option spark_checkpoint_dir"
            ) from error
        self._tick_requested = True

    def watermark_moved(self) -> bool:
        """Whether a step with timers in event time will have a later watermark in the next batch than in the last."""
        before, after = self._times.steps, self._upcoming()
        return any(mode == "event" and after.get(uid) != before.get(uid) for uid, mode in self._modes.items())

    def event_timer_due(self) -> bool:
        """Whether the watermarks of the next batch will fire an event-time timer."""
        return self._fires(self._upcoming())

    def due(self) -> bool:
        """Whether a step has something to do without rows."""
        if not self._modes:
            return False
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
