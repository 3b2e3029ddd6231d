"""A keyed stream: every step that keeps state per key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NoReturn

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from strandline.config.option import DurationLike
from strandline.errors import JobDefinitionError
from strandline.job.arguments import (
    read_bounds,
    read_milliseconds,
    read_schema,
    read_spark_time_mode,
    read_time_mode,
)
from strandline.job.join_sides import union_of_sides
from strandline.job.spark_words import no_such_attribute
from strandline.job.stream import NO_WATERMARK, Stream
from strandline.job.windowed_stream import WindowedStream
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.base import Operator, TimeMode
from strandline.operators.columns.time_columns import with_time_columns
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.plan import JoinType
from strandline.operators.process.arrow_operator import ArrowProcessOperator
from strandline.operators.process.arrow_processor import ArrowFunction, ArrowProcessor
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.windows.specs import WindowSpec
from strandline.pyspark_releases import PandasSettings
from strandline.runtime.driver.nodes import OutputNode, StatefulNode, has_watermark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.types import StructType


class KeyedStream:
    """A stream whose rows are grouped by key; `Stream.key_by` returns one.

    Every method adds a stateful step to the job and returns the stream of its rows. `uid` names the step in
    checkpoints: a changed job finds the state of a step by its `uid`. Without `uid`, the kind of the step and its place
    in the job make the name. A method raises `JobDefinitionError` if the step cannot run.
    """

    def __init__(self, stream: Stream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._columns = columns

    if not TYPE_CHECKING:  # a type checker should find such names itself

        def __getattr__(self, name: str) -> NoReturn:
            raise no_such_attribute("KeyedStream", name, keyed=True)

    # --- user code ---------------------------------------------------------------------------------

    def process(
        self,
        processor: KeyedProcessor | StatefulProcessor | ArrowProcessor | ArrowFunction,
        schema: str | StructType,
        *,
        uid: str | None = None,
        rows: Literal["row", "pandas", "arrow"] = "row",
        time_mode: str = "none",
        time: str | None = None,
        initial_state: GroupedData | DataFrame | None = None,
        late: str = "drop",
        side_outputs: Mapping[str, str | StructType] | None = None,
        output_time: str | None = None,
        output_delay: DurationLike = 0,
    ) -> Stream:
        """Runs a `KeyedProcessor` on the rows of every key, and returns the rows that it yields.

        `process` also takes the two other kinds of user code. A `StatefulProcessor` of Spark's, with `rows="row"` or
        `rows="pandas"` and with `initial_state`, goes to `transform_with_state`. With `rows="arrow"`, an
        `ArrowProcessor` or a function of a table and a context goes to `process_arrow`.

        Args:
            processor: An instance, not a class. It is pickled, and each subtask gets a copy.
            schema: The columns of the rows that the processor yields, as DDL text or `StructType`.
            uid: The name of the step in checkpoints.
            rows: The form in which the processor gets its rows; for a `KeyedProcessor`, always `"row"`.
            time_mode: The clock of the timers: `"processing"` or `"event"` time, or `"none"`.
            time: The timestamp column that is the event time of a row; by default the event time of the stream.
            initial_state: The state to begin with, for a `StatefulProcessor` only: a batch DataFrame with the key
                columns, or that DataFrame grouped by them.
            late: What happens in event time to rows that the watermark has passed. `"drop"` drops and counts them.
                `"keep"` hands them to the processor. Any other name sends them to the side output of that name.
            side_outputs: The schemas of the side outputs that the processor emits to, by name. `Stream.side` gives
                their rows.
            output_time: The timestamp column of `schema` that is the event time for the next step.
            output_delay: How far rows that the processor yields may be behind the watermark. A row that is further
                behind ends the job with `UserCodeError`: the next step would drop it as late.

        Raises:
            JobDefinitionError: An argument does not fit the kind of the processor, or `processor.open` fails.
        """
        self._refuse_class(uid, processor)
        if isinstance(processor, StatefulProcessor):
            if side_outputs:
                self._refuse(uid, "side_outputs= is for a KeyedProcessor")
            if rows == "arrow":
                self._refuse(uid, "a StatefulProcessor gets rows='row' or 'pandas', not 'arrow'")
            read_time_mode(self._uid(uid, "process"), time_mode)
            return self.transform_with_state(
                processor,
                schema,
                timeMode=time_mode,
                initialState=initial_state,
                eventTimeColumnName=output_time or "",
                rows=rows,
                time=time,
                late=late,
                output_delay=output_delay,
                uid=uid,
            )
        if initial_state is not None:
            self._refuse(uid, "initial_state is for Spark's StatefulProcessor")
        if rows == "arrow":
            step = self._uid(uid, "process")
            timed = read_time_mode(step, time_mode) != "none" or time is not None or output_time is not None
            delay_ms = read_milliseconds(output_delay, f"operator {step!r}: output_delay")
            if timed or delay_ms or late != "drop" or side_outputs:
                self._refuse(
                    uid,
                    "with rows='arrow' there are no timers, event times, late rows or side outputs; use a "
                    "KeyedProcessor for those",
                )
            # `process_arrow` refuses whatever is neither an ArrowProcessor nor a function.
            return self.process_arrow(processor, schema, uid=uid)  # type: ignore[arg-type]
        if isinstance(processor, ArrowProcessor):
            self._refuse(uid, "process() was given an ArrowProcessor; call process_arrow()")
        if not isinstance(processor, KeyedProcessor):
            self._refuse(
                uid,
                "process() takes an instance of a KeyedProcessor or of Spark's StatefulProcessor, "
                f"or with rows='arrow' an ArrowProcessor or a function, not {processor!r}",
            )
        self._refuse_without_process(uid, processor, KeyedProcessor, "process(self, key, rows, context)")
        if rows != "row":
            self._refuse(uid, f"a KeyedProcessor gets rows='row', not rows={rows!r}")
        uid = self._uid(uid, "process")
        mode = read_time_mode(uid, time_mode)
        operator = ProcessOperator(
            uid,
            processor,
            self._columns,
            self._stream.schema,
            read_schema(uid, schema),
            time_mode=mode,
            timer_service=self._timer_service,
            event_time=self._clock(uid, mode, time),
            late=late,
            side_outputs=side_outputs,
            output_time=output_time,
            output_delay_ms=read_milliseconds(output_delay, f"operator {uid!r}: output_delay"),
        )
        operator.declared_states = tuple(operator.check())
        columns = tuple(self._stream.schema.names)
        return self._stateful(operator, columns, operator.output_struct, time=operator.event_time)

    def process_arrow(
        self, processor: ArrowProcessor | ArrowFunction, schema: str | StructType, *, uid: str | None = None
    ) -> Stream:
        """Runs an `ArrowProcessor` on tables with the rows of many keys, and returns the rows of its tables.

        Args:
            processor: An instance of an `ArrowProcessor`, or a function of a table and an `ArrowContext`. It is
                pickled, and each subtask gets a copy.
            schema: The columns of the tables that the processor returns or yields, as DDL text or `StructType`.
            uid: The name of the step in checkpoints.

        Raises:
            JobDefinitionError: `processor` is of another kind, or `processor.open` fails.
        """
        self._refuse_class(uid, processor)
        if isinstance(processor, KeyedProcessor):
            self._refuse(uid, "process_arrow() was given a KeyedProcessor; call process()")
        if isinstance(processor, StatefulProcessor):
            self._refuse(uid, "process_arrow() was given a StatefulProcessor of Spark's; call transform_with_state()")
        self._refuse_without_process(uid, processor, ArrowProcessor, "process(self, table, context)")
        uid = self._uid(uid, "process")
        operator = ArrowProcessOperator(uid, processor, self._columns, self._stream.schema, read_schema(uid, schema))
        operator.declared_states = tuple(operator.check())
        return self._stateful(operator, tuple(self._stream.schema.names), operator.output_struct)

    def transform_with_state(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: str | StructType,
        outputMode: str = "Update",
        timeMode: str = "None",
        initialState: GroupedData | DataFrame | None = None,
        eventTimeColumnName: str = "",
        *,
        rows: Literal["row", "pandas"] = "row",
        time: str | None = None,
        late: str = "drop",
        output_delay: DurationLike = 0,
        uid: str | None = None,
    ) -> Stream:
        """Runs a `StatefulProcessor` as it is written for Spark, and returns the rows that it yields.

        The parameters have the names and the order of PySpark's `GroupedData.transformWithState`.

        Args:
            statefulProcessor: An instance. As in Spark, every batch works with a fresh copy of it.
            outputStructType: The columns of the rows that the processor yields.
            outputMode: `"Append"` or `"Update"`. The stream is the same with both: every row that the processor yields.
            timeMode: The clock of the timers and of the time to live: `"ProcessingTime"`, `"EventTime"` or `"None"`.
            initialState: A batch DataFrame with the key columns, or that DataFrame grouped by them. The processor gets
                its rows once, before the first batch of a fresh job.
            eventTimeColumnName: The timestamp column of the output that is the event time for the next step. As in
                Spark, a row whose time is not after the watermark of the batch before is an error. It needs
                `timeMode="EventTime"`.
            rows: The flavour of the processor: `"row"` for one that is written for `transformWithState`, `"pandas"` for
                `transformWithStateInPandas`.
            time: The timestamp column that is the event time of a row; by default the event time of the stream.
            late: `"drop"` drops and counts rows that the watermark has passed, as Spark does. `"keep"` hands them to
                the processor. Any other name sends them to the side output of that name.
            output_delay: How far rows that the processor yields may be behind the watermark.
            uid: The name of the step in checkpoints.

        Raises:
            JobDefinitionError: An argument does not fit, or `statefulProcessor.init` fails.
        """
        self._check_spark_processor(uid, statefulProcessor)
        if rows not in ("row", "pandas"):
            self._refuse(uid, f"a StatefulProcessor gets rows='row' or 'pandas', not {rows!r}")
        if str(outputMode).lower() not in ("append", "update"):
            self._refuse(uid, f"outputMode={outputMode!r} is not supported; use 'Append' or 'Update'")
        from strandline.operators.spark.spark_operator import SparkProcessorOperator

        uid = self._uid(uid, "process")
        mode = read_spark_time_mode(uid, timeMode)
        initial = self._initial_rows(uid, initialState)
        conf = self._stream._job.spark.conf
        operator = SparkProcessorOperator(
            uid,
            statefulProcessor,
            self._columns,
            self._stream.schema,
            read_schema(uid, outputStructType),
            rows=rows,
            time_mode=mode,
            timer_service=self._timer_service,
            event_time=self._clock(uid, mode, time),
            late=late,
            output_time=eventTimeColumnName or None,
            output_delay_ms=read_milliseconds(output_delay, f"operator {uid!r}: output_delay"),
            initial_schema=initial.schema if initial is not None else None,
            settings=PandasSettings.of(conf.get, conf.get("spark.sql.session.timeZone") or "UTC"),
        )
        operator.declared_states = tuple(operator.check())
        columns = tuple(self._stream.schema.names)
        return self._stateful(operator, columns, operator.output_struct, initial, time=operator.event_time)

    def _check_spark_processor(self, uid: str | None, given: object) -> None:
        self._refuse_class(uid, given)
        if isinstance(given, KeyedProcessor):
            self._refuse(uid, "transform_with_state() was given a KeyedProcessor; call process()")
        if isinstance(given, ArrowProcessor):
            self._refuse(uid, "transform_with_state() was given an ArrowProcessor; call process_arrow()")
        if not isinstance(given, StatefulProcessor):
            self._refuse(uid, f"transform_with_state() takes an instance of Spark's StatefulProcessor, not {given!r}")

    def _refuse_class(self, uid: str | None, given: object) -> None:
        if isinstance(given, type):
            name = given.__name__
            self._refuse(uid, f"{name} is a class; pass an instance of it, for example {name}()")

    def _refuse_without_process(
        self, uid: str | None, given: object, base: type[KeyedProcessor | ArrowProcessor], signature: str
    ) -> None:
        if isinstance(given, base) and getattr(given.process, "__func__", None) is base.process:
            self._refuse(uid, f"{type(given).__name__} has no process() method; write def {signature}")

    def _initial_rows(self, uid: str, given: GroupedData | DataFrame | None) -> DataFrame | None:
        from pyspark.sql import DataFrame, GroupedData

        if given is None:
            return None
        keys = ", ".join(self._columns)
        frame: object = given
        if isinstance(given, GroupedData):
            # `count()` shows the grouping columns. PySpark has no public way to the DataFrame that was grouped.
            if tuple(given.count().columns[:-1]) != self._columns:
                self._refuse(uid, f"initialState must be grouped by the key columns {keys}")
            frame = given._df
        if not isinstance(frame, DataFrame) or frame.isStreaming or not set(self._columns) <= set(frame.columns):
            self._refuse(uid, f"initial_state must be a batch DataFrame with the key columns {keys}")
        return frame

    # --- vectorised steps --------------------------------------------------------------------------

    def aggregate(self, *, uid: str | None = None, **aggregates: Aggregate) -> Stream:
        """Returns running aggregates per key: after every batch one row for each key that changed.

        A row has the key columns, then the values under the names of the keywords:
        `stream.key_by("user").aggregate(n=sl.count(), total=sl.sum("amount"))`.

        Raises `JobDefinitionError` if there is no aggregate, or if one does not fit the type of its column.
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
        """Cuts the rows of every key into windows of event time; `.aggregate(...)` says what each window computes.

        Args:
            spec: `sl.tumbling(...)`, `sl.sliding(...)` or `sl.session(...)`.
            time: The timestamp column that places a row; by default the event time of the stream.
            allowed_lateness: How long a window is kept after the watermark reaches its end. Rows that come in that
                time make the window come out again.
            emit: `"close"` emits a window once, when the watermark reaches its end. `"update"` emits it after every
                batch that changes it.
            late: `"drop"` drops and counts rows that come after the allowed lateness. Any other name sends them to
                the side output of that name.

        Raises:
            JobDefinitionError: `allowed_lateness` is no duration. `.aggregate(...)` checks the other arguments.
        """
        return WindowedStream(self, spec, time, read_milliseconds(allowed_lateness, "allowed_lateness"), emit, late)

    def deduplicate(
        self,
        *,
        ttl: DurationLike | None = None,
        within: DurationLike | None = None,
        time: str | None = None,
        late: str = "drop",
        uid: str | None = None,
    ) -> Stream:
        """Returns the first row of every key, and drops later ones.

        Args:
            ttl: How long a key is remembered, in processing time; for ever by default.
            within: How much later than the first row, in event time, another row of the key counts as a duplicate. This
                is Spark's `dropDuplicatesWithinWatermark` with a bound of its own.
            time: The timestamp column for `within`; by default the event time of the stream.
            late: What happens with `within` to rows that the watermark has passed, and to rows without a time.
                `"drop"` drops and counts them. Any other name sends them to the side output of that name.
            uid: The name of the step in checkpoints.

        Raises:
            JobDefinitionError: Both `ttl` and `within` are given, or the stream has no event time for `within`.
        """
        uid = self._uid(uid, "deduplicate")
        if ttl is not None and within is not None:
            raise JobDefinitionError(f"operator {uid!r}: ttl= is a time of the clock, within= of events; give one")
        if within is None and time is not None:
            raise JobDefinitionError(f"operator {uid!r}: time={time!r} needs within=, such as within='1h'")
        column = None if within is None else self._stream._time_column(time, f"operator {uid!r}")
        keyword, period = ("ttl", ttl) if within is None else ("within", within)
        period_ms = None if period is None else read_milliseconds(period, f"operator {uid!r}: {keyword}")
        operator = DeduplicateOperator(uid, self._columns, self._stream.schema, period_ms, column, late=late)
        return self._stateful(operator, tuple(self._stream.schema.names), operator.input_struct, time=column)

    def join(
        self,
        other: KeyedStream,
        how: JoinType = "inner",
        *,
        within: DurationLike | tuple[DurationLike, DurationLike] | None = None,
        left_time: str | None = None,
        right_time: str | None = None,
        late: str = "drop",
        uid: str | None = None,
    ) -> Stream:
        """Returns pairs of a row of this stream (left) and a row of `other` (right) with equal keys.

        The columns are those of the left side, then those of the right side. Key columns that have the same name on
        both sides come once.

        Args:
            other: The right side, keyed by as many columns of the same types.
            how: `"inner"`, `"left"`, `"right"` or `"full"`. An outer join emits a row without a partner, with nulls for
                the other side, once the watermark says that no partner can come any more.
            within: How far apart in time the rows of a pair may be. `"10m"` joins rows at most ten minutes apart.
                `("0s", "1h")` joins a left row with right rows of the same time up to one hour later. A bound may be
                negative: `"-5m"`. Without `within` every row is kept for ever, and only inner joins are possible.
            left_time: The timestamp column of the left side; by default the event time of the stream.
            right_time: The timestamp column of the right side; by default the event time of the stream.
            late: What happens with `within` to rows that the watermark has passed. `"drop"` drops and counts them. Any
                other name sends them to two side outputs with the columns of their side: `late="late"` to
                `.side("late_left")` and `.side("late_right")`.
            uid: The name of the step in checkpoints.

        Raises:
            JobDefinitionError: The keys do not match, the streams belong to different jobs, or a time is missing.
        """
        uid = self._uid(uid, "join")
        left, right = self._stream, other._stream
        if left._job is not right._job:
            raise JobDefinitionError(f"operator {uid!r}: streams of different jobs cannot be joined")
        bounds = read_bounds(uid, within)
        if bounds is not None:
            left_time = left._time_column(left_time, f"operator {uid!r}", "left_time")
            right_time = right._time_column(right_time, f"operator {uid!r}", "right_time")
        lower_ms, upper_ms = bounds or (None, None)
        operator = JoinOperator(
            *(uid, self._columns, other._columns, left.schema, right.schema, how),
            *(left_time, right_time, lower_ms, upper_ms),
            late=late,
        )
        node = StatefulNode(
            union_of_sides(operator, left._node, right._node),
            operator,
            tuple(operator.input_struct.names),
            self._output(operator, operator.output_struct),
            (left._reads(left_time), right._reads(right_time)),
        )
        return self._added(node)

    # --- inside ------------------------------------------------------------------------------------

    def _uid(self, given: str | None, kind: str) -> str:
        return self._stream._job._uid(given, kind)

    def _clock(self, uid: str, mode: TimeMode, time: str | None) -> str | None:
        """The event time column of a processor; None if its clock is not event time."""
        if mode == "event":
            return self._stream._time_column(time, f"operator {uid!r}")
        if time is not None:
            raise JobDefinitionError(f"operator {uid!r}: time={time!r} needs time_mode='event'")
        return None

    def _refuse(self, uid: str | None, problem: str) -> NoReturn:
        raise JobDefinitionError(f"operator {self._uid(uid, 'process')!r}: {problem}")

    @property
    def _timer_service(self) -> Literal["heap", "rocksdb"]:
        return "rocksdb" if self._stream._job.config.timer_service == "rocksdb" else "heap"

    def _stateful(
        self,
        operator: Operator,
        columns: tuple[str, ...],
        output: StructType,
        initial: DataFrame | None = None,
        time: str | None = None,
    ) -> Stream:
        """Adds a step that reads this stream; `time` is the event time column that the step reads, if it reads one."""
        reads = (self._stream._reads(time),)
        return self._added(
            StatefulNode(self._stream._node, operator, columns, self._output(operator, output), reads, initial)
        )

    def _output(self, operator: Operator, output: StructType) -> StructType:
        return with_time_columns(output, operator.time_columns, operator.default_time, operator.unfit_times)

    def _added(self, node: StatefulNode) -> Stream:
        job, operator = self._stream._job, node.operator
        if operator.time_mode == "event" and not has_watermark(node):
            raise JobDefinitionError(f"operator {operator.uid!r} works in event time, but {NO_WATERMARK}")
        job._graph.operators.append(operator)
        return Stream(job, OutputNode(node, None) if operator.side_outputs else node)
