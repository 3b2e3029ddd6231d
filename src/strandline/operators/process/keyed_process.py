"""Per-key user code: a `KeyedProcessor` and the operator that runs it, each key once a batch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Final, NamedTuple, get_args

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import (
    KEY_GROUP_COLUMN,
    BatchInfo,
    Operator,
    Output,
    SideRows,
    SubtaskInfo,
    TimeMode,
)
from strandline.operators.columns.rows import RowWriter, arrow_schema, fitted
from strandline.operators.process import output as process_output
from strandline.operators.process.context import ProcessContext
from strandline.operators.process.key_chunks import Key, KeyChunkReader, KeyChunks, KeyCodec
from strandline.operators.process.output import OutputRows, SideOutputs, Writer
from strandline.operators.timed.late_rows import check_event_time, without_late
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import KeyEncoder, key_group_range
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import KeyScope
from strandline.state.handles.timers import TIMERS, Timers, TimerService, keys_of, time_of
from strandline.state.handles.ttl import DEFAULT_SWEEP, Sweep, SweepBudget

__all__ = ["KeyedProcessor", "ProcessContext", "ProcessOperator", "user_traceback"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class KeyedProcessor:
    """Base class of per-key user code; one instance per subtask, kept for the whole run."""

    def open(self, context: ProcessContext) -> None:
        """Called once per subtask; declare states here."""

    def process(self, key: Key, rows: Iterator[Any], context: ProcessContext) -> Iterable[Any] | None:
        """Called once per key and batch with all rows of that key; yield or return output rows, or nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no process() method")

    def on_timer(self, key: Key, timestamp: int, context: ProcessContext) -> Iterable[Any] | None:
        """Called when a timer of the key is due, after the rows of the batch and in the order of time.

        It may do all that `process` may; the timer is gone after the call.
        """
        return None

    def close(self) -> None:
        """Called when the subtask ends in an orderly way."""


class ProcessorMethods(NamedTuple):
    """The names of the methods that user code has."""

    open: str
    rows: str
    timer: str


