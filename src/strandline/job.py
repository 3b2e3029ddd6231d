"""What a user writes: a job of sources, keyed steps and sinks, and the run that it becomes."""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from strandline._options import DurationLike, parse_duration
from strandline.checkpoint.stats import CheckpointStats
from strandline.config import Config
from strandline.errors import ConfigError, JobDefinitionError
from strandline.operators.aggregate import Aggregate, AggregateOperator
from strandline.operators.process import KeyedProcessor, ProcessOperator
from strandline.runtime.plan import (
    Graph,
    Node,
    SourceNode,
    StatefulNode,
    Transformation,
    TransformNode,
    UnionNode,
    prototype,
    source_problems,
)
from strandline.runtime.run import Run
from strandline.runtime.takeover import ClaimMode, Restore
from strandline.sinks import ForeachBatchSink, ParquetSink, Sink
from strandline.storage import JobPaths, is_local, open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def event_time_column(schema: StructType) -> str | None:
    """The column that carries a watermark, if one does: Spark notes it in the column's metadata."""
    return next((field.name for field in schema.fields if _WATERMARK in field.metadata), None)


_WATERMARK = "spark.watermarkDelayMs"


class Job:
    """A streaming job: build it with `source`, `key_by`, `process` or `aggregate`, and `sink`, then `start` it.

    `name` names the job's checkpoints: a job that is started again under its name goes on where it was.
    """

    def __init__(self, name: str, spark: SparkSession, config: Config) -> None:
        JobPaths(name)
        if "connect" in type(spark).__module__.split("."):
            raise JobDefinitionError(
                "a Spark Connect session cannot run a Strandline job: the batch function must run in the driver. "
                "Use a classic SparkSession (SparkSession.builder.master(...) or spark-submit)."
            )
        self.name = name
        self.spark = spark
        self.config = config
        self._graph = Graph()

    def source(
        self, frame: DataFrame, *, event_time: str | None = None, watermark_delay: DurationLike | None = None
    ) -> Stream:
        """A stream of the rows of any streaming DataFrame whose source can be read again.

        `event_time` is the timestamp column that says when a row happened. The source's watermark is the latest such
        time that it has shown, less `watermark_delay`: rows may come that much out of order. The job's watermark is the
        least of all its sources'. A `withWatermark` that is already on the DataFrame is taken over.
        """
        if not frame.isStreaming:
            raise JobDefinitionError(
                f"job {self.name!r}: the source is a batch DataFrame. Read it with spark.readStream, not spark.read."
            )
        problems = source_problems(frame)
        if problems:
            raise JobDefinitionError(f"job {self.name!r}: this DataFrame cannot be a source: {'; '.join(problems)}.")
        if event_time is not None or watermark_delay is not None:
            frame = self._with_watermark(frame, event_time, watermark_delay)
        return Stream(self, SourceNode(frame))

    def _with_watermark(self, frame: DataFrame, event_time: str | None, delay: DurationLike | None) -> DataFrame:
        from pyspark.sql.types import TimestampNTZType, TimestampType

        where = f"job {self.name!r}: source(event_time={event_time!r}, watermark_delay={delay!r})"
        if event_time is None or delay is None:
            raise JobDefinitionError(f"{where}: give both, such as event_time='ts', watermark_delay='10s'")
        known = event_time_column(frame.schema)
        if known is not None:
            raise JobDefinitionError(f"{where}: the DataFrame has a watermark on {known!r} already; use one of the two")
        if event_time not in frame.columns:
            near = difflib.get_close_matches(event_time, frame.columns, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(frame.columns)}"
            raise JobDefinitionError(f"{where}: no such column; {hint}")
        kind = frame.schema[event_time].dataType
        if not isinstance(kind, TimestampType | TimestampNTZType):
            raise JobDefinitionError(
                f"{where}: the column is of type {kind.simpleString()}, not a timestamp; convert it before, "
                "for instance with to_timestamp or timestamp_millis"
            )
        try:
            milliseconds = round(parse_duration(delay) * 1000)
        except ValueError as error:
            raise JobDefinitionError(f"{where}: {error}") from error
        return frame.withWatermark(event_time, f"{milliseconds} milliseconds")

    def start(
        self,
        *,
        available_now: bool = False,
        restore: str | os.PathLike[str] | None = None,
        parallelism: int | None = None,
        claim_mode: ClaimMode = "no_claim",
    ) -> JobRun:
        """Run the job, from its newest completed checkpoint if there is one.

        Returns once the run has begun. With `available_now` it ends by itself when the rows that are there now are
        processed and covered by a checkpoint. If the job runs elsewhere already, this run takes it over.

        `restore` is the directory of a checkpoint to go on from instead, or the `_metadata` file in it. With
        `claim_mode="no_claim"` it stays yours: the first checkpoint of the run uploads all state anew, and from then
        on you may delete the original. With `"claim"`, for checkpoints in the job's own folder, it belongs to the job
        again: later checkpoints build on it, and the job deletes it when it is not retained any more. Rows that a
        `ParquetSink` of the job published after that checkpoint are withdrawn, and computed again.
        """
        if not self._graph.sinks:
            raise JobDefinitionError(f"job {self.name!r} has no sink; end a stream with .sink(...)")
        if claim_mode not in get_args(ClaimMode):
            known = " or ".join(map(repr, get_args(ClaimMode)))
            raise ConfigError(f"claim_mode={claim_mode!r}: use {known}")
        config = self.config if parallelism is None else self.config.replace(parallelism=parallelism)
        return JobRun(
            Run(
                self.name,
                self.spark,
                config,
                self._graph,
                available_now=available_now,
                restore=Restore(os.fspath(restore), claim_mode) if restore is not None else None,
            )
        )

    def _uid(self, given: str | None, kind: str) -> str:
        used = {operator.uid for operator in self._graph.operators}
        if given is None:
            given = f"{kind}-{len(used)}"
        if given in used:
            raise JobDefinitionError(f"job {self.name!r}: two steps have the uid {given!r}; give each its own uid=")
        return given


