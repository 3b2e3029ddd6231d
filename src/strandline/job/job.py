"""A job: its sources, its steps and its start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, get_args

from pyspark.sql.types import TimestampNTZType

from strandline.config import Config
from strandline.config.option import DurationLike
from strandline.errors import ConfigError, JobDefinitionError
from strandline.job.arguments import read_milliseconds
from strandline.job.listener import RunListener, check_listener
from strandline.job.observation import Observation
from strandline.job.overlay import StartArguments, overlaid
from strandline.job.run import JobRun
from strandline.job.running_already import check_not_running
from strandline.job.stream import Stream
from strandline.operators.columns.declared import check_time_column
from strandline.operators.columns.time_columns import time_columns, with_source_time
from strandline.runtime.driver.event_times import observed, observed_watermarks
from strandline.runtime.driver.logical_plans import source_problems
from strandline.runtime.driver.nodes import SourceNode
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.restore.takeover import ClaimMode, Restore
from strandline.runtime.driver.run import Run
from strandline.runtime.driver.watermarks import SourceTime
from strandline.storage import JobPaths, open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Job:
    """A streaming job: build it with `source`, `key_by`, `process` or `aggregate`, and `sink`, then `start` it.

    ```python
    job = sl.Job("visits", spark, sl.Config(checkpoint_dir="ckpt"))
    events = job.source(spark.readStream.schema(schema).parquet("in"))
    events.key_by("user").aggregate(n=sl.count()).sink(sl.ParquetSink("out"))
    run = job.start()
    ```

    `name` names the job's checkpoints: a job that is started again under the same name continues from its newest
    completed checkpoint. The constructor raises `JobDefinitionError` for a Spark Connect session, `ConfigError` for a
    config that is not a `Config` or names a storage that cannot be opened, and `StrandlineError` for a name that cannot
    be the name of a folder.
    """

    def __init__(self, name: str, spark: SparkSession, config: Config) -> None:
        if not isinstance(name, str):
            raise JobDefinitionError(
                f"the name of a job is a text, not {type(name).__name__}; write sl.Job('visits', spark, sl.Config(...))"
            )
        JobPaths(name)
        if "connect" in type(spark).__module__.split("."):
            raise JobDefinitionError(
                "a Spark Connect session cannot run a Strandline job: the batch function must run in the driver. "
                "Use a classic SparkSession (SparkSession.builder.master(...) or spark-submit)."
            )
        if not isinstance(config, Config):
            raise ConfigError(
                f"job {name!r}: config must be a sl.Config, not {type(config).__name__}; write sl.Config(...), or "
                "sl.Config.from_mapping({...})"
            )
        config = overlaid().config(name, config)
        for place in (config.checkpoint_dir, config.changelog_dir):
            if place is not None:
                open_storage(place, config.storage_options)  # contacts nobody, but refuses what cannot be opened
        self.name = name
        self.spark = spark
        self.config = config
        self._graph = Graph()
        self._listeners: list[RunListener] = []

    def __repr__(self) -> str:
        """The name of the job, and how many stateful steps and sinks it has so far."""
        steps, sinks = len(self._graph.operators), len(self._graph.sinks)
        return (
            f"<Job {self.name!r}: {steps} stateful step{'' if steps == 1 else 's'}, "
            f"{sinks} sink{'' if sinks == 1 else 's'}>"
        )

    def source(
        self,
        frame: DataFrame,
        *,
        event_time: str | None = None,
        watermark_delay: DurationLike | None = None,
        idle_after: DurationLike | None = None,
    ) -> Stream:
        """Returns the rows of `frame`, any streaming DataFrame whose source can be read again, as a stream.

        `event_time` is the timestamp column that says when a row happened. The watermark of the source is the latest
        event time among its rows, minus `watermark_delay`: rows may come out of order by that much. A step that reads
        several sources waits for the earliest of their watermarks. If `frame` has a `withWatermark` already, the job
        uses it.

        With `idle_after`, a source without rows for so long is idle: steps that also read other sources do not wait for
        it until it has rows again. Its rows may be late then.

        Raises `JobDefinitionError` if `frame` is a batch DataFrame, if it contains a stateful operation of Spark's, if
        `event_time` is no timestamp column, or if `idle_after` is given for a source without event time.
        """
        if not frame.isStreaming:
            raise JobDefinitionError(
                f"job {self.name!r}: the source is a batch DataFrame. Read it with spark.readStream, not spark.read."
            )
        problems = source_problems(frame)
        if problems:
            raise JobDefinitionError(f"job {self.name!r}: this DataFrame cannot be a source: {'; '.join(problems)}.")
        if event_time is not None or watermark_delay is not None:
            frame, times = self._with_watermark(frame, event_time, watermark_delay)
        else:
            frame, times = observed_watermarks(frame, len(self._graph.sources))
        delays, columns = tuple(delay for _, delay in times), tuple(column for column, _ in times)
        node = SourceNode(frame, SourceTime(delays, self._idle_after(idle_after, delays), columns))
        self._graph.sources.append(node)
        return Stream(self, node)

    def _with_watermark(
        self, frame: DataFrame, event_time: str | None, delay: DurationLike | None
    ) -> tuple[DataFrame, tuple[tuple[str, int], ...]]:
        where = f"job {self.name!r}: source(event_time={event_time!r}, watermark_delay={delay!r})"
        if event_time is not None:
            check_time_column(frame.schema, event_time, where)
        if event_time is None or delay is None:
            raise JobDefinitionError(f"{where}: give both, such as event_time='ts', watermark_delay='10s'")
        known = list(time_columns(frame.schema))
        if known:
            raise JobDefinitionError(
                f"{where}: the DataFrame has a watermark on {known[0]!r} already; use one of the two"
            )
        if isinstance(frame.schema[event_time].dataType, TimestampNTZType):
            raise JobDefinitionError(
                f"{where}: the column is of type timestamp_ntz, which is no point in time, so it cannot carry a "
                "watermark; convert it first: .withColumn(name, col(name).cast('timestamp')) reads it in the time zone "
                "of the session"
            )
        milliseconds = read_milliseconds(delay, f"{where}: watermark_delay")
        frame = observed(frame, event_time, len(self._graph.sources))
        return with_source_time(frame, event_time), ((event_time, milliseconds),)

    def _idle_after(self, given: DurationLike | None, delays: tuple[int, ...]) -> int | None:
        if given is None:
            return None
        if not delays:
            raise JobDefinitionError(
                f"job {self.name!r}: source(idle_after={given!r}): the source has no event time, so nobody waits for "
                "it; give event_time='...' and watermark_delay='...', or leave idle_after out"
            )
        return read_milliseconds(given, f"job {self.name!r}: source(): idle_after")

    def start(
        self,
        *,
        available_now: bool = False,
        restore: str | os.PathLike[str] | None = None,
        parallelism: int | None = None,
        claim_mode: ClaimMode = "no_claim",
        allow_non_restored_state: bool = False,
        repeat_rows: bool = False,
    ) -> JobRun:
        """Starts the job, and returns its run once the run has begun.

        The run continues from the newest completed checkpoint of the job, if there is one. If the job runs elsewhere
        already, this run takes it over, and the other run fails with `FencedError`.

        While it restores state, the run can be ended by REST and from the command line. A stop waits until the state is
        open. A cancel ends the run at once; `start` then returns the run, which is over.

        Args:
            available_now: The run ends by itself when the rows that the sources hold now are processed and a completed
                checkpoint covers them.
            restore: The directory of a checkpoint or savepoint to continue from instead, or the `_metadata` file in it.
                Rows that a `ParquetSink` of the job published after that checkpoint are withdrawn and computed again.
            parallelism: The number of subtasks of each stateful step, instead of `Config.parallelism`.
            claim_mode: Who owns the restored checkpoint. With `"no_claim"` it stays yours: the first checkpoint of the
                run uploads all state anew, and from then on you may delete the original. With `"claim"`, for
                checkpoints in the job's own folder, it belongs to the job again: later checkpoints build on its files,
                and the job deletes it when it is not retained any more.
            allow_non_restored_state: The checkpoint may hold state of a step, or a state of a step, that the job does
                not have any more. The run leaves such state out, and later checkpoints do not hold it. Without this
                option such state is an error. New steps and new states of a step always begin empty, and the rows of a
                state may have gained nullable columns.
            repeat_rows: With `restore`: go back behind rows that a sink has and cannot take back. The job works them
                out again, and the sink writes them a second time. Without this option that is a `SinkAheadError`.

        Raises:
            JobDefinitionError: The job has no sink.
            ConfigError: An argument is wrong, or the Spark session cannot run the job.
            CheckpointError: The checkpoint is missing, damaged, or does not fit the job.
        """
        if not self._graph.sinks:
            raise JobDefinitionError(f"job {self.name!r} has no sink; end a stream with .sink(...)")
        if claim_mode not in get_args(ClaimMode):
            known = " or ".join(map(repr, get_args(ClaimMode)))
            raise ConfigError(f"claim_mode={claim_mode!r}: use {known}")
        given = overlaid().start(
            self.name,
            StartArguments(
                None if restore is None else os.fspath(restore),
                parallelism,
                claim_mode,
                allow_non_restored_state,
                repeat_rows,
            ),
        )
        config = self.config if given.parallelism is None else self.config.replace(parallelism=given.parallelism)
        if not overlaid().overlay.take_over:
            check_not_running(self.name, config)
        return JobRun(
            lambda on_event: Run(
                self.name,
                self.spark,
                config,
                self._graph,
                available_now=available_now,
                restore=_restore(given),
                allow_non_restored=given.allow_non_restored_state,
                on_event=on_event,
            ),
            lambda run: Observation(run, self._graph, str(self.spark.version)),
            self._listeners,
        )

    def add_listener(self, listener: RunListener) -> None:
        """Adds a `RunListener`, which is told what happens to every run that is started from now on.

        Raises `ConfigError` if it is something else.
        """
        self._listeners.append(check_listener(listener))

    def _uid(self, given: str | None, kind: str) -> str:
        used = {operator.uid for operator in self._graph.operators}
        if given is None:
            given = f"{kind}-{len(used)}"
        if given in used:
            raise JobDefinitionError(f"job {self.name!r}: two steps have the uid {given!r}; give each its own uid=")
        return given


def _restore(given: StartArguments) -> Restore | None:
    if given.restore is not None:
        return Restore(given.restore, given.claim_mode, given.repeat_rows)
    if given.repeat_rows:
        raise ConfigError("repeat_rows=True goes with restore=: it says that the job goes back to an older checkpoint")
    return None