class ProcessOperator(Operator):
    """Runs a `KeyedProcessor`: groups rows by key, reads the value states of many keys at once, checks the output.

    `time_mode` is the clock of its timers, `timer_service` how those that are due are found: by an index in memory
    ("heap"), or by a scan of the stored ones ("rocksdb"). `late` says what becomes of rows whose `event_time` the
    watermark had passed before the batch: "drop", or the name of a side output, which has the input's schema unless
    `side_outputs` gives it some of the input's columns; None hands them to `process` like any other.
    """

    sorted_input = True
    methods: ClassVar = ProcessorMethods("open", "process", "on_timer")
    """What the user's methods are called, for errors."""

    def __init__(
        self,
        uid: str,
        processor: KeyedProcessor,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
        *,
        time_mode: TimeMode = "none",
        timer_service: TimerService = "heap",
        event_time: str | None = None,
        late: str | None = None,
        side_outputs: Mapping[str, str | StructType] | None = None,
        sweep_budget: SweepBudget = DEFAULT_SWEEP,
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.processor = processor
        self.input_struct = input_schema
        self.output_struct = output_schema
        self.input_schema = arrow_schema(input_schema)
        self.output_schema = arrow_schema(output_schema)
        self.time_mode = time_mode
        self.timer_service = timer_service
        self.event_time = event_time
        self.late = late
        self.sweep_budget = sweep_budget
        self.side_outputs = {name: parse_schema(schema) for name, schema in (side_outputs or {}).items()}
        if late not in (None, "drop"):
            self.side_outputs.setdefault(str(late), input_schema)
        self._running: Running | None = None
        self._check_arguments()

    def check(self) -> list[StateDescriptor]:
        """Find in the driver what `open` declares, and what is wrong with it, before anything runs.

        A copy of the processor is opened, made as the slots get theirs, and thrown away unclosed; `context.subtask` is
        -1 there. Raises `JobDefinitionError` for wrong names, schemas and durations, and for a processor that cannot
        be copied, because it could not reach a slot either; raises `UserCodeError` where `open` itself fails.
        """
        context = ProcessContext(SubtaskInfo("", self.uid, -1, 1, 1), KeyScope())
        copy = opened_copy(self.processor, context, self.uid, self._processor_name(), self.methods.open)
        self.deleted_states = self._deleted_by(copy)
        codec = None
        if self.time_mode != "none":
            codec = KeyCodec(self.input_struct, self.key_columns, self.time_mode)
        return _declared(context, codec)

    def open(self, info: SubtaskInfo) -> None:
        """Call the processor's `open`; raises `UserCodeError` where it fails."""
        running = self._prepared(info)
        try:
            self.processor.open(running.context)
        except StrandlineError:
            raise
        except Exception as error:  # noqa: BLE001  # user code may raise anything
            raise UserCodeError(f"{place_of(info)}: {self.methods.open}() failed\n{user_traceback(error)}") from None
        running.opened()
        self._running = running

    def states(self) -> list[StateDescriptor]:
        """The states that `open` declared, and the timers."""
        if self._running is None:
            return []
        return _declared(self._running.context, self._running.key_codec)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Process every key of the batch once, in the order in which keys come; then fire the timers that are due."""
        if self._running is None:
            raise StrandlineError(f"operator {self.uid!r} was run before it was opened")
        self.late_rows = 0
        return self._running.run(rows, changes, batch)

    def close(self) -> None:
        """Call the processor's `close`."""
        running, self._running = self._running, None
        if running is not None:
            try:
                self.processor.close()
            except StrandlineError:
                raise
            except Exception as error:  # noqa: BLE001  # user code may raise anything
                raise UserCodeError(f"{place_of(running.info)}: close() failed\n{user_traceback(error)}") from None

    def _prepared(self, info: SubtaskInfo) -> Running:
        return Running(self, info)

    def _processor_name(self) -> str:
        return type(self.processor).__name__

    def _deleted_by(self, processor: KeyedProcessor) -> frozenset[str]:
        return frozenset()

    def _check_arguments(self) -> None:
        """Found out here, in the driver, rather than by the first row."""
        where = f"operator {self.uid!r}"
        KeyEncoder(self.input_schema, self.key_columns, KEY_GROUP_COLUMN)
        RowWriter(self.output_struct, self.output_schema, where)
        SideOutputs(self.side_outputs, where)
        for name, value, allowed in (
            ("time_mode", self.time_mode, get_args(TimeMode)),
            ("timer_service", self.timer_service, get_args(TimerService)),
        ):
            if value not in allowed:
                raise JobDefinitionError(
                    f"{where}: {name}={value!r} is not valid; use {' or '.join(map(repr, allowed))}"
                )
        if self.time_mode != "none":
            KeyCodec(self.input_struct, self.key_columns, self.time_mode)
        if self.event_time is not None:
            check_event_time(self.input_struct, self.event_time, where)
        elif self.late is not None:
            raise JobDefinitionError(
                f"{where}: late={self.late!r} needs event_time=, the column that tells a row's time"
            )
        if self.late not in (None, "drop"):
            self._check_late_output(str(self.late), where)

    def _check_late_output(self, name: str, where: str) -> None:
        columns = {field.name: field.dataType for field in self.input_struct.fields}
        for field in self.side_outputs[name].fields:
            if columns.get(field.name) != field.dataType:
                raise JobDefinitionError(
                    f"{where}: side output {name!r} takes late rows, so its columns are among the input's; "
                    f"{field.name} {field.dataType.simpleString()} is not"
                )


class Running:
    """An opened operator in its slot."""

    _fires_deleted = False
    """Whether a timer that another one of the same batch deletes fires nevertheless."""

    def __init__(self, operator: ProcessOperator, info: SubtaskInfo) -> None:
        place = place_of(info)
        self.info = info
        self._operator = operator
        self._scope = KeyScope()
        self._groups = key_group_range(info.subtask, info.parallelism, info.max_parallelism)
        self.key_codec: KeyCodec | None = None
        self._timers: Timers | None = None
        if operator.time_mode != "none":
            self.key_codec = KeyCodec(operator.input_struct, operator.key_columns, operator.time_mode)
            self._timers = Timers(self._scope, self._groups, operator.timer_service, self.key_codec.encode)
        self._sides = SideOutputs(operator.side_outputs, place) if operator.side_outputs else None
        self._sweep: Sweep | None = None
        self.context = ProcessContext(info, self._scope, self._timers, self._sides)
        self._reader = self._make_reader(operator.input_struct, place)
        self._writer = self._make_writer(place)

    def _make_reader(self, struct: StructType, place: str) -> KeyChunkReader:
        return KeyChunkReader(struct, arrow_schema(struct), self._operator.key_columns, place)

    def _make_writer(self, place: str) -> Writer:
        return RowWriter(self._operator.output_struct, self._operator.output_schema, place)

    def opened(self) -> None:
        """User code has declared its states."""
        context = self.context
        context._opening = False
        if context._expiring:
            self._sweep = Sweep(context._expiring, self._groups, self._operator.sweep_budget)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        scope, context, process, sides = self._scope, self.context, self._operator.processor.process, self._sides
        chunks = KeyChunks(self._reader, self._in_time(rows, batch))
        output = OutputRows(self._writer)
        pending, keys_out, starts_out = output.rows, output.keys, output.starts
        limit, methods = process_output.OUTPUT_ROWS, self._operator.methods
        self._begin(changes, batch)
        try:
            while (chunk := chunks.next()) is not None:
                chunks.adapt(scope.load(chunk.keys, chunk.values) + chunk.size)
                last = len(chunk.counts) - 1
                for at, (key, count) in enumerate(zip(chunk.values, chunk.counts, strict=True)):
                    scope.index = at
                    own: Iterator[Any] = islice(chunk.rows, count)
                    if at == last:
                        own = chain(own, chunks.rest_of(chunk.keys.one(last)))
                    keys_out.append(key)
                    starts_out.append(len(pending))
                    try:
                        result = process(key, own, context)
                        if result is not None:
                            for row in result:
                                pending.append(row)
                                if len(pending) >= limit:
                                    yield output.flush()
                    except Exception as error:  # noqa: BLE001  # user code may raise anything
                        raise self._explained(error, chunks.error or output.error, key, batch, methods.rows) from None
                    for _ in own:
                        pass  # what the user did not read must not be taken for the next key's rows
                    if scope.unflushed:
                        scope.flush()
                    if sides is not None and sides.ready:
                        yield from sides.take()
            if self._timers is not None:
                yield from self._fire(self._timers, batch, chunks, output)
            if pending:
                yield output.flush()
            if sides is not None:
                yield from sides.take_all()
        finally:
            context._batch = None
            scope.end()

    def _begin(self, changes: ChangeSet, batch: BatchInfo) -> None:
        self._scope.begin(changes, batch.batch_id, batch.processing_time_ms)
        self.context._batch = batch
        if self._sides is not None:
            self._sides.begin()
        if self._timers is not None:
            self._timers.begin()
        if self._sweep is not None:
            self._sweep.run(changes)

    def _in_time(self, rows: Iterator[pa.RecordBatch], batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """The rows that are not late, if those are to be told apart."""
        operator, watermark = self._operator, batch.late_watermark_ms
        if operator.event_time is None or operator.late is None or watermark is None:
            return rows
        return without_late(map(self._reader.fit, rows), operator.event_time, watermark, self._take_late)

    def _take_late(self, rows: pa.RecordBatch) -> None:
        operator = self._operator
        operator.late_rows += rows.num_rows
        if operator.late != "drop" and self._sides is not None:
            name = str(operator.late)
            schema = arrow_schema(operator.side_outputs[name])
            self._sides.ready.append(SideRows(name, fitted(rows, schema, place_of(self.info)).cast(schema)))

    def _fire(self, timers: Timers, batch: BatchInfo, chunks: KeyChunks, output: OutputRows) -> Iterator[Output]:
        """Call `on_timer` for what is due, a chunk of timers at a time."""
        operator, scope = self._operator, self._scope
        until = batch.watermark_ms if operator.time_mode == "event" else batch.processing_time_ms
        due = iter(()) if until is None else self._due(timers, until)
        while part := list(islice(due, self._reader.limit)):
            assert self.key_codec is not None
            keys = list(map(self.key_codec.decode, timers.encoded_keys(part)))
            chunks.adapt(scope.load(keys_of([timer for timer, _ in part]), keys))
            for at, (timer, _) in enumerate(part):
                if self._fires_deleted or not timers.cancelled(timer):
                    scope.index = at
                    yield from self._call_timer(keys[at], time_of(timer), batch, output)
                    scope.flush()
                    timers.done(timer)
                    if self._sides is not None and self._sides.ready:
                        yield from self._sides.take()
        operator.next_timer_ms = timers.earliest()

    def _due(self, timers: Timers, until: int) -> Iterator[tuple[bytes, bytes | None]]:
        return timers.due(until)

    def _call_timer(self, key: Key, time_ms: int, batch: BatchInfo, output: OutputRows) -> Iterator[pa.RecordBatch]:
        output.keys.append(key)
        output.starts.append(len(output.rows))
        try:
            result = self._operator.processor.on_timer(key, time_ms, self.context)
            for row in () if result is None else result:
                output.rows.append(row)
                if len(output.rows) >= process_output.OUTPUT_ROWS:
                    yield output.flush()
        except Exception as error:  # noqa: BLE001  # user code may raise anything
            raise self._explained(error, output.error, key, batch, self._operator.methods.timer) from None

    def _explained(
        self, error: Exception, other: Exception | None, key: Key, batch: BatchInfo, method: str
    ) -> Exception:
        """What to raise for an error that came out of user code; `other` is one that only passed through it."""
        other = other or (self._sides.error if self._sides is not None else None)
        if other is not None:
            return other
        where = f"{place_of(self.info)}, key {key}, batch {batch.batch_id}"
        if type(error) in (SchemaError, StrandlineError, JobDefinitionError):
            return type(error)(f"{where}: {error}")
        if isinstance(error, StrandlineError):
            return error
        return UserCodeError(f"{where}: {method}() failed\n{user_traceback(error)}")


def opened_copy(processor: Any, context: Any, uid: str, name: str, method: str = "open") -> Any:
    """A copy of a user's object, made as the slots get theirs, and opened in the driver to see what it declares.

    Raises `JobDefinitionError` and `UserCodeError`, as `ProcessOperator.check` says.
    """
    from pyspark import cloudpickle

    try:
        copy = cloudpickle.loads(cloudpickle.dumps(processor))  # type: ignore[no-untyped-call]  # PySpark's own
    except Exception as error:  # pickling runs user code
        raise JobDefinitionError(
            f"operator {uid!r}: {name} cannot be sent to the slots: {error}; "
            f"make what cannot be pickled (connections, locks, ...) in {method}()"
        ) from error
    try:
        if hasattr(copy, "open"):
            copy.open(context)
    except StrandlineError as error:
        raise JobDefinitionError(f"operator {uid!r}: {method}(): {error}") from error
    except Exception as error:  # noqa: BLE001  # user code may raise anything
        raise UserCodeError(
            f"operator {uid!r}: {method}() failed in the driver, where a copy of the processor is "
            f"opened to check its states (context.subtask is -1 there)\n{user_traceback(error)}"
        ) from None
    return copy


def _declared(context: ProcessContext, timer_keys: KeyCodec | None) -> list[StateDescriptor]:
    """The states that `open` declared, and the timers if there are some."""
    timers = [StateDescriptor(TIMERS, "timers", timer_keys.schema.json())] if timer_keys is not None else []
    return [*context._descriptors.values(), *timers]


def user_traceback(error: BaseException) -> str:
    """The traceback of an error in user code without the frames of this package."""
    report = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [report]
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        own = [frame for frame in part.stack if not os.path.abspath(frame.filename).startswith(_PACKAGE)]
        part.stack = traceback.StackSummary.from_list(own)
        todo += [part.__cause__, part.__context__]
    return "".join(report.format()).rstrip()


def place_of(info: SubtaskInfo) -> str:
    """Where something went wrong, for errors."""
    return f"operator {info.uid!r}, subtask {info.subtask}"
