"""The batch function, which Spark calls for every micro-batch: every subtask prepares the batch, then it is committed.

A batch is prepared in rounds. If a slot or a Spark task is lost, or an action fails for another passing reason, all
slots discard what they prepared, and the action runs again in a new round. The query goes on, and the state of other
slots stays as it is. Once every subtask is prepared in one round, the batch is decided. A decision is final.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from strandline.checkpoint.batch import BatchProtocol, Round
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import (
    SchemaError,
    SegmentsLostError,
    SinkError,
    SlotLostError,
    StorageFullError,
    StorageRefusedError,
    StrandlineError,
    UserCodeError,
)
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import JOB_GROUP, Cluster
from strandline.runtime.driver.progress import BatchWork, RunProgress
from strandline.runtime.driver.sink_failures import function_failure, is_spark_failure, lasting_failure_in_task
from strandline.runtime.driver.watermarks import Seen
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.messages import BatchTime, batch_id
from strandline.runtime.protocol.slot_calls import NextTimers, PrepareEmpty, RowCounts
from strandline.runtime.task.batch_properties import BATCH, EPOCH, GENERATION, PROPERTIES, ROUND, STAGING, TIME

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

Made = TypeVar("Made")

MAX_ROUNDS = 8
LOOK_EVERY = 0.1
"""Seconds between two looks at the cluster, while somebody waits for a batch to end."""
FATAL = (UserCodeError, SchemaError, StorageFullError, StorageRefusedError)
"""Errors that would occur again for the same batch: neither the batch nor the run is repeated."""


@dataclass(frozen=True, slots=True)
class Outlets:
    """Which rows of the finished plan belong to which sink."""

    manifests: Callable[[DataFrame], DataFrame] | None
    """Selects the manifest rows, which name the staged Parquet files; None if the job has no `ParquetSink`."""
    functions: tuple[tuple[Callable[[DataFrame], DataFrame], Callable[[DataFrame, int], None]], ...]
    """For every `ForeachBatchSink`: a function that selects its rows, and the user's function."""


