"""A generation: one Spark query with its slots and checkpoints, from a takeover in the job's log to its end."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from strandline.errors import StrandlineError
from strandline.runtime.driver.batches import BatchFunction, error_in_task
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.figures import RestoreFigures, RunFigures, StateMemory
from strandline.runtime.driver.recoveries import Recovery
from strandline.runtime.driver.scratch_folder import ScratchFolder
from strandline.runtime.protocol.slot_calls import Query
from strandline.state.handles.query import answer_of_owner

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

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
        batch_function: BatchFunction,
        checkpoints: Checkpoints,
        cluster: Cluster,
        scratch: ScratchFolder,
        clock: Clock,
        state_memory: int,
    ) -> None:
        self.number = number
        self.parallelism = parallelism
        self.opened = opened
        """What the slots read when they were started, and how long that took."""
        self.batch_function = batch_function
        self.checkpoints = checkpoints
        self._query = query
        self._start_query = start_query
        self._cluster = cluster
        self._scratch = scratch
        self._clock = clock
        self._state_memory = state_memory

    # --- watching --------------------------------------------------------------------------------

    def watch(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Wait for the end. Returns the failure; None if the sources are drained or `asked_to_end` returns True."""
        while not asked_to_end():
            failure = self._failure()
            if failure is not None:
                return failure
            if not self._query.isActive:
                failure = self._failure()
                if failure is not None or not self._clock.watermark_moved():
                    return failure
                self._clock.tick()  # the sources are drained, but their last rows moved the watermark
                self._query = self._start_query()
            failure = self._replace_lost_slots(asked_to_end)
            if failure is not None:
                return failure
            self._clock.tick_if_due()
            time.sleep(0.1)
        return None

    def _failure(self) -> StrandlineError | None:
        if self.checkpoints.failure is not None:
            return self.checkpoints.failure
        if self._cluster.failure is not None:
            return self._cluster.failure
        if self.batch_function.failure is not None:
            return self.batch_function.failure
        if not self._query.isActive:
            error = self._query.exception()
            if error is not None:
                text = str(error)
                return error_in_task(text) or StrandlineError(f"the query failed: {text}")
        return None

    def _replace_lost_slots(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Replace lost slots between two batches, when no batch would notice the loss. Returns the failure."""
        if not self._cluster.suspects():
            return None
        if not self.batch_function.busy.acquire(blocking=False):
            self._give_up_silent()
            return None
        try:
            self.batch_function.recover(asked_to_end)
            return None
        except StrandlineError as error:
            return error
        finally:
            self.batch_function.busy.release()

    def _give_up_silent(self) -> None:
        """While a batch runs, it notices a lost slot by itself, but not a frozen one behind a frozen task manager."""
        if self._cluster.give_up_silent():
            self.batch_function.interrupt()

    def hold(self, check: Callable[[], None]) -> None:
        """Wait for the running batch to end, and let no other begin. If `check` raises an error, the wait is over."""

        def meanwhile() -> None:
            check()
            self._give_up_silent()

        self.batch_function.hold(meanwhile)

    def heal(self) -> None:
        """Wait for the running batch to end, and replace lost slots."""
        with self.batch_function.between_batches(self._give_up_silent):
            self.batch_function.recover()

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
            self._clock.tick()
            self._query.processAllAvailable()
        self.checkpoints.cover()

    def query(self, uid: str, state: str, key: tuple[Any, ...]) -> Any:
        """The value of a state for one key. All slots are asked; only the owner of the key's group has a value."""
        found = [pickle.loads(answer) for answer in self._cluster.query(Query(uid, state, pickle.dumps(key)))]
        return answer_of_owner(found)

    def figures(self, of_run: RunFigures) -> RunFigures:
        """`of_run` with the figures of this generation. Slots that do not answer are left out."""
        slots = self._cluster.slot_figures()
        operators = [figures for slot in slots for figures in slot.operators.values()]
        return msgspec.structs.replace(
            of_run,
            generation=self.number,
            parallelism=self.parallelism,
            batches=self.batch_function.batches,
            rows=sum(figures.rows for figures in operators),
            late_rows=sum(figures.late_rows for figures in operators),
            state_bytes=sum(figures.state_bytes for figures in operators),
            state_memory_bytes=sum(figures.memory_bytes for figures in operators),
            restore=RestoreFigures(self.opened.duration_ms, self.opened.local_bytes, self.opened.durable_bytes),
            state_memory=StateMemory(
                executor_budget_bytes=self._state_memory,
                slot_budget_bytes=min((slot.budget_bytes for slot in slots), default=0),
                used_bytes=sum(slot.used_bytes for slot in slots),
                most_used_bytes=max((slot.used_bytes for slot in slots), default=0),
            ),
            changelog=self._cluster.changelog_figures(),
        )

    def close(self, patience: float | None = None) -> None:
        """End the query and the checkpoints. The cluster ends the slots.

        With `patience`, they get about so many seconds. What takes longer ends in the background.
        """
        began = time.monotonic()
        self.batch_function.end(self._stop_query, lambda: self._query.isActive, patience)
        left = None if patience is None else max(LEAST_PATIENCE, began + patience - time.monotonic())
        self.checkpoints.close(left)
        self._scratch.remove()

    def _stop_query(self) -> None:
        try:
            self._query.stop()
        except Exception as error:  # noqa: BLE001 - stopping a query that has failed may raise its failure again
            log.info("the query ended with: %s", str(error).splitlines()[0] if str(error) else error)
