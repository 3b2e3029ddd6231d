"""The batches of a generation: every subtask prepares a batch, then it is committed.

A batch is prepared in rounds. If a slot or a Spark task is lost, or an action fails for another passing reason, all
slots discard what they prepared, and the action runs again in a new round. The query goes on, and the state of other
slots stays as it is. Once every subtask is prepared in one round, the batch is decided. A decision is final.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from strandline.checkpoint.batch import BatchProtocol, Round, batch_id
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import (
    SchemaError,
    SegmentsLostError,
    SinkError,
    SlotLostError,
    SourceDataLostError,
    StorageFullError,
    StorageRefusedError,
    StrandlineError,
    UserCodeError,
)
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import JOB_GROUP, Cluster
from strandline.runtime.driver.progress import BatchWork, RunProgress, StreamRead
from strandline.runtime.driver.recoveries import Began
from strandline.runtime.driver.sink_failures import function_failure, is_spark_failure
from strandline.runtime.driver.sink_functions import in_sink_function
from strandline.runtime.driver.spark_failures import failure_of_batch
from strandline.runtime.driver.watermarks import Seen
from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.protocol.slot_calls import NextTimers, PrepareEmpty, PushedRows, RowCounts, SlotStatus
from strandline.runtime.protocol.taskmanager_calls import Barrier, CommittedSlot
from strandline.runtime.task.batch_properties import ADDRESSES, BATCH, GENERATION, PROPERTIES, ROUND, STAGING, TIME

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

Made = TypeVar("Made")

MAX_ROUNDS = 8
LOOK_EVERY = 0.1
"""Seconds between two looks at the cluster, while somebody waits for a batch to end."""
FATAL = (UserCodeError, SchemaError, SourceDataLostError, StorageFullError, StorageRefusedError)
"""Errors that would occur again for the same batch: neither the batch nor the run is repeated."""


class _Decided(NamedTuple):
    """A batch that all slots have applied."""

    batch: int
    barrier: Barrier | None
    """The barrier that went with the commit."""
    told: Collection[CommittedSlot]
    """What the slots told; empty if the barrier was given up."""


@dataclass(frozen=True, slots=True)
class Outlets:
    """Which rows of the finished plan belong to which sink."""

    manifests: Callable[[DataFrame], DataFrame] | None
    """Selects the manifest rows, which name what was staged; None without an exactly-once sink, or if `direct`."""
    functions: tuple[tuple[Callable[[DataFrame], DataFrame], Callable[[DataFrame, int], None]], ...]
    """For every sink with a function, unless `direct`: a function that selects its rows, and the user's function."""
    direct: bool = False
    """Whether the rows of the plan are deliveries of rows to slots, and nothing else."""
    callbacks: Mapping[tuple[str, str | None], Sequence[Callable[[pa.Table, int], None]]] = field(default_factory=dict)
    """If `direct`: the user's functions that take the rows of an output, by step and name."""


