"""Runs epochs: has relays cut their rows, slots prepare them, and commits.

An epoch is a batch without an action of Spark's. It has one round: whatever is lost ends the generation, and the next
one goes on where the epoch log ends. So slots may be told that an epoch is decided with the rows of the next one, and
before it is durable. `settle` brings them, and their task managers, to the last decided epoch: a barrier needs that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from strandline.checkpoint.batch import BatchProtocol, batch_id
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import ConfigError, NotFoundError, SlotLostError, StrandlineError
from strandline.runtime.driver.batches import LOOK_EVERY, Batches, Outlets
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.progress import BatchWork, RunProgress, StreamRead
from strandline.runtime.driver.realtime.cuts import Cuts
from strandline.runtime.driver.realtime.durable_epochs import DecidedEpoch, DurableEpochs
from strandline.runtime.driver.realtime.event_times import EventTimes
from strandline.runtime.driver.realtime.offsets import EpochPosition, Offsets, SparkEnd
from strandline.runtime.driver.realtime.slots import EpochSlots
from strandline.runtime.driver.realtime.staged_rows import StagedRows
from strandline.runtime.driver.recoveries import first_line
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.protocol.cuts import ReadPart
from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.protocol.slot_calls import PreparedEpoch, PushedRows, RowCounts
from strandline.runtime.protocol.taskmanager_calls import DurableSegment

log = logging.getLogger(__name__)

LOOK_AT_ENDS_EVERY = 1.0
"""Seconds that pass at least between two times that Kafka is asked where the topics end, unless somebody waits."""
ASK_AGAIN = 1.0
"""Seconds after which the first checkpoint of a generation is asked for again if it failed."""
MOST_UNTOLD = 5_000
"""With more segments than that, task managers hear of them before a checkpoint: they merge them."""
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
        rows: StagedRows,
        epoch_log: EpochLog | None,
    ) -> None:
        """Epochs begin at least `interval` seconds apart. `ends` asks Kafka where the streams end.

        `cores` is how many tasks Spark can run at the same time. `rows` takes the output rows for sinks. Without an
        `epoch_log` epochs become durable with checkpoints.
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
        self._rows = rows
        self._durable = DurableEpochs(epoch_log, rows, self._fail)
        self._first_checkpoint: Future[CheckpointStats] | None = None
        """The checkpoint that the epoch log extends; None if it is not asked for yet, or not needed."""
        self._asked_at = 0.0
        """When it was asked for."""
        self._slots: EpochSlots | None = None
        self._newest = -1
        """The last epoch that is decided. The commit lock protects it, and the next two."""
        self._told = -1
        """The last epoch of which slots and task managers have heard that it is decided."""
        self._untold: int | None = None
        """The decided epoch of which the slots have not heard."""
        checkpoints.before_barrier = self.settle
        checkpoints.have_staged(rows.stage)
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
        self._slots = self._cluster.epoch_slots()
        self._durable.start()
        self._thread.start()

    def _fail(self, error: StrandlineError) -> None:
        self.failure = self.failure or error

    def _loop(self) -> None:
        try:
            while not self._ending.is_set() and self.failure is None:
                if self._partitions is None:
                    self._count_partitions()
                if not self._gate.wait(LOOK_EVERY):
                    continue
                if not self.cuts.wait_for_rows(LOOK_EVERY) and not self._due():
                    self._tell_slots()
                else:
                    began = time.monotonic()
                    if self._looked is None:
                        self._look_at_ends()
                    self._enter_epoch()
                    self._ending.wait(max(0.0, began + self._interval - time.monotonic()))
        except StrandlineError as error:
            self._fail(error)
        except BaseException as error:
            log.exception("job %s: an epoch failed", self._cluster.run.job)
            self._fail(StrandlineError(f"job {self._cluster.run.job}: {type(error).__name__}: {error}"))

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
        if self._durable.untold > MOST_UNTOLD:
            with self._checkpoints.commit_lock:
                self.settle()
        cuts = self.cuts.cut(batch, self._untold, self._check_not_ending)
        deliveries = [delivery for cut in cuts for delivery in cut.deliveries]
        read = [part for cut in cuts for part in cut.read]
        with self._checkpoints.commit_lock:  # no barrier comes between the commit of the last epoch and this one
            self._check_not_ending()
            when = self._clock.of_epoch()
            prepared = self._prepare(batch, when, deliveries)
            moved = self._position.advanced(read, ended)
            epoch = self._decide_epoch(number, began, when, prepared, read, moved, ended)
        self._durable.add(epoch, self._check_not_ending)
        self._number = number
        self._served = serves
        if ended is not None:  # new partitions are known once a batch of Spark's has ended
            self._count_partitions()

    def _prepare(self, batch: int, when: BatchTime, deliveries: Sequence[Delivery]) -> dict[int, PreparedEpoch]:
        """Have every slot commit the epoch before, if it has not heard of that, and prepare this one."""
        assert self._slots is not None
        if self._untold is not None:  # if the call fails, the generation ends: so they count as told before it
            self._note_applied(self._untold)
        round_ = self._protocol.begin(batch)
        prepared = self._slots.prepare(batch, when, deliveries, self._untold, self._check_not_ending)
        self._untold = None
        for index, slot in prepared.items():
            for operator in slot.counts:
                self._protocol.prepared(operator, index, slot.incarnation, round_, None)
        self._protocol.action_finished()
        return prepared

    def _ask_for_first_checkpoint(self) -> None:
        """The epoch log extends a checkpoint of its generation. If it fails, it is asked for again after a while."""
        first = self._first_checkpoint
        failed = first is not None and first.done() and first.exception() is not None
        if first is None or (failed and time.monotonic() - self._asked_at > ASK_AGAIN):
            self._asked_at = time.monotonic()
            self._first_checkpoint = self._checkpoints.take_soon()

    def _note_applied(self, batch: int) -> None:
        for index in {index for _uid, index in self._protocol.subtasks}:
            self._protocol.applied(index, self._cluster.incarnation(index), batch)

    def _decide_epoch(
        self,
        number: int,
        began: float,
        when: BatchTime,
        prepared: Mapping[int, PreparedEpoch],
        read: Sequence[ReadPart],
        moved: list[Offsets],
        ended: SparkEnd | None,
    ) -> DecidedEpoch:
        """Decide the epoch. It becomes durable beside the next one."""
        batch = self._protocol.commit()
        try:
            seen = self._event_times.seen(read, moved, self._position.followed)
            self._clock.committed(when, seen, [slot.timers for slot in prepared.values()])
            self._position.become(moved, ended)
            self._newest = self._untold = batch
            self._checkpoints.committed(batch, number, [], began)
            if self._durable.has_log:
                self._ask_for_first_checkpoint()
            rows = [
                (one.operator, one.output, index, batch, one.stream)
                for index, slot in sorted(prepared.items())
                for one in slot.rows
            ]
            self.committed += 1
            return DecidedEpoch(
                batch,
                self._position.captured(number, self._clock.times),
                [(index, one) for index, slot in sorted(prepared.items()) for one in slot.segments],
                rows,
                self._call_back_with(batch, {index: slot.pushed for index, slot in prepared.items()}),
                self._report(batch, began, when, prepared, read, moved),
            )
        except BaseException as error:
            # The position may be that of the epoch before: no checkpoint of both.
            told = error if isinstance(error, StrandlineError) else StrandlineError(f"epoch {batch}: {error!r}")
            self._checkpoints.give_up(told)
            raise

    def _call_back_with(self, batch: int, pushed: dict[int, list[PushedRows]]) -> Callable[[], None]:
        return lambda: self._call_back(batch, pushed)

    def _report(
        self,
        batch: int,
        began: float,
        when: BatchTime,
        prepared: Mapping[int, PreparedEpoch],
        read: Sequence[ReadPart],
        moved: Sequence[Offsets],
    ) -> Callable[[], None]:
        """What tells the progress of an epoch, once it is durable."""

        def report() -> None:
            steps: dict[str, RowCounts] = {}
            for slot in prepared.values():
                for operator, counts in slot.counts.items():
                    steps[operator] = steps.get(operator, RowCounts()).plus(counts)
            rows = Counter[int]()
            for part in read:
                rows[part.stream] += part.rows
            streams = {stream: StreamRead(rows[stream], end) for stream, end in enumerate(moved)}
            given = sum(one.rows for slot in prepared.values() for one in slot.rows)
            self._progress.committed(BatchWork(batch, None, when, began, time.monotonic(), steps, given, {}, streams))

        return report

    # --- slots that lag behind -----------------------------------------------------------------------

    def settle(self) -> None:
        """Bring all slots and task managers to the last decided epoch, and wait until that is durable.

        The caller holds the commit lock. Raises whatever prevents it: `SlotLostError` if a slot is lost.
        """
        batch = self._newest
        if self._told >= batch:
            return
        with self._durable_segments(batch) as segments:
            self._rows.barrier(batch)
            self._cluster.commit(batch, durable=segments)
        self._note_applied(batch)
        self._told, self._untold = batch, None

    @contextmanager
    def _durable_segments(self, batch: int) -> Iterator[list[DurableSegment]]:
        """The segments that task managers have not heard of, once `batch` is durable. An error means: they have not."""
        self._durable.wait(batch, self._check_not_ending)
        segments = self._durable.take_segments()
        try:
            yield segments
        except BaseException:
            self._durable.give_back(segments)
            raise

    def _tell_slots(self) -> None:
        """While there are no rows: have the slots commit the last epoch. Nobody would tell them before the next one."""
        with self._checkpoints.commit_lock:
            if self._untold is not None and self._gate.is_set() and not self._ending.is_set():
                assert self._slots is not None
                self._slots.commit(self._untold, self._check_not_ending)
                self._note_applied(self._untold)
                self._untold = None

    def recover(self, asked_to_end: Callable[[], bool] = lambda: False) -> None:
        """Replace lost slots, once the query has ended; before, a loss ends the generation: raises `SlotLostError`.

        Spark's tasks hold the cores that a new task manager needs to start, and they know the old slots.
        """
        if not self.query_ended:
            lost = "; ".join(f"slot {index}: {why}" for index, why in sorted(self._cluster.lost().items()))
            raise SlotLostError(f"job {self._cluster.run.job}: {lost or 'a slot was lost'}")
        with self._checkpoints.commit_lock, self._durable_segments(self._newest) as segments:
            self._cluster.note_decided(self._newest, segments)  # lost slots are rebuilt to there
            self._durable.give_back(segments)
        super().recover(asked_to_end)

    def end(
        self, stop_query: Callable[[], None], query_active: Callable[[], bool], patience: float | None = None
    ) -> None:
        began = time.monotonic()
        super().end(stop_query, query_active, patience)
        left = END_PATIENCE if patience is None else max(0.0, began + patience - time.monotonic())
        if self._slots is not None:
            self._slots.close()
        if self._thread.is_alive():
            self._thread.join(left)
        self._durable.close(left)

    def _check_not_ending(self) -> None:
        if self._ending.is_set():
            raise SlotLostError(f"job {self._cluster.run.job}: the run ends")
