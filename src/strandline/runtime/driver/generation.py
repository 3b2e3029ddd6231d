"""A generation: one Spark query with its slots and checkpoints, from a takeover in the job's log to its end."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from strandline.errors import StrandlineError
from strandline.runtime.driver.batches import LOOK_EVERY, Batches
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.draining import Drain
from strandline.runtime.driver.figures import RestoreFigures
from strandline.runtime.driver.first_offsets import FirstOffsets
from strandline.runtime.driver.progress import BEFORE_ALL, RunProgress, mark_of, reports_after
from strandline.runtime.driver.recoveries import Recovery, first_line
from strandline.runtime.driver.scratch_folder import ScratchFolder
from strandline.runtime.driver.source_failures import failure_in_planning
from strandline.runtime.driver.source_watch import Silence, SourceWatch
from strandline.runtime.driver.spark_failures import bad_value, error_in_task
from strandline.runtime.driver.spark_logs import interrupts_silenced
from strandline.runtime.liveness.threads import BackgroundThread
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.slot_calls import Query

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

FIGURES_EVERY = 1.0
"""Seconds between two times that figures are taken."""
REPORT_PATIENCE = 2.0
"""For how many seconds the end of a run waits for Spark's report on the last batch."""
QUIET_PATIENCE = 3.0
"""For how many seconds the end of a query waits for a moment in which Spark ends in silence."""
LEAST_PATIENCE = 0.2
"""Seconds that each part of a run gets at least to end."""


