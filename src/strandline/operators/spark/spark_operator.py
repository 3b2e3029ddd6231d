"""The operator that runs Spark's own `StatefulProcessor` classes, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Final, Literal, get_args

import pyarrow as pa
from pyspark import cloudpickle  # private Spark API: see design note 009
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from strandline.errors import JobDefinitionError, StrandlineError
from strandline.operators.base import TIME_MODES, BatchInfo, Output, SubtaskInfo, TimeMode
from strandline.operators.columns.row_reader import row_factory
from strandline.operators.process.key_chunks import Key, KeyChunkReader, KeyChunks
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.process.output_rows import Writer
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.process.process_operator import ProcessOperator, ProcessorMethods
from strandline.operators.process.process_subtask import ProcessSubtask
from strandline.operators.spark.errors import SparkCallError
from strandline.operators.spark.frames import FrameReader, FrameWriter, pandas_key
from strandline.operators.spark.handle import SparkHandle
from strandline.operators.spark.rows import SparkRowReader, SparkRowWriter
from strandline.operators.spark.values import giver
from strandline.operators.user_code import NOT_BY_USER_CODE, call_failed
from strandline.pyspark_releases import PandasSettings
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import state_prefix
from strandline.state.handles.timers import Timers, TimerService

SparkRows = Literal["row", "pandas"]
DEFAULT_SETTINGS: Final = PandasSettings()


class SparkProcessorOperator(ProcessOperator):
    """Runs a `StatefulProcessor` as Spark does.

    `rows` says which of Spark's interfaces the processor is written for: "row" is that of `transformWithState`,
    "pandas" that of `transformWithStateInPandas`. As in Spark, every batch has its own processor: a new copy is
    initialised, gets the rows and the due timers, and is closed. `time_mode` may be spelled as in Spark. User code gets
    timestamps in the session's time zone, which `settings` has.
    """

    kind = "spark"
    methods: ClassVar = ProcessorMethods(
        "init", "handleInputRows", "handleExpiredTimer", "timeMode='EventTime'", "eventTimeColumnName"
    )

    def __init__(
        self,
        uid: str,
        processor: StatefulProcessor,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
        *,
        rows: SparkRows,
        time_mode: str = "none",
        timer_service: TimerService = "heap",
        event_time: str | None = None,
        late: str = "drop",
        output_time: str | None = None,
        output_delay_ms: int = 0,
        initial_schema: StructType | None = None,
        settings: PandasSettings = DEFAULT_SETTINGS,
        limits: ProcessLimits = DEFAULT_LIMITS,
    ) -> None:
        mode = TIME_MODES.get(str(time_mode).lower())
        if mode is None:
            raise JobDefinitionError(
                f"operator {uid!r}: time_mode={time_mode!r} is not valid; use 'none', 'processing' or 'event'"
            )
        if rows not in get_args(SparkRows):
            raise JobDefinitionError(f"operator {uid!r}: rows={rows!r} is not valid; use 'row' or 'pandas'")
        self.rows = rows
        self.settings = settings
        self.initial_struct = initial_schema
        super().__init__(
            uid,
            _Adapter(processor, rows, mode, key_columns, input_schema, settings.time_zone),
            key_columns,
            input_schema,
            output_schema,
            time_mode=mode,
            timer_service=timer_service,
            event_time=event_time,
            late=late,
            output_time=output_time,
            output_delay_ms=output_delay_ms,
            limits=limits,
        )

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Call user code once for every key of the batch, then for every due timer."""
        return super().run(rows, changes, self._as_in_spark(batch))

    def run_initial(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Pass the initial state to the processor, key by key; called once, before the first batch of a new job.

        `rows` have the columns of `initial_schema` and `KEY_GROUP_COLUMN`; the rows of a key are next to each other.
        As in Spark, there is no output: the returned iterator is empty, and all work is done before the call returns.
        The first batch goes on with the processor that got the initial state, so its attributes are still there. They
        are lost if the slot is replaced in between.
        `batch` may be a batch of its own, or the first batch of the job, with the same change set.
        """
        running = self._subtask
        if not isinstance(running, _SparkSubtask):
            raise StrandlineError(f"operator {self.uid!r} was run before it was opened")
        if self.initial_struct is None:
            raise StrandlineError(
                f"operator {self.uid!r} was given initial rows, but no initial_schema; pass initial_schema="
            )
        running.run_initial(rows, changes, self._as_in_spark(batch), self.initial_struct)
        return iter(())

    def _as_in_spark(self, batch: BatchInfo) -> BatchInfo:
        """The batch with Spark's watermark, which is 0 before the first row."""
        if self.time_mode != "event":
            return batch
        return replace(
            batch,
            watermark_ms=max(batch.watermark_ms or 0, 0),
            late_watermark_ms=max(batch.late_watermark_ms or 0, 0),
        )

    def _check_arguments(self) -> None:
        super()._check_arguments()
        where, initial = f"operator {self.uid!r}", self.initial_struct
        if initial is None:
            return
        types = {field.name: field.dataType for field in initial.fields}
        for name in self.key_columns:
            if types.get(name) != self.input_struct[name].dataType:
                raise JobDefinitionError(
                    f"{where}: the initial state must have the key column {name!r} of type "
                    f"{self.input_struct[name].dataType.simpleString()}; its columns are {initial.simpleString()}"
                )

    def _make_subtask(self, info: SubtaskInfo) -> ProcessSubtask:
        return _SparkSubtask(self, info)

    def _processor_name(self) -> str:
        assert isinstance(self.processor, _Adapter)
        return type(self.processor.original).__name__

    def _deleted_by(self, processor: KeyedProcessor) -> frozenset[str]:
        assert isinstance(processor, _Adapter)
        return frozenset(processor.handle.deleted)


class _Adapter(KeyedProcessor):
    """Makes a `StatefulProcessor` look like a `KeyedProcessor`."""

    def __init__(
        self,
        original: StatefulProcessor,
        rows: SparkRows,
        time_mode: TimeMode,
        key_columns: Sequence[str],
        struct: StructType,
        time_zone: str,
    ) -> None:
        self.original = original
        self._rows = rows
        self._time_mode = time_mode
        self._key_columns = tuple(key_columns)
        self._struct = struct
        self._time_zone = time_zone

    def open(self, context: ProcessContext) -> None:
        """Find the states that `init` declares. As in Spark's driver, a copy is initialised and closed again."""
        self._pickled: bytes = cloudpickle.dumps(self.original)  # type: ignore[no-untyped-call]  # PySpark's own
        self.handle = SparkHandle(context, self._time_mode)
        context._scope.error_class = SparkCallError
        key = StructType([self._struct[name] for name in self._key_columns])
        self._key_row, self._key_values = row_factory(key), giver(key)
        self._given_key = (
            pandas_key(self._struct, self._key_columns, self._time_zone) if self._rows == "pandas" else None
        )
        self._times = TimerValues()
        self._primed: StatefulProcessor | None = None
        self._primed_for: int | None = None
        self._new()
        self.current.close()

    def begin(self, batch: BatchInfo) -> bool:
        """Make the processor of a batch; returns whether it is a new one.

        The first batch after the initial state goes on with the processor that got it, as in Spark. A batch may be
        run again, so each run works with a copy.
        """
        self._tell_time(batch)
        if self._primed is not None and self._primed_for in (None, batch.batch_id):
            self._primed_for = batch.batch_id
            self._use(self._copy_of_primed(self._primed))
            return False
        self._primed = None
        self._new()
        return True

    def begin_initial(self, batch: BatchInfo) -> None:
        """Make the processor that gets the initial state, and that the first batch goes on with."""
        self._tell_time(batch)
        self._primed_for = None
        self._new()
        self._primed = self.current

    def _tell_time(self, batch: BatchInfo) -> None:
        if self._time_mode != "none":
            self._times = TimerValues(batch.processing_time_ms, batch.watermark_ms or 0)

    def _new(self) -> None:
        self._use(cloudpickle.loads(self._pickled))
        self.handle.initialise(self.current.init)

    def _use(self, processor: StatefulProcessor) -> None:
        self.current = processor
        self._handle_rows = processor.handleInputRows

    def _copy_of_primed(self, primed: StatefulProcessor) -> StatefulProcessor:
        """A copy that works on the same state; if user code cannot be copied, the processor itself."""
        try:
            return copy.deepcopy(primed)
        except Exception:  # noqa: BLE001  # user code may hold anything, such as a connection
            self._primed = None
            return primed

    def process(self, key: Key, rows: Iterator[Any], context: ProcessContext) -> Iterable[Any] | None:
        """Call `handleInputRows` with the rows of one key."""
        if self._given_key is not None:
            key = self._given_key(key)
        made: Iterable[Any] | None = self._handle_rows(key, rows, self._times)
        return made

    def on_timer(self, key: Key, timestamp: int, context: ProcessContext) -> Iterable[Any] | None:
        """Call `handleExpiredTimer`. As in Spark, its key is a row, with timestamps in the form that states return."""
        row = self._key_row(key if self._key_values is None else self._key_values(key))
        # The arguments are passed by name, as in Spark: some processors declare the last two in the other order.
        return self.current.handleExpiredTimer(
            key=row, timerValues=self._times, expiredTimerInfo=ExpiredTimerInfo(timestamp)
        )

    def on_initial(self, key: Key, item: Any) -> None:
        """Call `handleInitialState` with one row, or one frame, of the initial state."""
        if self._given_key is not None:
            key = self._given_key(key)
        self.current.handleInitialState(key, item, self._times)


class _SparkSubtask(ProcessSubtask):
    """The part of a `SparkProcessorOperator` that exists in a slot only; every batch has its own processor."""

    _fires_deleted = True
    _error_class = "[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] "

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        yield from super().run(rows, changes, batch)
        self._call(batch, "close")

    def run_initial(
        self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo, struct: StructType
    ) -> None:
        # The entries of a list are ordered by batch id. Those of the initial state come before the first batch.
        batch = replace(batch, batch_id=max(batch.batch_id - 1, 0))
        scope, adapter = self._scope, self._adapter()
        reader = self._make_reader(struct, self.info.where)
        chunks = KeyChunks(reader, rows)
        self._begin(changes, batch, initial=True)
        try:
            while (chunk := chunks.next()) is not None:
                reader.adapt(scope.load(chunk.keys, chunk.values) + chunk.size)
                for at, (key, count) in enumerate(zip(chunk.values, chunk.counts, strict=True)):
                    scope.index = at
                    try:
                        for item in islice(chunk.rows, count):
                            adapter.on_initial(key, item)
                    except NOT_BY_USER_CODE:
                        raise
                    except BaseException as error:  # noqa: BLE001  # user code may raise anything
                        raise self._explained(error, chunks.error, key, batch, "handleInitialState") from None
                    scope.flush()
            if self._timers is not None:
                self._operator.next_timer_ms = self._timers.earliest()
                self._timers.forget()
        finally:
            self.context._batch = None
            scope.end()

    def _begin(self, changes: ChangeSet, batch: BatchInfo, initial: bool = False) -> None:
        super()._begin(changes, batch)
        if not self._call(batch, "initial" if initial else "init"):
            return
        for name in self._adapter().handle.deleted:
            for group in self._groups:
                stored = [key for key, _ in changes.scan(state_prefix(group, name))]
                changes.put_many(stored, [None] * len(stored))

    def _due(self, timers: Timers, until: int) -> Iterator[tuple[bytes, bytes | None]]:
        """The due timers, listed before the first one fires: as in Spark, a timer cannot stop another of its batch."""
        found = list(timers.due(until))
        return zip([timer for timer, _ in found], timers.encoded_keys(found), strict=True)

    def _call(self, batch: BatchInfo, method: Literal["init", "initial", "close"]) -> bool:
        """Begin or end a batch; returns whether `init` was called."""
        adapter = self._adapter()
        try:
            match method:
                case "init":
                    return adapter.begin(batch)
                case "initial":
                    adapter.begin_initial(batch)
                    return True
                case "close":
                    adapter.current.close()
                    return False
        except (StrandlineError, *NOT_BY_USER_CODE):
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            where = f"{self.info.where}, batch {batch.batch_id}"
            name = "close" if method == "close" else "init"
            raise call_failed(where, f"{name}()", error) from None

    def _adapter(self) -> _Adapter:
        adapter = self._operator.processor
        assert isinstance(adapter, _Adapter)
        return adapter

    def _make_reader(self, struct: StructType, place: str) -> KeyChunkReader:
        operator = self._spark_operator()
        if operator.rows == "row":
            zone = operator.settings.time_zone
            return SparkRowReader(struct, operator.key_columns, zone, place, operator.limits)
        return FrameReader(struct, operator.key_columns, operator.settings, place, operator.limits)

    def _make_writer(self, place: str) -> Writer:
        operator = self._spark_operator()
        if operator.rows == "row":
            return SparkRowWriter(operator.output_struct, place)
        return FrameWriter(operator.output_struct, operator.settings, place)

    def _spark_operator(self) -> SparkProcessorOperator:
        assert isinstance(self._operator, SparkProcessorOperator)
        return self._operator
