"""Runs epochs: has relays cut their rows, slots prepare them, and commits.

An epoch is a batch without an action of Spark's. It has one round: whatever is lost ends the generation, and the next
one goes on from the newest completed checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from strandline.checkpoint.batch import BatchProtocol, batch_id
from strandline.errors import ConfigError, NotFoundError, SlotLostError, StrandlineError
from strandline.runtime.driver.batches import LOOK_EVERY, Batches, Outlets
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.progress import RunProgress, StreamRead
from strandline.runtime.driver.realtime.cuts import Cuts
from strandline.runtime.driver.realtime.event_times import EventTimes
from strandline.runtime.driver.realtime.offsets import EpochPosition, Offsets
from strandline.runtime.driver.recoveries import first_line

log = logging.getLogger(__name__)

LOOK_AT_ENDS_EVERY = 1.0
"""Seconds that pass at least between two times that Kafka is asked where the topics end, unless somebody waits."""
END_PATIENCE = 10.0
"""Seconds that the epoch in progress gets to end with its generation."""


class Epochs(Batches):
    """Runs the epochs of one generation, one after the other, in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        generation: int,
        protocol: BatchProtocol[None],
        outlets: Outlets,
        checkpoints: Checkpoints,
        clock: Clock,
        progress: RunProgress,
        *,
        checkpoint_every_batch: bool,
        cuts: Cuts,
        position: EpochPosition,
        interval: float,
        event_times: EventTimes,
        ends: Callable[[], Sequence[Offsets]],
        cores: int,
    ) -> None:
        """Epochs begin at least `interval` seconds apart. `ends` asks Kafka where the streams end.

        `cores` is how many tasks Spark can run at the same time.
        """
        super().__init__(
            cluster,
            generation,
            protocol,
            outlets,
            checkpoints,
            clock,
            progress,
            checkpoint_every_batch=checkpoint_every_batch,
        )
        self.cuts = cuts
        self._position = position
        self._number = -1
        """The number of the last epoch. Every generation begins with 0: small numbers last longer."""
        self._interval = interval
        self._event_times = event_times
        self._ends = ends
        self._cores = cores
        self._partitions: int | None = None
        """How many partitions the topics have; None before Spark has begun to read."""
        self._looked: float | None = None
        """When Kafka was asked last where the topics end; None if it was not."""
        self._asked = 0
        """How many epochs were asked for, even if there are no rows."""
        self._served = 0
        """How many of those have been run, or need not be, because a later epoch has begun."""
        self.query_ended = False
        """Whether the query has ended, and this generation only has to complete a checkpoint."""
        self._thread = threading.Thread(target=self._loop, daemon=True, name="epochs")

    def begin(self) -> None:
        """Run epochs from now on."""
        self._thread.start()

    def _loop(self) -> None:
        try:
            while not self._ending.is_set() and self.failure is None:
                if self._partitions is None:
                    self._count_partitions()
                if self._gate.wait(LOOK_EVERY) and (self.cuts.wait_for_rows(LOOK_EVERY) or self._due()):
                    began = time.monotonic()
                    if self._looked is None:
                        self._look_at_ends()
                    self._enter_epoch()
                    self._ending.wait(max(0.0, began + self._interval - time.monotonic()))
        except StrandlineError as error:
            self.failure = error
        except BaseException as error:
            log.exception("job %s: an epoch failed", self._cluster.run.job)
            self.failure = StrandlineError(f"job {self._cluster.run.job}: {type(error).__name__}: {error}")

    def request_epoch(self) -> Callable[[], bool]:
        """Have an epoch run, even if there are no rows. Returns what tells whether it has been run."""
        self._asked += 1
        mine = self._asked
        return lambda: self._served >= mine

    def _look_at_ends(self) -> None:
        """Ask Kafka where the topics end, so that event time waits for the rows up to there."""
        if not self._event_times.wanted:
            self._looked = time.monotonic()
            return
        try:
            position = self._position.offsets()
        except NotFoundError:
            return  # no relay has a row yet
        self._looked = time.monotonic()
        try:
            self._event_times.look(self._ends(), position, self._position.followed)
        except Exception as error:  # noqa: BLE001 - Py4J raises many types
            log.warning(
                "job %s: Kafka did not say where its topics end, so partitions that are behind do not hold the "
                "watermark back: %s",
                self._cluster.run.job,
                first_line(str(error)),
            )

    def _count_partitions(self) -> None:
        """Raise `ConfigError` if Spark cannot read all partitions at once: nobody would read the others."""
        try:
            partitions = sum(len(numbers) for stream in self._position.offsets() for numbers in stream.values())
        except NotFoundError:
            return
        before, self._partitions = self._partitions, partitions
        if partitions <= self._cores or partitions == before:
            return
        text = (
            f"job {self._cluster.run.job}: the topics have {partitions} partitions and Spark has {self._cores} cores. "
            "With latency_mode='realtime' a core reads each partition for as long as the job runs"
        )
        if before is None:
            raise ConfigError(f"{text}; give Spark {partitions} cores, or use latency_mode='batch'")
        log.warning("%s: some partitions are not read until Spark has %d cores", text, partitions)

    def _due(self) -> bool:
        """Whether an epoch without rows has something to do."""
        asked = self._asked > self._served
        if self._event_times.may_go_on and not self._event_times.goes_on:
            rested = self._looked is None or time.monotonic() - self._looked > LOOK_AT_ENDS_EVERY
            if rested or asked:
                self._look_at_ends()
        return asked or self._clock.due() or self._event_times.goes_on or self._position.skips()

    @property
    def watermark_waits(self) -> bool:
        """Whether an epoch without rows may move a watermark."""
        return self._event_times.may_go_on

    def _enter_epoch(self) -> None:
        self._checkpoints.wait_for_sinks(lambda: not self._gate.is_set() or self._ending.is_set())
        with self.busy:
            if not self._gate.is_set() or self._ending.is_set():
                return
            try:
                self._run_epoch()
                if self._checkpoint_every_batch:
                    self._checkpoints.cover()
            except Exception:
                if self._ending.is_set():
                    return  # the query is being stopped, and does not care how the epoch ends
                raise

    def _run_epoch(self) -> None:
        began = time.monotonic()
        serves = self._asked
        ended = self._position.spark_end()
        number = self._number + 1
        batch = batch_id(self.generation, number)
        when = self._clock.of_epoch()
        round_ = self._protocol.begin(batch)
        try:
            cuts = self.cuts.cut(batch, self._check_not_ending)
            deliveries = [delivery for cut in cuts for delivery in cut.deliveries]
            statuses = self._unless_ending(lambda: self._cluster.prepare(batch, 0, when, deliveries))
        except StrandlineError as error:
            raise self._cause(error, round_) from error
        self._note_prepared(round_, statuses)
        self._protocol.action_finished()
        files = [file for _index, status in sorted(statuses.items()) for file in status.staged]
        read = [part for cut in cuts for part in cut.read]
        moved = self._position.advanced(read, ended)
        rows = Counter[int]()
        for part in read:
            rows[part.stream] += part.rows
        streams = {stream: StreamRead(rows[stream], end) for stream, end in enumerate(moved)}
        self._call_back(batch)
        with self._checkpoints.commit_lock:  # no barrier sees the commit without the position
            self._check_not_ending()
            seen = self._event_times.seen(read, moved, self._position.followed)
            self._commit(
                number,
                files,
                began,
                when,
                seen,
                {},
                reported=False,
                read=streams,
                moved=lambda: self._position.become(moved, ended),
            )
        self._number = number
        self._served = serves
        if ended is not None:  # new partitions are known once a batch of Spark's has ended
            self._count_partitions()

    def recover(self, asked_to_end: Callable[[], bool] = lambda: False) -> None:
        """Replace lost slots, once the query has ended; before, a loss ends the generation: raises `SlotLostError`.

        Spark's tasks hold the cores that a new task manager needs to start, and they know the old slots.
        """
        if not self.query_ended:
            lost = "; ".join(f"slot {index}: {why}" for index, why in sorted(self._cluster.lost().items()))
            raise SlotLostError(f"job {self._cluster.run.job}: {lost or 'a slot was lost'}")
        super().recover(asked_to_end)

    def end(
        self, stop_query: Callable[[], None], query_active: Callable[[], bool], patience: float | None = None
    ) -> None:
        began = time.monotonic()
        super().end(stop_query, query_active, patience)
        if self._thread.is_alive():
            self._thread.join(END_PATIENCE if patience is None else max(0.0, began + patience - time.monotonic()))

    def _check_not_ending(self) -> None:
        if self._ending.is_set():
            raise SlotLostError(f"job {self._cluster.run.job}: the run ends")
