"""User code on Arrow tables: an `ArrowProcessor` gets many keys at a time, and reads and writes state in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StructType

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.columns import RowCodec, column_type, conform, found
from strandline.operators.columns.rows import arrow_schema, fitted
from strandline.operators.process.keyed_process import opened_copy, user_traceback
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import EncodedKeys, KeyEncoder
from strandline.state.descriptors import StateDescriptor

_CHUNK_ROWS: Final = 1 << 15
_CHUNK_BYTES: Final = 32 << 20
_OUTPUT_ROWS: Final = 1 << 16

Rows: TypeAlias = pa.Table | pa.RecordBatch
ArrowFunction: TypeAlias = Callable[[pa.Table, "ArrowContext"], Any]


class ArrowProcessor:
    """Base class of user code on Arrow tables; one instance per subtask, kept for the whole run."""

    def open(self, context: ArrowContext) -> None:
        """Called once per subtask; declare states here."""

    def process(self, table: pa.Table, context: ArrowContext) -> Rows | Iterable[Rows] | None:
        """Called with all rows of many keys, those of a key next to each other; a key comes once a batch.

        Return or yield tables or record batches with the columns of the output schema, or nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no process() method")

    def close(self) -> None:
        """Called when the subtask ends in an orderly way."""


class ArrowContext:
    """What an `ArrowProcessor` may ask of the runtime. States are declared in `open`, the rest is read in `process`."""

    def __init__(self, info: SubtaskInfo, key_columns: tuple[str, ...], schema: pa.Schema) -> None:
        self._info = info
        self._scope = _Scope(key_columns, schema)
        self._states: dict[str, StateDescriptor] = {}
        self._opening = True

    def value_state(self, name: str, schema: str | DataType) -> ArrowValueState:
        """Declare a state of one row per key."""
        where = f"state {name!r} of operator {self._info.uid!r}"
        if not self._opening:
            raise StrandlineError(f"{where} was declared outside of open(); declare every state there")
        if name in self._states:
            raise JobDefinitionError(f"operator {self._info.uid!r} declares the state {name!r} twice")
        struct = parse_schema(schema)
        self._states[name] = StateDescriptor(name, "columns", struct.json())
        return ArrowValueState(name, struct, self._scope, where)

    def keys(self, table: Rows | None = None) -> pa.Table:
        """The distinct keys of `table`, in the order in which they come first; of all rows in hand by default."""
        scope = self._scope
        if table is None:
            return scope.current().keys
        places = scope.current().places(table)
        _, first = np.unique(places, return_index=True)
        return scope.current().keys.take(pa.array(places[np.sort(first)]))

    @property
    def batch_id(self) -> int:
        """The number of the batch that is being processed."""
        return self._scope.batch().batch_id

    @property
    def processing_time(self) -> int:
        """The batch's processing time in milliseconds since the epoch, the same for every subtask and every retry."""
        return self._scope.batch().processing_time_ms

    @property
    def watermark(self) -> int | None:
        """The batch's watermark in milliseconds since the epoch; None where the job has no event time."""
        return self._scope.batch().watermark_ms

    @property
    def subtask(self) -> int:
        """Which subtask of the operator this is; -1 when the driver checks what `open` declares."""
        return self._info.subtask


class ArrowValueState:
    """One row per key, for many keys at a time.

    `keys` is a table or record batch that has the key columns, such as `context.keys()`, a part of it, or the input
    itself; only keys of the rows in hand may be named. None stands for `context.keys()`.
    """

    def __init__(self, name: str, struct: StructType, scope: _Scope, where: str) -> None:
        self._name = name
        self._struct = struct
        self._scope = scope
        self._where = where
        self._codec = RowCodec(struct, where)

    def get_many(self, keys: Rows | None = None, present: str | None = None) -> pa.Table:
        """The values of `keys`, row by row; all columns are null where there is none.

        With `present`, a boolean column of that name says where there is a value.
        """
        if present is not None and present in self._codec.schema.names:
            raise SchemaError(f"{self._where} has a column {present!r}; name the column of `present` otherwise")
        chunk = self._scope.current()
        places = None if keys is None or keys is chunk.keys else chunk.places(keys)
        stored, order = chunk.stored(self._name, places)
        values = self._scope.changes().get_many(stored)
        there = found(values)
        rows = self._codec.decode([value for value in values if value is not None])
        at = np.full(len(values), -1, np.int64)
        at[order[there]] = np.arange(len(there))
        table = pa.Table.from_batches([rows]).take(pa.array(at, mask=at < 0))
        return table if present is None else table.append_column(present, pa.array(at >= 0))

    def put_many(self, keys: Rows | None, values: Rows) -> None:
        """Set the value of each key to the row of `values` at its place; raises `SchemaError` where it does not fit."""
        chunk = self._scope.current()
        count = (chunk.keys if keys is None else keys).num_rows
        if values.num_rows != count:
            raise SchemaError(f"{self._where}: {values.num_rows} values for {count} keys")
        places = None if keys is None or keys is chunk.keys else chunk.places(keys)
        table = conform(values, self._struct, self._codec.schema, self._where)
        stored, order = chunk.stored(self._name, places)
        if count:
            (rows,) = table.take(pa.array(order)).combine_chunks().to_batches()
            self._scope.changes().put_many(stored, self._codec.encode(rows))

    def remove_many(self, keys: Rows | None = None) -> None:
        """Remove the values of `keys`."""
        chunk = self._scope.current()
        places = None if keys is None or keys is chunk.keys else chunk.places(keys)
        stored, _ = chunk.stored(self._name, places)
        self._scope.changes().put_many(stored, [None] * len(stored))


