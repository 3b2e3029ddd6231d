"""A generation in real time: what differs from one whose batches Spark cuts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from strandline.errors import NotFoundError, SlotLostError, SourceDataLostError, SourceError, StrandlineError
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.realtime.epochs import Epochs
from strandline.runtime.driver.realtime.offsets import EpochPosition, Offsets
from strandline.runtime.driver.realtime.topics import Topics

LOOK_EVERY = 0.02
"""Seconds between two looks at the position, while somebody waits for rows to be processed."""


class RealtimeGeneration(Generation):
    """Runs until it fails or is closed. Whatever is lost ends it."""

    def __init__(self, *, epochs: Epochs, position: EpochPosition, topics_of_kafka: Topics, **others: Any) -> None:
        """`others` are the arguments of `Generation`."""
        super().__init__(batches=epochs, **others)
        self._epochs = epochs
        self._position = position
        self._topics_of_kafka = topics_of_kafka

    def _failure(self) -> StrandlineError | None:
        failure = super()._failure()
        if isinstance(failure, SourceDataLostError) and self._topics_of_kafka.may_lose:
            what, _, _advice = str(failure).partition(" -- ")
            return SourceError(f"{what} -- the next generation begins with the first row that is there")
        if failure is None and self._epochs.query_ended:
            return SlotLostError(
                f"job {self._cluster.run.job}: Spark's query had to end so that a checkpoint could be completed"
            )
        return failure

    def process_all_available(self) -> None:
        self._wait(_AllRead(self._position, self._topics_of_kafka.ends()))
        if self._epochs.watermark_waits:
            self._run_epoch()
        while self._clock.watermark_moved() or self._clock.event_timer_due():
            self._run_epoch()
        self.checkpoints.cover()

    def _run_epoch(self) -> None:
        self._wait(self._epochs.request_epoch())

    def _wait(self, reached: Callable[[], bool]) -> None:
        while not reached():
            failure = self._failure()
            if failure is not None:
                raise failure
            if self._closed.is_set():
                raise StrandlineError(f"generation {self.number} ended while its rows were processed")
            time.sleep(LOOK_EVERY)

    def _replace_lost_slots(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        if not self._cluster.suspects() or asked_to_end():
            return None
        lost = self._cluster.lost()
        if not lost:
            return None
        why = "; ".join(f"slot {index}: {reason}" for index, reason in sorted(lost.items()))
        return SlotLostError(f"job {self._cluster.run.job}: {why}")

    def heal(self) -> None:
        self._end_query()
        super().heal()

    def drain(self, check: Callable[[], None]) -> None:
        self._end_query()
        with self.batches.between_batches(check):
            self._epochs.recover()
            with self.checkpoints.commit_lock:
                self._epochs.settle()
        super().drain(check)

    def _end_query(self) -> None:
        """End the query, whose tasks hold the cores that others need. The generation cannot go on afterwards."""
        if not self._epochs.query_ended:
            self._stop_query()
            self._epochs.query_ended = True

    def _would_print(self) -> bool:
        return False


class _AllRead:
    """Whether all rows have been read that were in the sources when this was made.

    A partition may end with what is no row, such as the marks of transactions, and then its position never gets there.
    So a partition also counts as read if a whole batch of Spark's that began later found nothing in it.
    """

    def __init__(self, position: EpochPosition, ends: Sequence[Offsets]) -> None:
        self._position = position
        self._ends = ends
        self._first = position.running() + 1
        """The first batch of Spark's that begins from now on."""
        self._before: tuple[int, set[tuple[int, str, str, int]]] = (-1, set())
        """The last batch that the position was seen to follow, and what it was short of then."""

    def __call__(self) -> bool:
        followed = self._position.followed
        try:
            short = self._position.short_of(self._ends)
        except NotFoundError:
            return False
        before, short_before = self._before
        if followed != before:
            self._before = (followed, short)
        return not short or (followed == before + 1 and followed >= self._first and short <= short_before)
