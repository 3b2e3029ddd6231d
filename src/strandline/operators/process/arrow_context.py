"""`ArrowContext`: the state of many keys at a time, the keys, the batch and its time, for an `ArrowProcessor`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StructType

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SubtaskInfo
from strandline.operators.columns.lookups import found_places
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.columns.schemas import conform
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import EncodedKeys, KeyEncoder
from strandline.state.descriptors import StateDescriptor

Rows: TypeAlias = pa.Table | pa.RecordBatch


class ArrowContext:
    """What an `ArrowProcessor` may ask of the runtime. Declare states in `open`; use the rest in `process`."""

    def __init__(self, info: SubtaskInfo, key_columns: tuple[str, ...], schema: pa.Schema) -> None:
        self._info = info
        self._scope = ArrowScope(key_columns, schema)
        self._states: dict[str, StateDescriptor] = {}
        self._opening = True

    def value_state(self, name: str, schema: str | DataType) -> ArrowValueState:
        """Declare a state with one row per key."""
        where = f"state {name!r} of operator {self._info.uid!r}"
        if not self._opening:
            raise StrandlineError(f"{where} was declared outside of open(); declare every state there")
        if name in self._states:
            raise JobDefinitionError(f"operator {self._info.uid!r} declares the state {name!r} twice")
        struct = parse_schema(schema)
        self._states[name] = StateDescriptor(name, "columns", struct.json())
        return ArrowValueState(name, struct, self._scope, where)

    def keys(self, table: Rows | None = None) -> pa.Table:
        """The distinct keys of `table`, in the order of their first rows; by default the keys of all rows in hand."""
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
        """The batch's watermark in milliseconds since the epoch; None if the job has no event time."""
        return self._scope.batch().watermark_ms

    @property
    def subtask(self) -> int:
        """The number of this subtask; -1 in the driver, where a copy is opened to find the declared states."""
        return self._info.subtask


class ArrowValueState:
    """One row per key, for many keys at a time.

    `keys` is a table or record batch with the key columns, such as `context.keys()`, a part of it, or the input
    itself. It may name keys of the rows in hand only. None stands for `context.keys()`.
    """

    def __init__(self, name: str, struct: StructType, scope: ArrowScope, where: str) -> None:
        self._name = name
        self._struct = struct
        self._scope = scope
        self._where = where
        self._codec = RowCodec(struct, where)

    def get_many(self, keys: Rows | None = None, present: str | None = None) -> pa.Table:
        """The value of each key, as a row; all columns are null if the key has no value.

        With `present`, a boolean column of that name says which keys have a value.
        """
        if present is not None and present in self._codec.schema.names:
            raise SchemaError(f"{self._where} has a column {present!r} of its own; pass another name as present=")
        chunk = self._scope.current()
        places = None if keys is None or keys is chunk.keys else chunk.places(keys)
        stored, order = chunk.stored(self._name, places)
        values = self._scope.changes().get_many(stored)
        there = found_places(values)
        rows = self._codec.decode([value for value in values if value is not None])
        at = np.full(len(values), -1, np.int64)
        at[order[there]] = np.arange(len(there))
        table = pa.Table.from_batches([rows]).take(pa.array(at, mask=at < 0))
        return table if present is None else table.append_column(present, pa.array(at >= 0))

    def put_many(self, keys: Rows | None, values: Rows) -> None:
        """Set the value of the i-th key to the i-th row of `values`; raises `SchemaError` if the values do not fit."""
        chunk = self._scope.current()
        count = (chunk.keys if keys is None else keys).num_rows
        if values.num_rows != count:
            raise SchemaError(f"{self._where}: {values.num_rows} values for {count} keys; pass one row for each key")
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


class ArrowScope:
    """The batch and the rows in hand, shared by the context and its states."""

    def __init__(self, key_columns: tuple[str, ...], schema: pa.Schema) -> None:
        self.key_columns = key_columns
        self.key_schema = pa.schema([pa.field(name, schema.field(name).type) for name in key_columns])
        self.encoder = KeyEncoder(schema, key_columns, KEY_GROUP_COLUMN)
        self.chunk: ArrowChunk | None = None
        self.info: BatchInfo | None = None
        self.change_set: ChangeSet | None = None

    def current(self) -> ArrowChunk:
        """The rows in hand."""
        if self.chunk is None:
            raise StrandlineError("there are no rows outside of process(); use state and keys in process() only")
        return self.chunk

    def batch(self) -> BatchInfo:
        """The batch in hand."""
        if self.info is None:
            raise StrandlineError("there is no batch outside of process(); use batch and time in process() only")
        return self.info

    def changes(self) -> ChangeSet:
        """The change set of the batch in hand."""
        assert self.change_set is not None
        return self.change_set


class ArrowChunk:
    """The rows in hand: all rows of some keys."""

    def __init__(self, scope: ArrowScope, rows: pa.Table, encoded: EncodedKeys, starts: npt.NDArray[np.int64]) -> None:
        self._scope = scope
        self._encoded = encoded.take(starts)
        self._order = self._encoded.order()
        self._ascending = self._encoded.take(self._order)
        self._known: Any = None
        self.keys = rows.select(list(scope.key_columns)).take(pa.array(starts))

    def stored(self, state: str, places: npt.NDArray[np.int64] | None) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """The stored keys of `state` for the keys at `places` (None: all), sorted, and the order that sorts them."""
        if places is None:
            return self._ascending.stored(state), self._order
        rank = np.empty(len(self._order), np.int64)
        rank[self._order] = np.arange(len(self._order))
        order = np.argsort(rank[places], kind="stable")
        return self._encoded.take(places[order]).stored(state), order

    def places(self, keys: Rows) -> npt.NDArray[np.int64]:
        """For each row of a table, the place of its key among the keys in hand; raises `SchemaError` if it has none."""
        scope = self._scope
        missing = [name for name in scope.key_columns if name not in keys.schema.names]
        if missing:
            raise SchemaError(
                f"the table of keys has no column {missing[0]!r}; the key columns are {', '.join(scope.key_columns)}"
            )
        if self._known is None:
            self._known = self._without_groups(self.keys)
        found_at = pc.index_in(self._without_groups(keys), value_set=self._known)
        if found_at.null_count:
            row = pc.index(found_at.is_null(), True).as_py()
            key = tuple(keys.column(name)[row].as_py() for name in scope.key_columns)
            raise SchemaError(f"key {key} has no rows in this call; use the state of keys that have rows in it")
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