class Stream:
    """A stream of rows inside a job."""

    def __init__(self, job: Job, node: Node) -> None:
        self._job = job
        self._node = node
        self._prototype = prototype(node)

    @property
    def schema(self) -> StructType:
        """The columns of the stream."""
        return self._prototype.schema

    def transform(self, function: Transformation) -> Stream:
        """A stateless step: `function` gets the stream as a DataFrame and returns another one.

        It is called when the job is built and again when it starts, so it should only describe columns.
        """
        node = TransformNode(self._node, function)
        result = Stream(self._job, node)
        if not result._prototype.isStreaming:
            raise JobDefinitionError(
                f"job {self._job.name!r}: a transform must return a DataFrame made from its argument"
            )
        problems = source_problems(result._prototype)
        if problems:
            raise JobDefinitionError(f"job {self._job.name!r}: this transform cannot run: {'; '.join(problems)}.")
        return result

    def union(self, *others: Stream) -> Stream:
        """The rows of this stream and of others with the same columns."""
        for other in others:
            if other._job is not self._job:
                raise JobDefinitionError("streams of different jobs cannot be united")
            if set(other.schema.names) != set(self.schema.names):
                raise JobDefinitionError(
                    f"job {self._job.name!r}: union of streams with different columns: "
                    f"{self.schema.names} and {other.schema.names}"
                )
        return Stream(self._job, UnionNode((self._node, *(other._node for other in others))))

    def key_by(self, *columns: str) -> KeyedStream:
        """The stream partitioned by the values of `columns`: state is kept per key."""
        if not columns:
            raise JobDefinitionError("key_by needs at least one column")
        for column in columns:
            if column not in self.schema.names:
                near = difflib.get_close_matches(column, self.schema.names, 1)
                raise JobDefinitionError(
                    f"job {self._job.name!r}: key_by({column!r}): no such column"
                    f"{f', did you mean {near[0]!r}?' if near else ''} Columns: {', '.join(self.schema.names)}"
                )
        return KeyedStream(self, columns)

    def sink(self, sink: Sink) -> Stream:
        """Send the rows of this stream to `sink`. A stream may have several sinks."""
        if not isinstance(sink, ParquetSink | ForeachBatchSink):
            raise JobDefinitionError(f"{sink!r} is not a sink; use ParquetSink(path) or ForeachBatchSink(function)")
        if isinstance(sink, ParquetSink) and is_local(sink.path):
            # One name for the folder: for the driver and every task, and however it is written the next time.
            sink = replace(sink, path=os.path.abspath(open_storage(sink.path).url))
        paths = {known.path for _node, known in self._job._graph.sinks if isinstance(known, ParquetSink)}
        if isinstance(sink, ParquetSink) and sink.path in paths:
            raise JobDefinitionError(
                f"job {self._job.name!r}: two sinks write to {sink.path!r}; give each its own folder"
            )
        self._job._graph.sinks.append((self._node, sink))
        return self


