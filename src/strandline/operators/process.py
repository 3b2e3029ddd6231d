"""Per-key user code: a `KeyedProcessor` and the operator that runs it, each key once a batch."""

from __future__ import annotations

import os
import traceback
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import DataType, StructType

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.key_chunks import Key, KeyChunkReader, KeyChunks
from strandline.operators.rows import RowWriter, arrow_schema
from strandline.state.access import KeyScope, ListState, MapState, ValueState
from strandline.state.changes import ChangeSet
from strandline.state.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor
from strandline.state.keys import KeyEncoder

_OUTPUT_ROWS: Final = 8192
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ProcessContext:
    """What a processor may ask of the runtime. States are declared in `open`, time and batch are read in `process`."""

    def __init__(self, info: SubtaskInfo, scope: KeyScope) -> None:
        self._info = info
        self._scope = scope
        self._descriptors: dict[str, StateDescriptor] = {}
        self._opening = True
        self._batch: BatchInfo | None = None

    def value_state(self, name: str, schema: str | DataType, ttl: str | None = None) -> ValueState:
        """Declare a state of one row per key."""
        struct = parse_schema(schema)
        return ValueState(self._declare(name, "value", struct, None, ttl), struct, self._scope, self._where(name))

    def list_state(self, name: str, schema: str | DataType, ttl: str | None = None) -> ListState:
        """Declare a state of a list of rows per key."""
        struct = parse_schema(schema)
        return ListState(self._declare(name, "list", struct, None, ttl), struct, self._scope, self._where(name))

    def map_state(
        self, name: str, key_schema: str | DataType, value_schema: str | DataType, ttl: str | None = None
    ) -> MapState:
        """Declare a state of a map per key."""
        keys, values = parse_schema(key_schema), parse_schema(value_schema)
        descriptor = self._declare(name, "map", values, keys, ttl)
        return MapState(descriptor, keys, values, self._scope, self._where(name))

    def reducing_state(self, name: str, *args: object, **kwargs: object) -> Any:
        """Not available yet."""
        raise self._not_yet(f"reducing state {name!r}: reducing states are")

    def aggregating_state(self, name: str, *args: object, **kwargs: object) -> Any:
        """Not available yet."""
        raise self._not_yet(f"aggregating state {name!r}: aggregating states are")

    def register_timer(self, timestamp_ms: int) -> None:
        """Not available yet."""
        raise self._not_yet("timers are")

    def delete_timer(self, timestamp_ms: int) -> None:
        """Not available yet."""
        raise self._not_yet("timers are")

    @property
    def batch_id(self) -> int:
        """The number of the batch that is being processed."""
        return self._current().batch_id

    @property
    def processing_time(self) -> int:
        """The batch's processing time in milliseconds since the epoch, the same for every subtask and every retry."""
        return self._current().processing_time_ms

    @property
    def watermark(self) -> int | None:
        """The batch's watermark in milliseconds since the epoch; None where the job has no event time."""
        return self._current().watermark_ms

    @property
    def subtask(self) -> int:
        """Which subtask of the operator this is."""
        return self._info.subtask

    def _current(self) -> BatchInfo:
        if self._batch is None:
            raise StrandlineError(f"operator {self._info.uid!r}: there is no batch outside of process()")
        return self._batch

    def _declare(
        self, name: str, kind: Any, schema: StructType, key_schema: StructType | None, ttl: str | None
    ) -> StateDescriptor:
        if not self._opening:
            raise StrandlineError(
                f"operator {self._info.uid!r}: state {name!r} was declared outside of open(); declare every state there"
            )
        if name in self._descriptors:
            raise JobDefinitionError(f"operator {self._info.uid!r} declares the state {name!r} twice")
        if ttl is not None:
            raise self._not_yet(f"state {name!r}: ttl={ttl!r}: time-to-live is")
        keys = None if key_schema is None else key_schema.json()
        descriptor = StateDescriptor(name, kind, schema.json(), keys)
        self._descriptors[name] = descriptor
        return descriptor

    def _where(self, name: str) -> str:
        return f"state {name!r} of operator {self._info.uid!r}"

    def _not_yet(self, what: str) -> StrandlineError:
        return StrandlineError(f"operator {self._info.uid!r}: {what} not available yet in this release")