class _Scope:
    """The batch and the rows that contexts and states speak of."""

    def __init__(self, key_columns: tuple[str, ...], schema: pa.Schema) -> None:
        self.key_columns = key_columns
        self.key_schema = pa.schema([pa.field(name, schema.field(name).type) for name in key_columns])
        self.encoder = KeyEncoder(schema, key_columns, KEY_GROUP_COLUMN)
        self.chunk: _Chunk | None = None
        self.info: BatchInfo | None = None
        self.change_set: ChangeSet | None = None

    def current(self) -> _Chunk:
        """The rows in hand."""
        if self.chunk is None:
            raise StrandlineError("state and keys belong to the rows that are being processed: use them in process()")
        return self.chunk

    def batch(self) -> BatchInfo:
        """The batch in hand."""
        if self.info is None:
            raise StrandlineError("there is no batch outside of process()")
        return self.info

    def changes(self) -> ChangeSet:
        """The change set of the batch in hand."""
        assert self.change_set is not None
        return self.change_set


class _Chunk:
    """Rows of whole keys, and their distinct keys."""

    def __init__(self, scope: _Scope, rows: pa.Table, encoded: EncodedKeys, starts: npt.NDArray[np.int64]) -> None:
        self._scope = scope
        self._encoded = encoded.take(starts)
        self._order = self._encoded.order()
        self._ascending = self._encoded.take(self._order)
        self._known: Any = None
        self.keys = rows.select(list(scope.key_columns)).take(pa.array(starts))

    def stored(self, state: str, places: npt.NDArray[np.int64] | None) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """The stored keys of `state`, ascending, for keys by their places (None: all), and the order they are in."""
        if places is None:
            return self._ascending.stored(state), self._order
        rank = np.empty(len(self._order), np.int64)
        rank[self._order] = np.arange(len(self._order))
        order = np.argsort(rank[places], kind="stable")
        return self._encoded.take(places[order]).stored(state), order

    def places(self, keys: Rows) -> npt.NDArray[np.int64]:
        """Which of the chunk's keys the rows of a table are of."""
        scope = self._scope
        missing = [name for name in scope.key_columns if name not in keys.schema.names]
        if missing:
            raise SchemaError(f"keys have no column {missing[0]!r}; the key columns are {', '.join(scope.key_columns)}")
        if self._known is None:
            self._known = self._without_groups(self.keys)
        found_at = pc.index_in(self._without_groups(keys), value_set=self._known)
        if found_at.null_count:
            row = pc.index(found_at.is_null(), True).as_py()
            key = tuple(keys.column(name)[row].as_py() for name in scope.key_columns)
            raise SchemaError(f"key {key} is not among the rows in hand: only the state of their keys can be used")
        places: npt.NDArray[np.int64] = found_at.to_numpy().astype(np.int64)
        return places

    def _without_groups(self, keys: Rows) -> Any:
        columns = []
        for field in self._scope.key_schema:
            column = keys.column(field.name)
            try:
                columns.append(column if column.type == field.type else column.cast(field.type))
            except pa.ArrowException:
                raise SchemaError(f"key column {field.name!r} is {column.type}, not {field.type}") from None
        groups = pa.array(np.zeros(keys.num_rows, np.int32))
        table = pa.Table.from_arrays([*columns, groups], names=[*self._scope.key_columns, KEY_GROUP_COLUMN])
        return pa.array(self._scope.encoder.encode(table).stored(""), pa.binary())


