"""The micro-batches of a generation: Spark cuts them, and calls the batch function for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.batch import batch_id
from strandline.errors import StrandlineError
from strandline.runtime.driver.batches import Batches
from strandline.runtime.driver.cluster import JOB_GROUP
from strandline.runtime.driver.recoveries import Began
from strandline.runtime.driver.watermarks import Seen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


class MicroBatches(Batches):
    """The batch function of Spark's query."""

    def __init__(
        self,
        *others: Any,
        read_seen: Callable[[], Mapping[int, Seen]],
        count_reads: Callable[[], Mapping[int, int]],
        **more: Any,
    ) -> None:
        """`read_seen` tells what the rows of the batch have shown, and `count_reads` how many each stream had.

        `others` and `more` are the arguments of `Batches`.
        """
        super().__init__(*others, **more)
        self._read_seen = read_seen
        self._count_reads = count_reads
        self.query_began: Callable[[SparkSession], None] | None = None
        """Is called before the first batch of the next query, with the session of that query."""

    def __call__(self, rows: DataFrame, spark_batch: int) -> None:
        self.entered = True
        try:
            if self.query_began is not None:
                self.query_began(rows.sparkSession)
                self.query_began = None
            self._enter(rows, spark_batch)
        finally:
            self.entered = False

    def _enter(self, rows: DataFrame, spark_batch: int) -> None:
        while True:
            self._gate.wait()
            if self._ending.is_set():
                return
            self._checkpoints.wait_for_sinks(lambda: not self._gate.is_set() or self._ending.is_set())
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
        began = Began.now()
        batch = batch_id(self.generation, spark_batch)
        with self._at_work(batch, began):
            self._work(rows, spark_batch, batch, began.steady)

    def _work(self, rows: DataFrame, spark_batch: int, batch: int, began: float) -> None:
        when = self._clock.of(spark_batch)
        context = rows.sparkSession.sparkContext
        group = context.getLocalProperty(JOB_GROUP)
        self._jobs = (context, group) if group is not None else None

        evaluate = partial(self._evaluate, rows, when)
        files = self._in_rounds(context, batch, when, evaluate)
        self._call_back(batch, self._take_pushed())
        self._commit(spark_batch, files, began, when, self._read_seen(), self._count_reads())