class KeyedProcessor:
    """Base class of per-key user code; one instance per subtask, kept for the whole run."""

    def open(self, context: ProcessContext) -> None:
        """Called once per subtask; declare states here."""

    def process(self, key: Key, rows: Iterator[Any], context: ProcessContext) -> Iterable[Any] | None:
        """Called once per key and batch with all rows of that key; yield or return output rows, or nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no process() method")

    def on_timer(self, key: Key, timestamp: int, context: ProcessContext) -> Iterable[Any] | None:
        """Called when a timer of the key is due."""
        return None

    def close(self) -> None:
        """Called when the subtask ends in an orderly way."""


class ProcessOperator(Operator):
    """Runs a `KeyedProcessor`: groups rows by key, reads the value states of many keys at once, checks the output."""

    sorted_input = True

    def __init__(
        self,
        uid: str,
        processor: KeyedProcessor,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.processor = processor
        self.input_struct = input_schema
        self.output_struct = output_schema
        self.input_schema = arrow_schema(input_schema)
        self.output_schema = arrow_schema(output_schema)
        # Found out here, in the driver, rather than by the first row.
        KeyEncoder(self.input_schema, self.key_columns, KEY_GROUP_COLUMN)
        RowWriter(output_schema, self.output_schema, f"operator {uid!r}")
        self._running: _Running | None = None

    def open(self, info: SubtaskInfo) -> None:
        """Call the processor's `open`; raises `UserCodeError` where it fails."""
        scope = KeyScope()
        context = ProcessContext(info, scope)
        try:
            self.processor.open(context)
        except StrandlineError:
            raise
        except Exception as error:  # noqa: BLE001  # user code may raise anything
            raise UserCodeError(f"{_place(info)}: open() failed\n{user_traceback(error)}") from None
        context._opening = False
        self._running = _Running(self, info, scope, context)

    def states(self) -> list[StateDescriptor]:
        """The states that `open` declared."""
        return [] if self._running is None else list(self._running.context._descriptors.values())

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Process every key of the batch once, in the order in which keys come."""
        if self._running is None:
            raise StrandlineError(f"operator {self.uid!r} was run before it was opened")
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
                raise UserCodeError(f"{_place(running.info)}: close() failed\n{user_traceback(error)}") from None


class _Running:
    """An opened operator in its slot."""

    def __init__(self, operator: ProcessOperator, info: SubtaskInfo, scope: KeyScope, context: ProcessContext) -> None:
        self.info = info
        self.context = context
        self._processor = operator.processor
        self._scope = scope
        self._reader = KeyChunkReader(operator.input_struct, operator.input_schema, operator.key_columns, _place(info))
        self._writer = RowWriter(operator.output_struct, operator.output_schema, _place(info))

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        scope, context, process = self._scope, self.context, self._processor.process
        chunks = KeyChunks(self._reader, rows)
        output = _Output(self._writer)
        pending, keys_out, starts_out = output.rows, output.keys, output.starts
        scope.begin(changes, batch.batch_id)
        context._batch = batch
        try:
            while (chunk := chunks.next()) is not None:
                chunks.adapt(scope.load(chunk.keys) + chunk.size)
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
                                if len(pending) >= _OUTPUT_ROWS:
                                    yield output.flush()
                    except Exception as error:  # noqa: BLE001  # user code may raise anything
                        raise self._explained(error, chunks.error or output.error, key, batch) from None
                    for _ in own:
                        pass  # what the user did not read must not be taken for the next key's rows
                    if scope.unsettled:
                        scope.settle()
            if pending:
                yield output.flush()
        finally:
            context._batch = None
            scope.end()

    def _explained(self, error: Exception, other: Exception | None, key: Key, batch: BatchInfo) -> Exception:
        """What to raise for an error that came out of user code; `other` is one that only passed through it."""
        if other is not None:
            return other
        where = f"{_place(self.info)}, key {key}, batch {batch.batch_id}"
        if type(error) in (SchemaError, StrandlineError, JobDefinitionError):
            return type(error)(f"{where}: {error}")
        if isinstance(error, StrandlineError):
            return error
        return UserCodeError(f"{where}: process() failed\n{user_traceback(error)}")


class _Output:
    """Output rows that wait to become a record batch, and at which row each key's begin."""

    __slots__ = ("_writer", "error", "keys", "rows", "starts")

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer
        self.rows: list[Any] = []
        self.keys: list[Key] = []
        self.starts: list[int] = []
        self.error: SchemaError | None = None

    def flush(self) -> pa.RecordBatch:
        try:
            built = self._writer.build(self.rows, self._key_at)
        except SchemaError as error:
            self.error = error
            raise
        self.rows.clear()
        del self.keys[:-1]
        self.starts[:] = [0]
        return built

    def _key_at(self, row: int) -> object:
        return self.keys[bisect_right(self.starts, row) - 1]


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


def _place(info: SubtaskInfo) -> str:
    return f"operator {info.uid!r}, subtask {info.subtask}"