class BatchFunction:
    """Runs the micro-batches of one generation, one after the other."""

    def __init__(
        self,
        cluster: Cluster,
        generation: int,
        protocol: BatchProtocol[None],
        outlets: Outlets,
        checkpoints: Checkpoints,
        clock: Clock,
        progress: RunProgress,
        read_seen: Callable[[], Mapping[int, Seen]],
        count_reads: Callable[[], Mapping[int, int]],
        *,
        checkpoint_every_batch: bool,
    ) -> None:
        self.generation = generation
        self.failure: StrandlineError | None = None
        self.batches = 0
        self._progress = progress
        self._counts: dict[tuple[str, int], RowCounts] = {}
        """The rows of each subtask in the batch that it has prepared."""
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
        self._read_seen = read_seen
        self._count_reads = count_reads
        self._checkpoint_every_batch = checkpoint_every_batch
        self._gate = threading.Event()
        """Batches begin only while it is set."""
        self._gate.set()
        self.entered = False
        """Whether Spark's thread is in this function, at the gate or in a batch."""
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

    # --- one micro-batch ---------------------------------------------------------------------------

    def __call__(self, rows: DataFrame, spark_batch: int) -> None:
        self.entered = True
        try:
            self._enter(rows, spark_batch)
        finally:
            self.entered = False

    def _enter(self, rows: DataFrame, spark_batch: int) -> None:
        while True:
            self._gate.wait()
            if self._ending.is_set():
                return
            with self.busy:
                if not self._gate.is_set():
                    continue
                self._run_or_fail(rows, spark_batch)
                return

    def _run_or_fail(self, rows: DataFrame, spark_batch: int) -> None:
        try:
            if self._cluster.suspects():
                self.recover()
            self._run(rows, spark_batch)
            if self._checkpoint_every_batch:
                self._checkpoints.cover(self.recover)
        except Exception as error:
            if self._ending.is_set():
                # The query is being stopped, and does not care how the batch ends. Py4J would print a traceback.
                self._gate.wait()
                return
            if isinstance(error, StrandlineError):
                self.failure = error
            else:
                log.exception("job %s: batch %d failed", self._cluster.run.job, spark_batch)
                self.failure = StrandlineError(f"batch {spark_batch}: {type(error).__name__}: {error}")
            # The error is in `failure`, and Spark gets only a short text. Spark parses it with a regular expression. A
            # long text overflows the stack of Spark's stream thread, and then the query hangs instead of ending.
            raise RuntimeError("the batch function failed") from None

    def _run(self, rows: DataFrame, spark_batch: int) -> None:
        began = time.monotonic()
        batch = batch_id(self.generation, spark_batch)
        when = self._clock.of(spark_batch)
        context = rows.sparkSession.sparkContext
        group = context.getLocalProperty(JOB_GROUP)
        self._jobs = (context, group) if group is not None else None

        def evaluate(round_: Round) -> list[SinkFile]:
            files = self._evaluate(rows, batch)
            self._prepare_all(rows, round_, when)
            return files

        files = self._in_rounds(context, batch, when, evaluate)
        self._commit(spark_batch, files, began, when, self._read_seen(), self._count_reads())

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
            self._note_prepared(round_)
            self._prepare_missing(round_, BatchTime(0))

        with self.busy:
            try:
                self._in_rounds(context, batch, when, evaluate)
            finally:
                for name in PROPERTIES:  # local properties belong to this thread, and this thread is the user's
                    context.setLocalProperty(name, None)  # type: ignore[arg-type]  # None removes it
            self._decide(lambda _timers: None)

    def _in_rounds(self, context: SparkContext, batch: int, when: BatchTime, evaluate: Callable[[Round], Made]) -> Made:
        """Run `evaluate` until every subtask is prepared in one round. Passing failures lead to a new round."""
        round_ = self._protocol.begin(batch)
        while True:
            try:
                for name, value in (
                    (GENERATION, self.generation),
                    (BATCH, batch),
                    (ROUND, round_.number),
                    (EPOCH, self._cluster.epoch_name),
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

    def _evaluate(self, rows: DataFrame, batch: int) -> list[SinkFile]:
        """Write the rows to all sinks, and return the staged Parquet files."""
        files: list[SinkFile] = []
        context = rows.sparkSession.sparkContext
        context.setLocalProperty(STAGING, str(True))
        if self._outlets.manifests is not None:
            files = [SinkFile(*row) for row in self._outlets.manifests(rows).collect()]
        context.setLocalProperty(STAGING, str(False))
        for select, function in self._outlets.functions:
            selected = select(rows)
            try:
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
        self._note_prepared(round_)
        if self._protocol.missing() and self._outlets.functions:
            rows.write.format("noop").mode("overwrite").save()
            self._note_prepared(round_)
        self._prepare_missing(round_, when)

    def _prepare_missing(self, round_: Round, when: BatchTime) -> None:
        missing = {index for _operator, index in self._protocol.missing()}
        if missing:
            self._cluster.prepare_empty(PrepareEmpty(round_.batch, round_.number, when), missing)
            self._note_prepared(round_)

    def _note_prepared(self, round_: Round) -> None:
        for index, status in self._cluster.collect_prepared(round_.batch, round_.number).items():
            for operator, prepared in status.prepared.items():
                if prepared is not None and tuple(prepared) == (round_.batch, round_.number):
                    self._counts[operator, index] = status.counts[operator]
                    self._protocol.prepared(operator, index, status.incarnation, round_, None)

    def _commit(
        self,
        spark_batch: int,
        files: list[SinkFile],
        began: float,
        when: BatchTime,
        seen: Mapping[int, Seen],
        reads: Mapping[int, int],
    ) -> None:
        with self._checkpoints.commit_lock:
            batch = self._decide(lambda timers: self._clock.committed(when, seen, timers))
            self._checkpoints.committed(batch, spark_batch, files, began)
        steps: dict[str, RowCounts] = {}
        for (operator, _index), counts in self._counts.items():
            steps[operator] = steps.get(operator, RowCounts()).plus(counts)
        written = sum(file.rows for file in files)
        self._progress.committed(BatchWork(batch, spark_batch, when, began, time.monotonic(), steps, written, reads))
        self.batches += 1

    def _decide(self, on_applied: Callable[[list[NextTimers]], None]) -> int:
        """Decide the batch, and have every slot apply it. `on_applied` gets what each slot waits for next.

        A slot that dies in between is rebuilt at the decided batch, from its segments.
        """
        with self._checkpoints.commit_lock:
            batch = self._protocol.commit()
            for _ in range(MAX_ROUNDS):
                try:
                    timers = self._cluster.commit(batch)
                    for index in timers:
                        self._protocol.applied(index, self._cluster.incarnation(index), batch)
                    on_applied(list(timers.values()))
                    return batch
                except SlotLostError:
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
        known = error_in_task(text) or lasting_failure_in_task(where, text)
        if known is not None:
            return known
        cancelled = _CANCELLED.search(text)  # for instance by Ctrl-C: its stack trace says nothing
        return StrandlineError(f"{where}: {cancelled[0] if cancelled is not None else text}")


_CANCELLED = re.compile(r"\[SPARK_JOB_CANCELLED\].*")
_RAISED = re.compile(r"^strandline\.errors\.(\w+): (.*?)(?=^\S*\n?\tat |\Z)", re.MULTILINE | re.DOTALL)


def error_in_task(text: str) -> StrandlineError | None:
    """The Strandline error that a Python worker raised, parsed from Spark's error text; None if there is none."""
    found = _RAISED.search(text)
    if found is None:
        return None
    return Failure(found[1], found[2].strip()).error()
