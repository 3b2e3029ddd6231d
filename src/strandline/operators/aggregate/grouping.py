"""Grouping: rows and partial results of many keys, aggregated in columns and laid over stored state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.aggregate.accumulators import (
    Accumulator,
    ArrowAccumulator,
    GroupAccumulator,
    Groups,
    OverflowInSumError,
)
from strandline.operators.aggregate.aggregates import AggregatePlan, is_nested
from strandline.operators.aggregate.collecting import ARRIVAL_COLUMNS
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.columns import gathered as gathered_batches
from strandline.operators.columns.columns import present
from strandline.operators.columns.rows import arrow_schema, column_reader
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.keys import EncodedKeys, KeyEncoder, canonical_column

GATHER_ROWS: Final = 1 << 18
GATHER_BYTES: Final = 64 << 20
"""Input is gathered up to this much before it is grouped: small record batches are not worth a grouping each."""
FOLD_GROUPS: Final = 1 << 20
FOLD_BYTES: Final = 256 << 20
"""Partial results beyond this go into state before the batch is over."""
SLICE_ROWS: Final = 1 << 16
_FIRST_SLICE: Final = 1 << 13
_SLICE_BYTES: Final = 32 << 20
_ROW: Final = "__sl_row"
_KEY: Final = "__sl_key"
_ID: Final = "__sl_id"

Int64s = npt.NDArray[np.int64]


class Slices:
    """Cuts `count` rows into slices of up to `rows`: short ones at first and where a slice holds too many bytes."""

    def __init__(self, count: int, rows: int | None = None) -> None:
        self._count = count
        self._most = SLICE_ROWS if rows is None else rows
        self.size = min(self._most, _FIRST_SLICE)

    def __iter__(self) -> Iterator[slice]:
        start = 0
        while start < self._count:
            stop = min(start + self.size, self._count)
            yield slice(start, stop)
            start = stop

    def weigh(self, values: Sequence[bytes | None]) -> None:
        """Tell what the slice held."""
        size = sum(map(len, filter(None, values)))
        if size > _SLICE_BYTES:
            self.size = max(1, self.size * _SLICE_BYTES // size)
        elif size < _SLICE_BYTES // 8:
            self.size = min(self._most, self.size * 4)


class Partials:
    """Partial results of a batch, merged as far as memory allows."""

    def __init__(self, merge: Callable[[Sequence[pa.Table]], pa.Table]) -> None:
        self._merge = merge
        self._held: list[pa.Table] = []
        self._groups = self._size = 0

    def add(self, part: pa.Table) -> pa.Table | None:
        """Take one more; gives what has to go into state now because it is too much to be held."""
        self._held.append(part)
        self._groups += part.num_rows
        self._size += part.nbytes
        if self._groups <= FOLD_GROUPS and self._size <= FOLD_BYTES:
            return None
        merged = self._merge(self._held)
        self._held, self._groups, self._size = [merged], merged.num_rows, merged.nbytes
        if self._groups <= FOLD_GROUPS // 2 and self._size <= FOLD_BYTES // 2:
            return None
        self._held, self._groups, self._size = [], 0, 0
        return merged

    def rest(self) -> pa.Table | None:
        """What is left at the end of the batch."""
        return self._merge(self._held) if self._held else None


class Grouping:
    """Aggregates the rows of a batch per key, and per what `leading` adds to the key, such as the pane of a window.

    Stored keys have the leading columns before the key columns, so that state is in their order first.
    """

    def __init__(
        self,
        where: str,
        plan: AggregatePlan,
        struct: StructType,
        key_columns: Sequence[str],
        leading: Sequence[str] = (),
    ) -> None:
        self.where = where
        self.plan = plan
        self.codec = ColumnCodec(plan.stored)
        self._struct = struct
        self._key_columns = list(key_columns)
        self.columns = [*leading, *key_columns, KEY_GROUP_COLUMN]
        """What every table of partial results has beside the accumulators."""
        schema = arrow_schema(struct)
        for name in leading:
            schema = schema.append(pa.field(name, pa.int64()))
        self.encoder = KeyEncoder(schema, [*leading, *key_columns], KEY_GROUP_COLUMN)
        # What Arrow cannot group by itself is grouped by its encoded key.
        self._nested = any(is_nested(struct[name].dataType) for name in key_columns)

    def partial(self, rows: pa.Table) -> pa.Table:
        """One row per key: its columns, its key group and its accumulators."""
        return self._by_key(rows, "partial")

    def merge(self, partials: Sequence[pa.Table]) -> pa.Table:
        """Partial results of several tables, each key once."""
        if len(partials) == 1:
            return partials[0]
        return self._by_key(pa.concat_tables(partials).combine_chunks(), "merge")

    def distinct(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The keys of several tables, each once."""
        rows = pa.concat_tables([table.select(self.columns) for table in tables]).combine_chunks()
        if not self._nested:
            return rows.group_by(self.columns, use_threads=False).aggregate([]).combine_chunks()
        grouped = pa.table(self._keys_of(rows)).group_by(_KEY, use_threads=False).aggregate([(_ROW, "min")])
        return rows.take(grouped.column(f"{_ROW}_min")).combine_chunks()

    def by_id(
        self, step: Literal["partial", "merge"], ids: Int64s, rows: Any, key_of: Callable[[int], object]
    ) -> tuple[Int64s, pa.RecordBatch]:
        """Input rows or accumulators grouped by a number; gives the distinct numbers, ascending, and accumulators.

        `key_of` names the key of a number, for errors.
        """

        def key_at(groups: pa.Table, row: int) -> object:
            return key_of(groups.column(_ID)[row].as_py())

        grouped, columns = self._aggregated({_ID: pa.array(ids)}, rows, step, key_at)
        made = grouped.column(_ID).to_numpy()
        states = pa.RecordBatch.from_arrays(columns, schema=self.plan.stored)
        if (np.diff(made) > 0).all():
            return made, states
        order = np.argsort(made)
        return made[order], states.take(pa.array(order))

    def fold(
        self,
        partial: pa.Table,
        state: str,
        changes: ChangeSet,
        may_exist: Callable[[pa.Table], npt.NDArray[np.bool_]] | None = None,
    ) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
        """Lay partial results over the state, in key order; gives keys and running accumulators by slices.

        `may_exist` says of keys in that order which may have state: only those are read.
        """
        partial = partial.combine_chunks()
        encoded = self.encoder.encode(partial)
        order = encoded.order()
        slices = Slices(len(order))
        for part in slices:
            places = order[part]
            rows = partial.take(pa.array(places)).combine_chunks()
            keys = rows.select(self.columns)
            stored = encoded.take(places).stored(state)
            if may_exist is None:
                old = changes.get_many(stored)
            else:
                old = _read_some(stored, may_exist(keys), changes)
            running = self._combined(old, rows, keys)
            values = self.codec.encode(running)
            changes.put_many(stored, values)
            slices.weigh(values)
            yield keys, running

    def reread(self, keys: pa.Table, state: str, changes: ChangeSet) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
        """The running values of keys that this batch wrote, by slices."""
        encoded: EncodedKeys = self.encoder.encode(keys)
        order = encoded.order()
        slices = Slices(len(order))
        for part in slices:
            values = changes.get_many(encoded.take(order[part]).stored(state))
            running = self.codec.decode([value for value in values if value is not None])
            if running.num_rows != len(values):
                raise StrandlineError(f"{self.where}: state that this batch wrote is missing from its change set")
            slices.weigh(values)
            yield keys.take(pa.array(order[part])), running

    def shown(self, running: pa.RecordBatch) -> list[Any]:
        """The result columns of accumulators."""
        by_name = dict(zip(running.schema.names, running.columns, strict=True))
        return [show(by_name) for show in self.plan.shown]

    def _by_key(self, rows: pa.Table, step: Literal["partial", "merge"]) -> pa.Table:
        def key_of(groups: pa.Table, row: int) -> object:
            return self._key_shown(keys_of(groups), row)

        def keys_of(groups: pa.Table) -> pa.Table:
            if self._nested:
                return rows.select(self.columns).take(groups.column(f"{_ROW}_min"))
            return groups.select(self.columns)

        grouped, columns = self._aggregated(self._keys_of(rows), rows, step, key_of)
        keys = keys_of(grouped)
        made = {name: keys.column(name) for name in self.columns}
        labels = [label for a in self.plan.accumulators for label in a.labels]
        return pa.table(made | dict(zip(labels, columns, strict=True)))

    def _keys_of(self, rows: pa.Table) -> dict[str, Any]:
        if self._nested:
            encoded = self.encoder.encode(rows)
            return {_KEY: pa.array(encoded.stored(""), pa.binary()), _ROW: pa.array(np.arange(rows.num_rows))}
        return {name: canonical_column(flat(rows.column(name))) for name in self.columns}

    def _aggregated(
        self,
        keys: dict[str, Any],
        rows: Any,
        step: Literal["partial", "merge"],
        key_of: Callable[[pa.Table, int], object],
    ) -> tuple[pa.Table, list[Any]]:
        """Group `rows` by `keys`, beside which there may be `_ROW`; gives the groups and their accumulator columns."""
        wanted: list[tuple[str, str]] = []
        table = dict(keys)
        by_group = False
        for accumulator in self.plan.accumulators:
            if isinstance(accumulator, ArrowAccumulator):
                label = accumulator.labels[0]
                table[label] = _prepared(accumulator, rows, step)
                wanted.append((label, accumulator.partial if step == "partial" else accumulator.merge))
            else:
                by_group = True
        group_columns = [name for name in keys if name != _ROW]
        if by_group:
            table[_ROW] = pa.array(np.arange(len(next(iter(keys.values())))))
            wanted.append((_ROW, "list"))
        if _ROW in keys:
            wanted.append((_ROW, "min"))
        grouped = pa.table(table).group_by(group_columns, use_threads=False).aggregate(wanted)
        groups = _groups(flat(grouped.column(f"{_ROW}_list"))) if by_group else None
        columns: list[Any] = []
        functions = dict(wanted)
        for accumulator in self.plan.accumulators:
            if isinstance(accumulator, ArrowAccumulator):
                label = accumulator.labels[0]
                with self._overflow(accumulator, lambda row: key_of(grouped, row)):
                    columns.append(accumulator.settle(flat(grouped.column(f"{label}_{functions[label]}"))))
            elif isinstance(accumulator, GroupAccumulator) and groups is not None:
                names = accumulator.columns if step == "partial" else _names(accumulator, rows)
                inputs = [flat(rows.column(name)) for name in names]
                made = accumulator.partial(inputs, groups) if step == "partial" else accumulator.merge(inputs, groups)
                columns += made
        return grouped, columns

    def _combined(self, values: list[bytes | None], rows: pa.Table, keys: pa.Table) -> pa.RecordBatch:
        accumulators = self.plan.accumulators
        new = [flat(rows.column(label)) for a in accumulators for label in a.labels]
        found = [value for value in values if value is not None]
        if found:
            old = self.codec.decode(found).columns
            known = np.ones(len(values), np.bool_)
            if len(found) < len(values):
                known = present(values)
                places = pa.array(np.cumsum(known) - 1, mask=~known)
                old = [column.take(places) for column in old]
            combined: list[Any] = []
            for accumulator in accumulators:
                at = slice(len(combined), len(combined) + len(accumulator.fields))
                with self._overflow(accumulator, lambda row: self._key_shown(keys, row)):
                    combined += accumulator.combined(old[at], new[at], known)
            new = combined
        return pa.RecordBatch.from_arrays(new, schema=self.plan.stored)

    def _key_shown(self, keys: pa.Table, row: int) -> tuple[Any, ...]:
        types = {field.name: field.dataType for field in self._struct.fields}
        return tuple(column_reader(types[name])(flat(keys.column(name).slice(row, 1)))[0] for name in self._key_columns)

    @contextmanager
    def _overflow(self, accumulator: Accumulator, key_of: Callable[[int], object]) -> Iterator[None]:
        """Turns an overflow of an accumulator into an error that names the key."""
        try:
            yield
        except OverflowInSumError as error:
            raise SchemaError(
                f"{self.where}, key {key_of(error.row)}: sum({accumulator.columns[0]!r}) no longer fits "
                f"{accumulator.fields[0].type}; sum a wider type, such as a decimal or a double"
            ) from None


