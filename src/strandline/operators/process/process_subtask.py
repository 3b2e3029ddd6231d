"""One subtask of a process operator: it calls user code once per key and batch, then for every due timer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.base import BatchInfo, Output, SideRows, SubtaskInfo
from strandline.operators.columns.row_writer import RowWriter
from strandline.operators.columns.schemas import arrow_schema, fitted
from strandline.operators.process.key_chunks import Key, KeyChunkReader, KeyChunks
from strandline.operators.process.key_codec import KeyCodec
from strandline.operators.process.output_rows import OutputRows, SideOutputs, Writer
from strandline.operators.process.output_times import OutputTimes
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.timed.late_rows import KEEP, without_late
from strandline.operators.user_code import NOT_BY_USER_CODE, explained
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import key_group_range
from strandline.state.handles.states import KeyScope
from strandline.state.handles.timers import Timers, keys_of, time_of
from strandline.state.handles.ttl import Sweep

if TYPE_CHECKING:
    from strandline.operators.process.process_operator import ProcessOperator


class ProcessSubtask:
    """The part of a `ProcessOperator` that exists in a slot only, from `open` to `close`."""

    _fires_deleted = False
    """Whether a due timer fires although an earlier timer of the same batch deleted it."""
    _error_class = ""
    """How the error of an output row that is too old begins."""

    def __init__(self, operator: ProcessOperator, info: SubtaskInfo) -> None:
        place = info.where
        self.info = info
        self._operator = operator
        self._scope = KeyScope()
        self._groups = key_group_range(info.subtask, info.parallelism, info.max_parallelism)
        self.key_codec: KeyCodec | None = None
        self._timers: Timers | None = None
        if operator.time_mode != "none":
            self.key_codec = KeyCodec(operator.input_struct, operator.key_columns, operator.time_mode)
            self._timers = Timers(self._scope, self._groups, operator.timer_service, self.key_codec.encode)
        self._sides = SideOutputs(operator.side_outputs, place, operator.limits) if operator.side_outputs else None
        self._sweep: Sweep | None = None
        self.context = ProcessContext(info, self._scope, self._timers, self._sides)
        self._reader = self._make_reader(operator.input_struct, place)
        self._writer = self._make_writer(place)

    def _make_reader(self, struct: StructType, place: str) -> KeyChunkReader:
        operator = self._operator
        return KeyChunkReader(struct, arrow_schema(struct), operator.key_columns, place, operator.limits)

    def _make_writer(self, place: str) -> Writer:
        return RowWriter(self._operator.output_struct, self._operator.output_schema, place)

    def opened(self) -> None:
        """Called when user code has declared its states."""
        context = self.context
        context._opening = False
        if context._expiring:
            self._sweep = Sweep(context._expiring, self._groups, self._operator.sweep_budget)

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        scope, context, process, sides = self._scope, self.context, self._operator.processor.process, self._sides
        chunks = KeyChunks(self._reader, self._in_time(rows, batch))
        output = OutputRows(self._writer, self._output_times(batch))
        pending, keys_out, starts_out = output.rows, output.keys, output.starts
        limit, methods = self._operator.limits.output_rows, self._operator.methods
        self._begin(changes, batch)
        try:
            while (chunk := chunks.next()) is not None:
                self._reader.adapt(scope.load(chunk.keys, chunk.values) + chunk.size)
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
                    except NOT_BY_USER_CODE:
                        raise
                    except BaseException as error:  # noqa: BLE001  # user code may raise anything
                        raise self._explained(error, chunks.error or output.error, key, batch, methods.rows) from None
                    for _ in own:
                        pass  # rows that user code did not read must not become rows of the next key
                    if scope.unflushed:
                        scope.flush()
                    if sides is not None and sides.ready:
                        yield from sides.take()
            if self._timers is not None:
                yield from self._fire(self._timers, batch, output)
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
        """The rows without the late ones, if the operator treats late rows apart."""
        operator, watermark = self._operator, batch.late_watermark_ms
        if operator.time_mode != "event" or operator.event_time is None or operator.late == KEEP or watermark is None:
            return rows
        return without_late(map(self._reader.fit, rows), operator.event_time, watermark, self._take_late)

    def _take_late(self, rows: pa.RecordBatch) -> None:
        operator = self._operator
        operator.late_rows += rows.num_rows
        name = operator.late_side
        if name is not None and self._sides is not None:
            schema = arrow_schema(operator.side_outputs[name])
            self._sides.ready.append(SideRows(name, fitted(rows, schema, self.info.where).cast(schema)))

    def _output_times(self, batch: BatchInfo) -> OutputTimes | None:
        """The check of output rows that carry event time; None if there is no such column, or no watermark yet."""
        operator, watermark = self._operator, batch.late_watermark_ms
        if operator.output_time is None or watermark is None:
            return None
        where = f"{self.info.where}, batch {batch.batch_id}"
        return OutputTimes(operator.output_time, watermark, operator.output_delay_ms, where, self._error_class)

    def _fire(self, timers: Timers, batch: BatchInfo, output: OutputRows) -> Iterator[Output]:
        """Call `on_timer` for the due timers, a chunk of them at a time."""
        operator, scope = self._operator, self._scope
        until = batch.watermark_ms if operator.time_mode == "event" else batch.processing_time_ms
        due = iter(()) if until is None else self._due(timers, until)
        while part := list(islice(due, self._reader.limit)):
            assert self.key_codec is not None
            keys = list(map(self.key_codec.decode, timers.encoded_keys(part)))
            self._reader.adapt(scope.load(keys_of([timer for timer, _ in part]), keys))
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
        operator = self._operator
        output.keys.append(key)
        output.starts.append(len(output.rows))
        try:
            result = operator.processor.on_timer(key, time_ms, self.context)
            for row in () if result is None else result:
                output.rows.append(row)
                if len(output.rows) >= operator.limits.output_rows:
                    yield output.flush()
        except NOT_BY_USER_CODE:
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            raise self._explained(error, output.error, key, batch, operator.methods.timer) from None

    def _explained(
        self, error: BaseException, other: Exception | None, key: Key, batch: BatchInfo, method: str
    ) -> Exception:
        """The error to raise when user code raised `error`; `other` is an error that only passed through user code."""
        other = other or (self._sides.error if self._sides is not None else None)
        if other is not None:
            return other
        return explained(error, f"{self.info.where}, key {key}, batch {batch.batch_id}", method)