class ArrowProcessOperator(Operator):
    """Runs an `ArrowProcessor`, or a function of a table and a context, and checks what comes out."""

    sorted_input = True

    def __init__(
        self,
        uid: str,
        processor: ArrowProcessor | ArrowFunction,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
    ) -> None:
        where = f"operator {uid!r}"
        if isinstance(processor, type):
            raise JobDefinitionError(f"{where}: {processor.__name__} is a class; give an object of it")
        if not callable(getattr(processor, "process", processor)):
            raise JobDefinitionError(
                f'{where}: rows="arrow" takes an sl.ArrowProcessor or a function of a table and a context, not '
                f"{processor!r}"
            )
        for name in key_columns:
            column_type(input_schema, name, where)
        self.uid = uid
        self.processor = processor
        self.key_columns = tuple(key_columns)
        self.input_struct = input_schema
        self.output_struct = output_schema
        self.input_schema = arrow_schema(input_schema)
        self.output_schema = arrow_schema(output_schema)
        KeyEncoder(self.input_schema, self.key_columns, KEY_GROUP_COLUMN)
        self._where = where
        self._context: ArrowContext | None = None

    def check(self) -> list[StateDescriptor]:
        """Find in the driver what `open` declares, as `ProcessOperator.check` does."""
        context = ArrowContext(SubtaskInfo("", self.uid, -1, 1, 1), self.key_columns, self.input_schema)
        name = getattr(self.processor, "__name__", type(self.processor).__name__)
        opened_copy(self.processor, context, self.uid, name)
        return list(context._states.values())

    def open(self, info: SubtaskInfo) -> None:
        """Call the processor's `open`; raises `UserCodeError` where it fails."""
        self._where = f"operator {info.uid!r}, subtask {info.subtask}"
        context = ArrowContext(info, self.key_columns, self.input_schema)
        self._call("open", context)
        context._opening = False
        self._context = context

    def states(self) -> list[StateDescriptor]:
        """The states that `open` declared."""
        return [] if self._context is None else list(self._context._states.values())

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Hand the rows to the processor, chunk by chunk, and yield what it makes of them."""
        if self._context is None:
            raise StrandlineError(f"{self._where} was run before it was opened")
        scope = self._context._scope
        scope.info, scope.change_set = batch, changes
        try:
            for table, encoded, starts in self._chunks(rows, scope.encoder):
                scope.chunk = _Chunk(scope, table, encoded, starts)
                for made in self._processed(table, self._context, batch):
                    yield from self._checked(made, batch)
        finally:
            scope.chunk = scope.info = scope.change_set = None

    def close(self) -> None:
        """Call the processor's `close`."""
        if self._context is not None:
            self._context = None
            self._call("close")

    def _chunks(
        self, rows: Iterator[pa.RecordBatch], encoder: KeyEncoder
    ) -> Iterator[tuple[pa.Table, EncodedKeys, npt.NDArray[np.int64]]]:
        """The rows of whole keys, as many as a chunk may have, with their encoded keys and where each begins."""
        schema = self.input_schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        held: list[pa.RecordBatch] = []
        count = size = 0
        patience = 1
        for incoming in rows:
            part = fitted(incoming, schema, self._where)
            held.append(part)
            count, size = count + part.num_rows, size + part.nbytes
            if count < patience * _CHUNK_ROWS and size < patience * _CHUNK_BYTES:
                continue
            table = pa.Table.from_batches(held).combine_chunks()
            encoded = encoder.encode(table)
            starts = encoded.starts()
            if len(starts) == 1:
                patience *= 2  # one key goes on and on, and must not be split: look again when there is much more of it
                continue
            cut = int(starts[-1])  # the last key may go on in the next record batch
            yield self._input(table.slice(0, cut)), encoded.slice(0, cut), starts[:-1]
            rest = table.slice(cut)
            held, count, size, patience = rest.to_batches(), rest.num_rows, rest.nbytes, 1
        if any(part.num_rows for part in held):
            table = pa.Table.from_batches(held).combine_chunks()
            encoded = encoder.encode(table)
            yield self._input(table), encoded, encoded.starts()

    def _input(self, table: pa.Table) -> pa.Table:
        return pa.Table.from_arrays(table.columns[:-1], schema=self.input_schema)

    def _processed(self, table: pa.Table, context: ArrowContext, batch: BatchInfo) -> Iterator[Any]:
        process: Any = getattr(self.processor, "process", self.processor)
        try:
            made = process(table, context)
            if made is None:
                return
            yield from made if isinstance(made, Iterable) and not isinstance(made, Rows) else [made]
        except Exception as error:  # noqa: BLE001  # user code may raise anything
            raise self._explained(error, "process()", f", batch {batch.batch_id}") from None

    def _checked(self, made: Any, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        where = f"{self._where}, batch {batch.batch_id}: output"
        table = conform(made, self.output_struct, self.output_schema, where).combine_chunks()
        for part in table.to_batches(max_chunksize=_OUTPUT_ROWS):
            if part.num_rows:
                yield part

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self.processor, name, None)
        if method is not None:
            try:
                method(*arguments)
            except Exception as error:  # noqa: BLE001  # user code may raise anything
                raise self._explained(error, f"{name}()", "") from None

    def _explained(self, error: Exception, call: str, place: str) -> Exception:
        """What to raise for an error that came out of user code."""
        if type(error) in (SchemaError, StrandlineError, JobDefinitionError):
            return type(error)(f"{self._where}{place}: {error}")
        if isinstance(error, StrandlineError):
            return error
        return UserCodeError(f"{self._where}{place}: {call} failed\n{user_traceback(error)}")
