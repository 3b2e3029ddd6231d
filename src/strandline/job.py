"""What a user writes: a job of sources, keyed steps and sinks, and the run that it becomes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from strandline.config import Config
from strandline.config.option import DurationLike, parse_duration
from strandline.errors import ConfigError, JobDefinitionError
from strandline.job_run import JobRun
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.base import TIME_MODES, Operator, TimeMode
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.plan import LEFT, RIGHT, SIDE_COLUMN, JoinType
from strandline.operators.process.arrow_operator import ArrowProcessOperator
from strandline.operators.process.arrow_processor import ArrowProcessor
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.windows.specs import WindowSpec
from strandline.operators.windows.window_operator import WindowOperator
from strandline.runtime.driver.plan import (
    Graph,
    Node,
    OutputNode,
    SourceNode,
    StatefulNode,
    Transformation,
    TransformNode,
    UnionNode,
    prototype,
    source_problems,
)
from strandline.runtime.driver.restore.takeover import ClaimMode, Restore
from strandline.runtime.driver.run import Run
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
        self._has_watermark = False

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
        self._has_watermark |= event_time_column(frame.schema) is not None
        node = SourceNode(frame)
        self._graph.sources.append(node)
        return Stream(self, node)

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
        allow_non_restored_state: bool = False,
    ) -> JobRun:
        """Run the job, from its newest completed checkpoint if there is one.

        Returns once the run has begun. With `available_now` it ends by itself when the rows that are there now are
        processed and covered by a checkpoint. If the job runs elsewhere already, this run takes it over.

        `restore` is the directory of a checkpoint to go on from instead, or the `_metadata` file in it. With
        `claim_mode="no_claim"` it stays yours: the first checkpoint of the run uploads all state anew, and from then
        on you may delete the original. With `"claim"`, for checkpoints in the job's own folder, it belongs to the job
        again: later checkpoints build on it, and the job deletes it when it is not retained any more. Rows that a
        `ParquetSink` of the job published after that checkpoint are withdrawn, and computed again.

        The job may have changed since the checkpoint. New steps, and new states of a step, begin empty; the rows of a
        state may have gained nullable columns. State of a step, or a state of a step, that the job does not have any
        more is an error, unless `allow_non_restored_state`: then it is left out, and later checkpoints are without it.
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
                allow_non_restored=allow_non_restored_state,
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

    def side(self, name: str) -> Stream:
        """One of the side outputs of the step that made this stream."""
        node = self._node
        if not isinstance(node, OutputNode) or name not in node.parent.operator.side_outputs:
            known = list(node.parent.operator.side_outputs) if isinstance(node, OutputNode) else []
            raise JobDefinitionError(
                f"job {self._job.name!r}: no side output {name!r} here; there are: {', '.join(known) or 'none'}"
            )
        return Stream(self._job, OutputNode(node.parent, name))

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

    # --- per-key user code -------------------------------------------------------------------------

    def process(
        self,
        processor: KeyedProcessor | StatefulProcessor | ArrowProcessor | Callable[..., Any],
        schema: str | StructType,
        *,
        uid: str | None = None,
        rows: Literal["row", "pandas", "arrow"] = "row",
        time_mode: str = "none",
        initial_state: DataFrame | None = None,
        late: str | None = None,
        side_outputs: Mapping[str, str | StructType] | None = None,
    ) -> Stream:
        """Run `processor` on the rows of every key; `schema` is that of the rows it yields.

        `processor` is a `KeyedProcessor`; or a `StatefulProcessor` as it is written for Spark (`rows="row"` or
        `"pandas"`, with `initial_state`, a batch DataFrame with the key columns, if it has one); or, with
        `rows="arrow"`, an `ArrowProcessor` or a function of a table and a context.

        `time_mode` is the clock of its timers: "processing" or "event" time, or "none". In event time, rows that the
        watermark has passed are dropped and counted; `late="keep"` hands them over like any other, another name sends
        them to the side output of that name. `side_outputs` are the schemas of those that the processor emits to.
        """
        uid = self._uid(uid, "process")
        mode = _time_mode(uid, time_mode)
        output = _struct(schema)
        if isinstance(processor, StatefulProcessor):
            return self._spark_process(uid, processor, output, rows, mode, initial_state, late, side_outputs)
        if initial_state is not None:
            raise JobDefinitionError(f"operator {uid!r}: initial_state is for Spark's StatefulProcessor")
        if rows == "arrow":
            return self._arrow_process(uid, processor, output, mode, late, side_outputs)
        if not isinstance(processor, KeyedProcessor):
            raise JobDefinitionError(
                f"operator {uid!r}: process() takes an instance of a KeyedProcessor or of Spark's StatefulProcessor, "
                f"or with rows='arrow' an ArrowProcessor or a function, not {processor!r}"
            )
        if rows != "row":
            raise JobDefinitionError(f"operator {uid!r}: a KeyedProcessor gets rows='row', not rows={rows!r}")
        operator = ProcessOperator(
            uid,
            processor,
            self._columns,
            self._stream.schema,
            output,
            time_mode=mode,
            timer_service=self._timer_service,
            event_time=self._event_time(uid) if mode == "event" else None,
            late=_late(mode, late),
            side_outputs=side_outputs,
        )
        operator.check()
        return self._stateful(operator, tuple(self._stream.schema.names), operator.output_struct)

    def _spark_process(
        self,
        uid: str,
        processor: StatefulProcessor,
        output: StructType,
        rows: str,
        mode: TimeMode,
        initial_state: DataFrame | None,
        late: str | None,
        side_outputs: Mapping[str, str | StructType] | None,
    ) -> Stream:
        if late is not None or side_outputs:
            raise JobDefinitionError(f"operator {uid!r}: late= and side_outputs= are for a KeyedProcessor")
        if rows not in ("row", "pandas"):
            raise JobDefinitionError(f"operator {uid!r}: a StatefulProcessor gets rows='row' or 'pandas', not {rows!r}")
        if initial_state is not None:
            missing = [name for name in self._columns if name not in initial_state.columns]
            if initial_state.isStreaming or missing:
                raise JobDefinitionError(
                    f"operator {uid!r}: initial_state must be a batch DataFrame with the key columns "
                    f"{', '.join(self._columns)}"
                )
        from strandline.operators.spark.spark_operator import SparkProcessorOperator

        operator = SparkProcessorOperator(
            uid,
            processor,
            self._columns,
            self._stream.schema,
            output,
            rows="pandas" if rows == "pandas" else "row",
            time_mode=mode,
            timer_service=self._timer_service,
            event_time=self._event_time(uid) if mode == "event" else None,
            initial_schema=initial_state.schema if initial_state is not None else None,
            time_zone=self._stream._job.spark.conf.get("spark.sql.session.timeZone") or "UTC",
        )
        operator.check()
        return self._stateful(operator, tuple(self._stream.schema.names), operator.output_struct, initial_state)

    def _arrow_process(
        self,
        uid: str,
        processor: Any,
        output: StructType,
        mode: TimeMode,
        late: str | None,
        side_outputs: Mapping[str, str | StructType] | None,
    ) -> Stream:
        if mode != "none" or late is not None or side_outputs:
            raise JobDefinitionError(
                f"operator {uid!r}: with rows='arrow' there are no timers, late rows or side outputs; "
                "use a KeyedProcessor for those"
            )
        operator = ArrowProcessOperator(uid, processor, self._columns, self._stream.schema, output)
        operator.check()
        return self._stateful(operator, tuple(self._stream.schema.names), operator.output_struct)

    # --- vectorised steps --------------------------------------------------------------------------

    def aggregate(self, *, uid: str | None = None, **aggregates: Aggregate) -> Stream:
        """Running aggregates per key: for every batch, one row per key that changed, with the key and its values.

        `stream.key_by("user").aggregate(n=sl.count(), total=sl.sum("amount"))`
        """
        operator = AggregateOperator(self._uid(uid, "aggregate"), self._columns, self._stream.schema, aggregates)
        return self._stateful(operator, operator.needed_columns, operator.output_struct)

    def window(
        self,
        spec: WindowSpec,
        time: str | None = None,
        *,
        allowed_lateness: DurationLike = 0,
        emit: Literal["close", "update"] = "close",
        late: str = "drop",
    ) -> WindowedStream:
        """Windows of event time per key; `.aggregate(...)` says what is computed in each.

        `time` is the column to go by, by default the source's event time. A window is emitted once the watermark
        reaches its end, or with `emit="update"` whenever it changes. With `allowed_lateness` it is kept for that much
        longer, and emitted again for rows that still come. Rows later than that are dropped and counted, or sent to the
        side output that `late` names.
        """
        return WindowedStream(self, spec, time, _milliseconds(allowed_lateness, "allowed_lateness"), emit, late)

    def deduplicate(
        self,
        *,
        ttl: DurationLike | None = None,
        within: DurationLike | None = None,
        time: str | None = None,
        uid: str | None = None,
    ) -> Stream:
        """The first row of every key; later ones are dropped.

        A key is remembered for `ttl` of processing time, for ever by default. With `within`, for rows whose event time
        (`time`, by default the source's) is at most that much after the first one's: like Spark's
        `dropDuplicatesWithinWatermark`, with a bound of its own.
        """
        uid = self._uid(uid, "deduplicate")
        if ttl is not None and within is not None:
            raise JobDefinitionError(f"operator {uid!r}: ttl= is a time of the clock, within= of events; give one")
        if within is None and time is not None:
            raise JobDefinitionError(f"operator {uid!r}: time={time!r} needs within=, such as within='1h'")
        column = None if within is None else time or self._event_time(uid)
        period = ttl if within is None else within
        operator = DeduplicateOperator(
            uid,
            self._columns,
            self._stream.schema,
            None if period is None else _milliseconds(period, "ttl" if within is None else "within"),
            column,
        )
        return self._stateful(operator, tuple(self._stream.schema.names), operator.input_struct)

    def join(
        self,
        other: KeyedStream,
        how: JoinType = "inner",
        *,
        within: DurationLike | tuple[DurationLike, DurationLike] | None = None,
        left_time: str | None = None,
        right_time: str | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Pairs of a row of this stream and one of `other` with equal keys, within a time of each other.

        `within="10m"` joins rows at most ten minutes apart; `within=("0s", "1h")` a left row with right rows of the
        same time up to an hour later (a bound may be negative: "-5m"). Without it every row is kept for ever, and only
        inner joins are possible. Times are the sources' event times, or the columns `left_time` and `right_time`.
        A row without a partner comes out of a left, right or full join, with nulls for the other side, once the
        watermark says that none can come any more. Columns are those of the left side and then of the right; keys with
        the same name on both sides come once.
        """
        uid = self._uid(uid, "join")
        left, right = self._stream, other._stream
        if left._job is not right._job:
            raise JobDefinitionError(f"operator {uid!r}: streams of different jobs cannot be joined")
        bounds = _bounds(uid, within)
        if bounds is not None:
            left_time = left_time or self._event_time(uid)
            right_time = right_time or other._event_time(uid)
        operator = JoinOperator(
            uid, self._columns, other._columns, left.schema, right.schema, how, left_time, right_time, *(bounds or ())
        )
        sides = UnionNode(
            (
                TransformNode(left._node, _side(operator, LEFT)),
                TransformNode(right._node, _side(operator, RIGHT)),
            )
        )
        return self._stateful(operator, tuple(operator.input_struct.names), operator.output_struct, parent=sides)

    # --- inside ------------------------------------------------------------------------------------

    def _uid(self, given: str | None, kind: str) -> str:
        return self._stream._job._uid(given, kind)

    @property
    def _timer_service(self) -> Literal["heap", "rocksdb"]:
        return "rocksdb" if self._stream._job.config.timer_service == "rocksdb" else "heap"

    def _event_time(self, uid: str) -> str:
        """The stream's event time column; without one, a clear error."""
        column = event_time_column(self._stream.schema)
        if column is None:
            raise JobDefinitionError(
                f"operator {uid!r} works in event time, but its stream has no event time column"
                + (
                    "; name the column, for it is lost when a step or a transform makes a new one"
                    if self._stream._job._has_watermark
                    else ": give job.source(df, event_time='...', watermark_delay='...')"
                )
            )
        return column

    def _stateful(
        self,
        operator: Operator,
        columns: tuple[str, ...],
        output: StructType,
        initial: DataFrame | None = None,
        parent: Node | None = None,
    ) -> Stream:
        job = self._stream._job
        node = StatefulNode(parent or self._stream._node, operator, columns, output, initial)
        job._graph.operators.append(operator)
        return Stream(job, OutputNode(node, None) if operator.side_outputs else node)


class WindowedStream:
    """A keyed stream cut into windows of event time."""

    def __init__(
        self,
        keyed: KeyedStream,
        spec: WindowSpec,
        time: str | None,
        allowed_lateness_ms: int,
        emit: Literal["close", "update"],
        late: str,
    ) -> None:
        self._keyed = keyed
        self._spec = spec
        self._time = time
        self._allowed_lateness_ms = allowed_lateness_ms
        self._emit = emit
        self._late = late

    def aggregate(self, *, uid: str | None = None, **aggregates: Aggregate) -> Stream:
        """The aggregates of every window: the key columns, `window_start`, `window_end`, then the values."""
        keyed = self._keyed
        uid = keyed._uid(uid, "window")
        if not keyed._stream._job._has_watermark:
            raise JobDefinitionError(
                f"operator {uid!r}: windows close by a watermark, and no source has one: give "
                "job.source(df, event_time='...', watermark_delay='...')"
            )
        operator = WindowOperator(
            uid,
            keyed._columns,
            keyed._stream.schema,
            self._spec,
            self._time or keyed._event_time(uid),
            aggregates,
            self._allowed_lateness_ms,
            self._emit,
            self._late,
        )
        return keyed._stateful(operator, operator.needed_columns, operator.output_struct)


def _time_mode(uid: str, given: str) -> TimeMode:
    found = TIME_MODES.get(str(given).lower())
    if found is None:
        raise JobDefinitionError(f"operator {uid!r}: time_mode={given!r}; it must be none, processing or event")
    return found


def _late(mode: TimeMode, given: str | None) -> str | None:
    if given == "keep":
        return None
    return "drop" if given is None and mode == "event" else given


def _milliseconds(duration: DurationLike, what: str) -> int:
    try:
        return round(parse_duration(duration) * 1000)
    except ValueError as error:
        raise JobDefinitionError(f"{what}={duration!r} is no duration such as '10s' or '1h': {error}") from error


def _bounds(uid: str, within: DurationLike | tuple[DurationLike, DurationLike] | None) -> tuple[int, int] | None:
    if within is None:
        return None
    if not isinstance(within, tuple):
        span = _milliseconds(within, f"operator {uid!r}: within")
        return -span, span
    lower, upper = (_signed_milliseconds(uid, bound) for bound in within)
    return lower, upper


def _signed_milliseconds(uid: str, bound: DurationLike) -> int:
    if isinstance(bound, str) and bound.strip().startswith("-"):
        return -_milliseconds(bound.strip()[1:], f"operator {uid!r}: within")
    if not isinstance(bound, str) and (bound < timedelta() if isinstance(bound, timedelta) else bound < 0):
        return -_milliseconds(-bound, f"operator {uid!r}: within")
    return _milliseconds(bound, f"operator {uid!r}: within")


def _side(operator: JoinOperator, side: int) -> Transformation:
    """One side of a join as the operator takes it."""

    def project(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        columns = [F.lit(side).cast("byte").alias(SIDE_COLUMN)]
        for column in operator.input_columns:
            source = column.left if side == LEFT else column.right
            value = F.lit(None) if source is None else F.col(f"`{source}`")
            columns.append(value.cast(column.data_type).alias(column.name))
        return frame.select(*columns)

    return project


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