class Generation:
    """Runs until it fails or is closed, or, with `available_now`, until its sources are drained."""

    def __init__(
        self,
        *,
        number: int,
        parallelism: int,
        opened: Recovery,
        query: StreamingQuery,
        start_query: Callable[[], StreamingQuery],
        batches: Batches,
        checkpoints: Checkpoints,
        cluster: Cluster,
        scratch: ScratchFolder,
        clock: Clock,
        state_memory: int,
        progress: RunProgress,
        drain: Drain,
        topics: Sequence[str] = (),
        first_offsets: FirstOffsets | None = None,
    ) -> None:
        """`topics` are what Kafka sources read, for messages. `first_offsets` learns where they began."""
        self.number = number
        self.parallelism = parallelism
        self.opened = opened
        """What the slots read when they were started, and how long that took."""
        self.batches = batches
        self.checkpoints = checkpoints
        self._query = query
        self._start_query = start_query
        self._cluster = cluster
        self._scratch = scratch
        self._clock = clock
        self._state_memory = state_memory
        self._progress = progress
        self._drain = drain
        self._topics = topics
        self._first_offsets = first_offsets
        self._reported = BEFORE_ALL
        """The last of Spark's reports that was read."""
        self._looking = threading.Lock()
        """Held by whoever reads Spark's reports. It takes only the locks of the progress and of listeners."""
        self._closed = threading.Event()
        self._figures = BackgroundThread("figures", self._take_figures, self._figures_failed)
        self._dead_thread: StrandlineError | None = None
        self._source_watch = SourceWatch(
            cluster.run.job, lambda: str(self._query.status["message"]), time.monotonic, self._tell_silence
        )

    def _tell_silence(self, silence: Silence | None) -> None:
        self._progress.silence = silence

    def start_figures(self) -> None:
        """Take figures once a second from now on."""
        self._figures.start()

    @property
    def restore(self) -> RestoreFigures:
        """What it took to bring the state back."""
        return RestoreFigures(self.opened.duration_ms, self.opened.local_bytes, self.opened.durable_bytes)

    # --- watching --------------------------------------------------------------------------------

    def watch(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Wait for the end. Returns the failure; None if the sources are drained or `asked_to_end` returns True."""
        try:
            return self._watch(asked_to_end)
        finally:
            self._source_watch.close()

    def _watch(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        while not asked_to_end():
            failure = self._failure()
            if failure is not None:
                return failure
            if not self._query.isActive:
                failure = self._failure()
                if failure is not None or self._clock.ticks is None or not self._clock.watermark_moved():
                    return failure
                self.read_reports()  # of the query that has ended
                self._clock.tick()  # the sources are drained, but their last rows moved the watermark
                self._query = self._start_query()
            failure = self._replace_lost_slots(asked_to_end)
            if failure is not None:
                return failure
            self._clock.tick_if_due()
            if self.batches.entered:
                self._source_watch.answered()
            else:
                self._source_watch.look()
            time.sleep(0.1)
        return None

    def _failure(self) -> StrandlineError | None:
        if self._dead_thread is not None:
            return self._dead_thread
        if self.checkpoints.failure is not None:
            return self.checkpoints.failure
        if self._cluster.failure is not None:
            return self._cluster.failure
        if self.batches.failure is not None:
            return self.batches.failure
        if not self._query.isActive:
            error = self._query.exception()
            if error is not None:
                text = str(error)
                where = f"job {self._cluster.run.job}"
                known = error_in_task(text) or bad_value(where, text)
                return known or failure_in_planning(where, text, self._topics)
        return None

    def _replace_lost_slots(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Replace lost slots between two batches, when no batch would notice the loss. Returns the failure."""
        if not self._cluster.suspects():
            return None
        if not self.batches.busy.acquire(blocking=False):
            self._give_up_silent()
            return None
        try:
            self.batches.recover(asked_to_end)
            return None
        except StrandlineError as error:
            return error
        finally:
            self.batches.busy.release()

    def _give_up_silent(self) -> None:
        """While a batch runs, it notices a lost slot by itself, but not a frozen one behind a frozen task manager."""
        if self._cluster.give_up_silent():
            self.batches.interrupt()

    def hold(self, check: Callable[[], None]) -> None:
        """Wait for the running batch to end, and let no other begin. If `check` raises an error, the wait is over."""

        def meanwhile() -> None:
            check()
            self._give_up_silent()

        self.batches.hold(meanwhile)

    def drain(self, check: Callable[[], None]) -> None:
        """After `hold`: move event time to its end, so that all windows close and all event-time timers fire.

        No checkpoint begins until that is done. So if the drain fails, nothing of it is durable or visible. If `check`
        raises an error, the drain ends. Raises `StrandlineError` if the drain fails.
        """
        last = self.checkpoints.last_spark_batch
        if last is None:
            return  # no step has any state
        ended: Future[None] = Future()

        def work() -> None:
            try:
                self._drain.run(last, check)
                ended.set_result(None)
            except StrandlineError as error:
                ended.set_exception(error)
            except Exception as error:  # noqa: BLE001 - Spark raises many types
                ended.set_exception(StrandlineError(f"the drain failed: {type(error).__name__}: {error}"))

        self.checkpoints.suspend()
        threading.Thread(target=work, daemon=True, name="drain").start()
        while not ended.done():
            check()
            self._give_up_silent()
            wait((ended,), LOOK_EVERY)
        ended.result()
        self.checkpoints.resume()

    def heal(self) -> None:
        """Wait for the running batch to end, and replace lost slots."""
        with self.batches.between_batches(self._give_up_silent):
            self.batches.recover()

    def has_failed(self, patience: float) -> bool:
        """Whether this generation fails or ends within `patience` seconds."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self._failure() is not None or not self._query.isActive:
                return True
            time.sleep(0.05)
        return False

    # --- what the run asks -----------------------------------------------------------------------

    def process_all_available(self) -> None:
        """Return once all rows that are there now are processed and covered by a completed checkpoint."""
        self._query.processAllAvailable()
        # Timers that these rows made due fire, too, and so do the timers that those timers set.
        while self._clock.watermark_moved() or self._clock.event_timer_due():
            if self._closed.is_set():  # a query that was stopped has processed all, as it says
                raise StrandlineError(f"generation {self.number} ended while its rows were processed")
            self._clock.tick()
            self._query.processAllAvailable()
        self.checkpoints.cover()

    def query(self, request: Query) -> Any:
        """What a step keeps for one key. All slots are asked; only the owner of the key's group may have something."""
        answers: list[tuple[bool, Any]] = [pickle.loads(answer) for answer in self._cluster.query(request)]
        return next((value for found, value in answers if found), answers[0][1])

    # --- figures -----------------------------------------------------------------------------------

    def read_reports(self) -> None:
        """Read what Spark has reported since the last time."""
        try:
            with self._looking:
                for report in reports_after(self._query, self._reported):
                    self._reported = mark_of(report)
                    self._progress.reported(self.number, report)
        except Exception as error:  # noqa: BLE001 - Py4J raises many types while the JVM ends; figures are only figures
            log.info("Spark's reports cannot be read: %s", first_line(str(error)))

    def refresh_figures(self) -> None:
        """Read Spark's reports, and ask every slot what its state takes up."""
        self.read_reports()
        changelogs = self._cluster.changelog_figures()
        total = None if changelogs is None else ChangelogFigures.total(list(changelogs.values()))
        samples = self._cluster.slot_samples(changelogs or {})
        self._progress.sampled(self.number, samples, self._state_memory, total)
        self._progress.sinks.staged(self.checkpoints.staged_bytes())

    def settle_figures(self, patience: float = REPORT_PATIENCE) -> None:
        """Take the last figures, after `hold`. Spark reports on the last batch as soon as the batch function ends."""
        deadline = time.monotonic() + patience
        self.refresh_figures()
        while self._progress.waits_for_report and time.monotonic() < deadline:
            time.sleep(0.01)
            self.read_reports()

    def _take_figures(self) -> None:
        while not self._closed.wait(FIGURES_EVERY):
            self.refresh_figures()

    def _figures_failed(self, error: StrandlineError) -> None:
        self._dead_thread = error

    def close(self, patience: float | None = None) -> None:
        """End the query and the checkpoints. The cluster ends the slots.

        With `patience`, they get about so many seconds. What takes longer ends in the background.
        """
        began = time.monotonic()
        self._closed.set()
        self.read_reports()
        self.batches.end(self._stop_query, lambda: self._query.isActive, patience)
        left = None if patience is None else max(LEAST_PATIENCE, began + patience - time.monotonic())
        self.checkpoints.close(left)
        try:
            if self._first_offsets is not None:
                self._first_offsets.remember(self._scratch.path)
        finally:
            self._scratch.remove()

    def _would_print(self) -> bool:
        """Whether Spark plans a batch or notes its end. Interrupted there, while it writes files, it prints traces."""
        return not self.batches.entered and bool(self._query.status["isTriggerActive"])

    def _stop_query(self) -> None:
        deadline = time.monotonic() + QUIET_PATIENCE
        try:
            while self._would_print() and time.monotonic() < deadline:
                time.sleep(0.01)
            with interrupts_silenced(self._cluster.spark_context):
                self._query.stop()
        except Exception as error:  # noqa: BLE001 - stopping a query that has failed may raise its failure again
            log.info("the query ended with: %s", str(error).splitlines()[0] if str(error) else error)