def gathered(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema, where: str, numbered_in: int | None
) -> Iterator[pa.Table]:
    """Record batches put together to larger tables of the columns of `schema`.

    Rows are numbered as they arrive in the batch `numbered_in`; None where no aggregate needs that.
    """
    row = 0
    for part in gathered_batches(rows, schema, GATHER_ROWS, where, GATHER_BYTES):
        table = pa.Table.from_batches([part])
        if numbered_in is not None:
            numbers = np.full(len(table), numbered_in), np.arange(row, row + len(table))
            for name, column in zip(ARRIVAL_COLUMNS, numbers, strict=True):
                table = table.append_column(name, pa.array(column))
            row += len(table)
        yield table


def flat(column: Any) -> Any:
    """A column in one piece."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _read_some(keys: list[bytes], wanted: npt.NDArray[np.bool_], changes: ChangeSet) -> list[bytes | None]:
    if wanted.all():
        return changes.get_many(keys)
    values: list[bytes | None] = [None] * len(keys)
    places = np.flatnonzero(wanted).tolist()
    if places:
        for place, value in zip(places, changes.get_many([keys[at] for at in places]), strict=True):
            values[place] = value
    return values


def _prepared(accumulator: ArrowAccumulator, rows: Any, step: Literal["partial", "merge"]) -> Any:
    if step == "merge":
        return accumulator.prepare_merge(flat(rows.column(_names(accumulator, rows)[0])))
    if not accumulator.columns:
        return rows.column(KEY_GROUP_COLUMN)
    return accumulator.prepare(flat(rows.column(accumulator.columns[0])))


def _names(accumulator: Accumulator, rows: Any) -> list[str]:
    """What `rows` call the columns of an accumulator: a table of partial results has names of its own for them."""
    return accumulator.labels if isinstance(rows, pa.Table) else [field.name for field in accumulator.fields]


def _groups(lists: Any) -> Groups:
    edges = lists.offsets.to_numpy().astype(np.int64)
    return Groups(lists.values.to_numpy()[edges[0] : edges[-1]], edges - edges[0])