class Batches:
    """Runs the batches of one generation, one after the other. What makes a batch begin is up to the subclass."""

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
    ) -> None:
        self.generation = generation
        self.failure: StrandlineError | None = None
        self.committed = 0
        """How many batches were committed."""
        self._progress = progress
        self._counts: dict[tuple[str, int], RowCounts] = {}
        """The rows of each subtask in the batch that it has prepared."""
        self._pushed: dict[int, list[PushedRows]] = {}
        """The rows for the callbacks that each slot has sent with the batch that it has prepared."""
        self.rounds_repeated = 0
        self.replaced_slots = 0
        self.busy = threading.Lock()
        """Held while a batch runs, or while slots are replaced between two batches. It is taken before the checkpoints'
        `commit_lock`, never while that is held. Whoever holds it may wait for slots and for checkpoints."""
        self._protocol = protocol
        self._cluster = cluster
        self._outlets = outlets
        self._checkpoints = checkpoints
        self._clock = clock
        self._checkpoint_every_batch = checkpoint_every_batch
        self._gate = threading.Event()
        """Batches begin only while it is set."""
        self._gate.set()
        self.entered = False
        """Whether Spark's thread is in the batch function, at the gate or in a batch."""
        self.running: tuple[int, Began] | None = None
        """The batch that is being worked on, and when that began; None if there is none, and for epochs.

        Nor does it name the batch with initial state, which is a part of the start.
        """
        self._ending = threading.Event()
        self._jobs: tuple[SparkContext, str] | None = None
        """Spark, and the group to which the Spark jobs of the running batch belong."""

    @property
    def decided(self) -> int:
        """The last batch that was committed."""
        return self._protocol.decided_batch

    # --- stopping --------------------------------------------------------------------------------

    def hold(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the running batch to end, and let no other batch begin. `meanwhile` is as in `between_batches`."""
        self._gate.clear()
        with self.between_batches(meanwhile):
            pass

    @contextmanager
    def between_batches(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Hold `busy`, once the running batch has ended.

        Until then `meanwhile` is called again and again: the batch may wait for somebody who is gone. Its error ends
        the wait.
        """
        while not self.busy.acquire(timeout=LOOK_EVERY):
            meanwhile()
        try:
            yield
        finally:
            self.busy.release()

    @contextmanager
    def _at_work(self, batch: int, began: Began) -> Iterator[None]:
        """Meanwhile `running` names the batch."""
        self.running = (batch, began)
        try:
            yield
        finally:
            self.running = None

    def go_on(self) -> None:
        """Let batches begin again after `hold`."""
        self._gate.set()

    def interrupt(self) -> None:
        """Cancel the Spark jobs of the running batch: they wait for slots that are gone. A new round begins."""
        jobs = self._jobs
        if jobs is not None:
            context, group = jobs
            context.cancelJobGroup(group)

    def end(
        self, stop_query: Callable[[], None], query_active: Callable[[], bool], patience: float | None = None
    ) -> None:
        """Stop the query. A batch that waits at the gate does not run; a batch whose action is interrupted is dropped.

        The gate opens only once the query is inactive. If it opened earlier, the waiting batch would return to an
        active query, and Spark would tell the sources that the batch is done. With `patience`, the query gets so many
        seconds, and then it ends in the background.
        """
        self._gate.clear()
        self._ending.set()

        def stop() -> None:
            stopper = threading.Thread(target=stop_query, daemon=True)
            stopper.start()
            while query_active():
                time.sleep(0.005)
            self._gate.set()
            stopper.join()

        stopping = threading.Thread(target=stop, daemon=True, name="stop-query")
        stopping.start()
        stopping.join(patience)
        if stopping.is_alive():
            log.warning("job %s: the query ends in the background", self._cluster.run.job)

    # --- batches without a call of Spark's -----------------------------------------------------------

    def initialize(self, frames: list[DataFrame]) -> None:
        """Send initial state to the slots of the steps that have some, as a batch of its own before Spark's first.

        No checkpoint covers this batch alone. If the run fails before its first checkpoint, the restart repeats it.
        Steps without initial state get the time 0 in this batch, so that none of their timers is due.
        """
        if not frames:
            return
        batch = batch_id(self.generation, -1)
        when = BatchTime(self._clock.now())
        context = frames[0].sparkSession.sparkContext

        def evaluate(round_: Round) -> None:
            context.setLocalProperty(STAGING, str(False))
            for frame in frames:
                frame.write.format("noop").mode("overwrite").save()
            self._ask_prepared(round_)
            self._prepare_missing(round_, BatchTime(0))

        with self.busy:
            try:
                self._in_rounds(context, batch, when, evaluate)
            finally:
                for name in PROPERTIES:  # local properties belong to this thread, and this thread is the user's
                    context.setLocalProperty(name, None)  # type: ignore[arg-type]  # None removes it
            self._decide(lambda _timers: None, lambda _batch: None)

    def run_without_sources(self, rows: DataFrame, spark_batch: int, number: int, ended: Collection[str]) -> None:
        """Run a batch of a drain, in the caller's thread: the batch `number` after Spark's last one, `spark_batch`.

        No batch of Spark's may begin meanwhile or afterwards. `rows` are those of a plan without sources. For the steps
        in `ended`, event time is at its end. Their watermarks are not kept, so that a later run goes on with the true
        ones. Raises `StrandlineError` if the batch fails.
        """
        began = Began.now()
        batch = batch_id(self.generation, spark_batch + number)
        when = self._clock.of_drain(ended)
        context = rows.sparkSession.sparkContext
        group = f"strandline-drain-{batch}"

        evaluate = partial(self._evaluate, rows, when)
        with self.busy, self._at_work(batch, began):
            context.setLocalProperty(JOB_GROUP, group)
            self._jobs = (context, group)
            try:
                files = self._in_rounds(context, batch, when, evaluate)
            finally:
                self._jobs = None
                for name in (JOB_GROUP, *PROPERTIES):  # the thread is the caller's
                    context.setLocalProperty(name, None)  # type: ignore[arg-type]  # None removes it
            self._call_back(batch, self._take_pushed())
            self._commit(spark_batch, files, began.steady, self._clock.of_drain(), {}, {}, reported=False)

    def _in_rounds(self, context: SparkContext, batch: int, when: BatchTime, evaluate: Callable[[Round], Made]) -> Made:
        """Run `evaluate` until every subtask is prepared in one round. Passing failures lead to a new round."""
        round_ = self._protocol.begin(batch)
        while True:
            try:
                for name, value in (
                    (GENERATION, self.generation),
                    (BATCH, batch),
                    (ROUND, round_.number),
                    (ADDRESSES, self._cluster.addresses),
                    (TIME, msgspec.json.encode(when).decode()),
                ):
                    context.setLocalProperty(name, str(value))
                made = evaluate(round_)
                self._protocol.action_finished()
                return made
            except Exception as error:
                if self._ending.is_set():
                    raise
                cause = self._cause(error, round_)
                if isinstance(cause, (*FATAL, SinkError)) or round_.number >= MAX_ROUNDS - 1:
                    raise cause from error
                log.warning(
                    "job %s, batch %d: round %d failed, and a new round begins: %s",
                    self._cluster.run.job,
                    batch,
                    round_.number,
                    cause,
                )
                self.rounds_repeated += 1
                round_ = self._next_round()

    def _next_round(self) -> Round:
        """Replace lost slots, and have every slot discard what it prepared."""
        self._protocol.action_failed()
        while True:
            self.recover()
            round_ = self._protocol.next_round()
            try:
                self._cluster.discard(round_.batch, round_.number)
                return round_
            except SlotLostError:
                if round_.number >= MAX_ROUNDS:
                    raise

    def recover(self, asked_to_end: Callable[[], bool] = lambda: False) -> None:
        """Replace lost slots. They start with the state of the last committed batch. The caller holds `busy`.

        If an attempt fails and `asked_to_end` returns True, there is no further attempt: some slots may be missing.
        """
        replaced = self._replace_lost_slots(asked_to_end)
        if replaced:
            self.replaced_slots += len(replaced)
            for index in replaced:
                incarnation = self._cluster.incarnation(index)
                self._protocol.slot_replaced(index, incarnation)
                self._protocol.applied(index, incarnation, self.decided)
            self._clock.forget_timers()
            self._checkpoints.slots_replaced()

    def _replace_lost_slots(self, asked_to_end: Callable[[], bool]) -> set[int]:
        replaced: set[int] = set()
        for _ in range(MAX_ROUNDS):
            try:
                lost = self._cluster.recover(self.decided)
                if not lost:
                    return replaced
                replaced.update(lost)
            except SegmentsLostError:
                raise
            except SlotLostError as error:
                log.warning("job %s: a slot was lost while slots were replaced: %s", self._cluster.run.job, error)
                # An attempt may take many seconds. Whoever is not wanted any more makes no further one.
                self._checkpoints.check_not_fenced()
                if self._cluster.abandoned or self._ending.is_set():
                    raise SlotLostError(f"job {self._cluster.run.job}: the run ends") from error
                if asked_to_end():
                    return replaced
        raise SlotLostError(
            f"job {self._cluster.run.job}: slots were lost in each of {MAX_ROUNDS} attempts to replace them; the logs "
            "of the slots are in the run's folder under local_dir"
        )

    def _evaluate(self, rows: DataFrame, when: BatchTime, round_: Round) -> list[SinkFile]:
        """Have every subtask prepare the batch, and the rows staged for all sinks. Returns what was staged."""
        if self._outlets.direct:
            return self._deliver(rows, when, round_)
        files = self._fill_sinks(rows, round_.batch)
        self._prepare_all(rows, round_, when)
        return files

    def _deliver(self, rows: DataFrame, when: BatchTime, round_: Round) -> list[SinkFile]:
        """Have relays deliver the rows to the slots, and then the slots prepare the batch."""
        rows.sparkSession.sparkContext.setLocalProperty(STAGING, str(False))
        deliveries = [Delivery(*row) for row in rows.collect()]
        statuses = self._unless_ending(
            lambda: self._cluster.prepare(round_.batch, round_.number, when, deliveries),
        )
        self._note_prepared(round_, statuses)
        return [file for _index, status in sorted(statuses.items()) for file in status.staged]

    def _unless_ending(self, call: Callable[[], Made]) -> Made:
        """The result of a call that works on a batch. The end of the query ends the wait, not the call."""
        made: Future[Made] = Future()

        def work() -> None:
            try:
                made.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                made.set_exception(error)

        threading.Thread(target=work, daemon=True, name="prepare").start()
        while not made.done():
            if self._ending.is_set():
                raise SlotLostError(f"job {self._cluster.run.job}: the run ends")
            wait((made,), LOOK_EVERY)
        return made.result()

    def _fill_sinks(self, rows: DataFrame, batch: int) -> list[SinkFile]:
        """Write the rows to all sinks, and return what was staged."""
        files: list[SinkFile] = []
        context = rows.sparkSession.sparkContext
        context.setLocalProperty(STAGING, str(True))
        if self._outlets.manifests is not None:
            files = [SinkFile(*row) for row in self._outlets.manifests(rows).collect()]
        context.setLocalProperty(STAGING, str(False))
        for select, function in self._outlets.functions:
            selected = select(rows)
            try:
                with in_sink_function(self._cluster.run.job):
                    function(selected, batch)
            except (
                BaseException
            ) as error:  # `sys.exit()` and the like would end Spark's callback thread: the query hangs
                if is_spark_failure(error):
                    raise
                raise function_failure(f"job {self._cluster.run.job}, batch {batch}", error) from error
        return files

    def _prepare_all(self, rows: DataFrame, round_: Round, when: BatchTime) -> None:
        """Prepare the subtasks whose rows no sink has evaluated, and those that got no rows."""
        self._ask_prepared(round_)
        if self._protocol.missing() and self._outlets.functions:
            rows.write.format("noop").mode("overwrite").save()
            self._ask_prepared(round_)
        self._prepare_missing(round_, when)

    def _prepare_missing(self, round_: Round, when: BatchTime) -> None:
        missing = {index for _operator, index in self._protocol.missing()}
        if missing:
            self._cluster.prepare_empty(PrepareEmpty(round_.batch, round_.number, when), missing)
            self._ask_prepared(round_)

    def _ask_prepared(self, round_: Round) -> None:
        self._note_prepared(round_, self._cluster.collect_prepared(round_.batch, round_.number))

    def _note_prepared(self, round_: Round, statuses: Mapping[int, SlotStatus]) -> None:
        for index, status in statuses.items():
            self._pushed[index] = status.pushed
            for operator, prepared in status.prepared.items():
                if prepared is not None and tuple(prepared) == (round_.batch, round_.number):
                    self._counts[operator, index] = status.counts[operator]
                    self._protocol.prepared(operator, index, status.incarnation, round_, None)

    def _take_pushed(self) -> Mapping[int, Sequence[PushedRows]]:
        pushed, self._pushed = self._pushed, {}
        return pushed

    def _call_back(self, batch: int, pushed: Mapping[int, Sequence[PushedRows]]) -> None:
        """Hand the output of a prepared batch, which slots have `pushed`, to the callbacks.

        No checkpoint may cover it yet.
        """
        for (operator, output), functions in self._outlets.callbacks.items():
            streams = [
                rows.stream
                for _index, some in sorted(pushed.items())
                for rows in some
                if (rows.operator, rows.output) == (operator, output)
            ]
            if not streams:
                continue
            table = pa.concat_tables(pa.ipc.open_stream(stream).read_all() for stream in streams)
            for function in functions:
                try:
                    with in_sink_function(self._cluster.run.job):
                        function(table, batch)
                except BaseException as error:
                    where = f"job {self._cluster.run.job}, batch {batch}, CallbackSink behind step {operator!r}"
                    raise function_failure(where, error) from error

    def _commit(
        self,
        spark_batch: int,
        files: list[SinkFile],
        began: float,
        when: BatchTime,
        seen: Mapping[int, Seen],
        reads: Mapping[int, int],
        *,
        reported: bool = True,
        read: Mapping[int, StreamRead] = MappingProxyType({}),
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit the batch. `reported` says whether Spark will report on it; `read` is what an epoch has read.

        `moved` moves the position before any checkpoint can begin.
        """
        with self._checkpoints.commit_lock:
            batch, barrier, told = self._decide(
                lambda timers: self._clock.committed(when, seen, timers),
                lambda batch: self._checkpoints.begin_with_commit(batch, began, wanted=self._checkpoint_every_batch),
            )
            self._checkpoints.committed(batch, spark_batch, files, began)
            moved()
            if barrier is not None:
                self._checkpoints.end_barrier(barrier.checkpoint, told)
        steps: dict[str, RowCounts] = {}
        for (operator, _index), counts in self._counts.items():
            steps[operator] = steps.get(operator, RowCounts()).plus(counts)
        written = sum(file.rows for file in files)
        number = spark_batch if reported else None
        work = BatchWork(batch, number, when, began, time.monotonic(), steps, written, reads, read)
        self._progress.committed(work)
        self.committed += 1

    def _decide(
        self,
        on_applied: Callable[[list[NextTimers]], None],
        begin_checkpoint: Callable[[int], Barrier | None],
    ) -> _Decided:
        """Decide the batch, and have every slot apply it. `on_applied` gets what each slot waits for next.

        A slot that dies in between is rebuilt at the decided batch, from its segments. `begin_checkpoint` may give a
        barrier that goes with the commit.
        """
        with self._checkpoints.commit_lock:
            batch = self._protocol.commit()
            try:
                barrier = begin_checkpoint(batch)
                return _Decided(batch, barrier, self._apply(batch, on_applied, barrier))
            except BaseException as error:
                # Some slots may have the batch, and the position is that of the batch before: no checkpoint of both.
                told = error if isinstance(error, StrandlineError) else StrandlineError(f"batch {batch}: {error!r}")
                self._checkpoints.give_up(told)
                raise

    def _apply(
        self, batch: int, on_applied: Callable[[list[NextTimers]], None], barrier: Barrier | None
    ) -> Collection[CommittedSlot]:
        """Have every slot apply the batch. Returns what the slots told, or nothing if the barrier was given up."""
        for attempt in range(MAX_ROUNDS):
            try:
                told = self._cluster.commit(batch, barrier if attempt == 0 else None)
                for index in told:
                    self._protocol.applied(index, self._cluster.incarnation(index), batch)
                on_applied([one.timers for one in told.values()])
                return told.values() if attempt == 0 else ()
            except SlotLostError:
                if self._ending.is_set():
                    raise  # the slots may be those of the next generation already
                self.recover()
        raise SlotLostError(
            f"job {self._cluster.run.job}: slots were lost in each of {MAX_ROUNDS} attempts to commit batch "
            f"{batch}; the logs of the slots are in the run's folder under local_dir"
        )

    def _cause(self, error: Exception, round_: Round) -> StrandlineError:
        """The original error of a slot or a task, instead of the text that Spark made of it."""
        if isinstance(error, StrandlineError):
            return error
        for status in self._cluster.statuses():
            failed = status.failure
            if failed is not None and (failed.batch, failed.round) == (round_.batch, round_.number):
                return failed.failure.error()
        where, text = f"job {self._cluster.run.job}, batch {round_.batch}", str(error)
        return failure_of_batch(where, text)