class KeyedStream:
    """A stream whose rows are grouped by key, ready for a stateful step."""

    def __init__(self, stream: Stream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._columns = columns

    def process(
        self,
        processor: KeyedProcessor,
        schema: str | StructType,
        *,
        uid: str | None = None,
        rows: Literal["row"] = "row",
    ) -> Stream:
        """Run `processor` once per key and batch; `schema` is that of the rows it yields."""
        if not isinstance(processor, KeyedProcessor):
            raise JobDefinitionError(f"process() takes an instance of a KeyedProcessor, not {processor!r}")
        if rows != "row":
            raise JobDefinitionError(f"rows={rows!r} is not available in this release; use rows='row'")
        job = self._stream._job
        operator = ProcessOperator(
            job._uid(uid, "process"), processor, self._columns, self._stream.schema, _struct(schema)
        )
        return self._stateful(operator, tuple(self._stream.schema.names), operator.output_struct)

    def aggregate(self, *, uid: str | None = None, **aggregates: Aggregate) -> Stream:
        """Running aggregates per key: for every batch, one row per key that changed, with the key and its values.

        `stream.key_by("user").aggregate(n=sl.count(), total=sl.sum("amount"))`
        """
        operator = AggregateOperator(
            self._stream._job._uid(uid, "aggregate"), self._columns, self._stream.schema, aggregates
        )
        used = [*self._columns, *(a.column for a in aggregates.values() if a.column is not None)]
        return self._stateful(operator, tuple(dict.fromkeys(used)), operator.output_struct)

    def _stateful(
        self, operator: ProcessOperator | AggregateOperator, columns: tuple[str, ...], output: StructType
    ) -> Stream:
        job = self._stream._job
        node = StatefulNode(self._stream._node, operator, columns, output)
        job._graph.operators.append(operator)
        return Stream(job, node)


class JobRun:
    """A running job. All methods may be called from any thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.begin()

    @property
    def status(self) -> str:
        """`starting`, `running`, `restarting`, `finished`, `stopped`, `cancelled` or `failed`."""
        return self._run.status

    @property
    def error(self) -> Exception | None:
        """Why the run failed, if it did."""
        return self._run.error

    def process_all_available(self) -> None:
        """Return when the rows that are there now are processed and a completed checkpoint covers them.

        Raises the run's error if it fails meanwhile.
        """
        self._run.process_all_available()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the run ends; False if it still runs after `timeout` seconds. Raises its error if it failed."""
        return self._run.await_termination(timeout)

    def checkpoints(self) -> list[CheckpointStats]:
        """The run's checkpoints with their figures, oldest first."""
        return self._run.checkpoints()

    def trigger_checkpoint(self) -> CheckpointStats:
        """Take a checkpoint now, and return its figures when it is complete."""
        return self._run.trigger_checkpoint()

    def stop(self) -> None:
        """Finish the batch that runs, take a last checkpoint, and end: every row that was processed is visible."""
        self._run.stop()

    def cancel(self) -> None:
        """End at once, without a last checkpoint. What happens to the checkpoints says `Config.on_cancel`."""
        self._run.cancel()

    def processes(self) -> dict[str, Any]:
        """The run's task managers and slots with their process ids."""
        return self._run.processes()

    def figures(self) -> dict[str, Any]:
        """Counts of the run: generation, batches, restarts, repeated rounds, replaced slots, state size."""
        return self._run.figures()


def _struct(schema: str | StructType) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    try:
        parsed = StructType.fromDDL(schema)
        if isinstance(parsed, StructType):
            return parsed
        raise ValueError("it is a single type, not a list of columns")
    except Exception as error:
        raise ConfigError(f"the schema {schema!r} cannot be read: {error}") from error
