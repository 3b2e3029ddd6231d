"""Grouping: aggregates the rows of many keys in columns, and merges the results into stored state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.aggregate.accumulators import (
    Accumulator,
    ArrowAccumulator,
    GroupAccumulator,
    Groups,
    OverflowInSumError,
    SumDouble,
)
from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits
from strandline.operators.aggregate.plan import AggregatePlan, is_nested
from strandline.operators.aggregate.slices import Slices
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.lookups import found_mask
from strandline.operators.columns.row_reader import column_reader
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.keys import EncodedKeys, KeyEncoder, canonical_column

_ROW: Final = "__sl_row"
_KEY: Final = "__sl_key"
_ID: Final = "__sl_id"

Int64s = npt.NDArray[np.int64]


class Grouping:
    """Aggregates the rows of a batch per key, or per leading columns and key.

    `leading` names columns such as the pane of a window. They are the first part of a stored key, so that state is
    sorted by them.
    """

    def __init__(
        self,
        where: str,
        plan: AggregatePlan,
        struct: StructType,
        key_columns: Sequence[str],
        leading: Sequence[str] = (),
        limits: GroupingLimits = DEFAULT_LIMITS,
    ) -> None:
        self.where = where
        self.limits = limits
        self.plan = plan
        self.codec = ColumnCodec(plan.stored)
        self._struct = struct
        self._key_columns = list(key_columns)
        self.columns = [*leading, *key_columns, KEY_GROUP_COLUMN]
        """The columns of a table of partial results, without the accumulators."""
        schema = arrow_schema(struct)
        for name in leading:
            schema = schema.append(pa.field(name, pa.int64()))
        self._schema = schema
        self.labels = [label for accumulator in plan.accumulators for label in accumulator.labels]
        """The columns of the accumulators in a table of partial results."""
        self.encoder = KeyEncoder(schema, [*leading, *key_columns], KEY_GROUP_COLUMN)
        # Arrow adds up a column that is not grouped much faster, but doubles in another order.
        self._order_free = all(
            isinstance(a, ArrowAccumulator) and not isinstance(a, SumDouble) for a in plan.accumulators
        )
        # Arrow cannot group by nested columns, so they are grouped by their encoded key.
        self._nested = any(is_nested(struct[name].dataType) for name in key_columns)

    @property
    def schema(self) -> pa.Schema:
        """The schema of a table of partial results."""
        fields = [field for a in self.plan.accumulators for field in a.fields]
        labelled = [field.with_name(label) for label, field in zip(self.labels, fields, strict=True)]
        keys = [pa.field(name, self._schema.field(name).type) for name in self.columns[:-1]]
        return pa.schema([*keys, pa.field(KEY_GROUP_COLUMN, pa.int32()), *labelled])

    def partial(self, rows: pa.Table) -> pa.Table:
        """One row per key: the key columns, the key group and the accumulators; raises `OverflowInSumError`."""
        return self._by_key(rows, "partial")

    def part(self, rows: pa.Table) -> tuple[pa.Table, bool]:
        """The partial result of rows, and whether each key has one row in it.

        Only the sum of all rows of a batch may overflow, not the sum of some of them, for it is chance which rows come
        together. Rows whose sum overflows are returned one by one.
        """
        try:
            return self.partial(rows), True
        except OverflowInSumError:
            _, states = self.by_id("partial", np.arange(rows.num_rows), rows, lambda row: row)
            keys = {name: canonical_column(contiguous(rows.column(name))) for name in self.columns}
            return pa.table(keys | dict(zip(self.labels, states.columns, strict=True))), False

    def merge(self, partials: Sequence[pa.Table]) -> pa.Table:
        """The partial results of several tables, merged so that each key has one row."""
        return self._by_key(pa.concat_tables(partials).combine_chunks(), "merge")

    def distinct(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The distinct keys of several tables."""
        rows = pa.concat_tables([table.select(self.columns) for table in tables]).combine_chunks()
        if not self._nested:
            return rows.group_by(_fields(self.columns), use_threads=False).aggregate([]).combine_chunks()
        grouped = pa.table(self._keys_of(rows)).group_by(_KEY, use_threads=False).aggregate([(_ROW, "min")])
        return rows.take(grouped.column(f"{_ROW}_min")).combine_chunks()

    def by_id(
        self, step: Literal["partial", "merge"], ids: Int64s, rows: Any, key_of: Callable[[int], object]
    ) -> tuple[Int64s, pa.RecordBatch]:
        """Aggregate input rows, or merge accumulators, that have the same number in `ids`.

        Returns the distinct numbers, ascending, and their accumulators. `key_of` tells errors the key of a number.
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
        """Merge partial results into the state, in key order; yields keys and their new accumulators by slices.

        `may_exist` says which keys may have state; only those are read.
        """
        partial = partial.combine_chunks()
        encoded = self.encoder.encode(partial)
        order = encoded.order()
        slices = Slices(len(order), self.limits)
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
            slices.adapt(values)
            yield keys, running

    def reread(self, keys: pa.Table, state: str, changes: ChangeSet) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
        """Yield keys that this batch wrote, and their accumulators, by slices."""
        encoded: EncodedKeys = self.encoder.encode(keys)
        order = encoded.order()
        slices = Slices(len(order), self.limits)
        for part in slices:
            values = changes.get_many(encoded.take(order[part]).stored(state))
            running = self.codec.decode([value for value in values if value is not None])
            if running.num_rows != len(values):
                raise StrandlineError(
                    f"{self.where}: the change set lost state that this batch wrote; this is a bug, please report it"
                )
            slices.adapt(values)
            yield keys.take(pa.array(order[part])), running

    def shown(self, running: pa.RecordBatch) -> list[Any]:
        """The result columns that follow from accumulators."""
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
        return pa.table(made | dict(zip(self.labels, columns, strict=True)))

    def _keys_of(self, rows: pa.Table) -> dict[str, Any]:
        if self._nested:
            encoded = self.encoder.encode(rows)
            return {_KEY: pa.array(encoded.stored(""), pa.binary()), _ROW: pa.array(np.arange(rows.num_rows))}
        return {name: canonical_column(contiguous(rows.column(name))) for name in self.columns}

    def _aggregated(
        self,
        keys: dict[str, Any],
        rows: Any,
        step: Literal["partial", "merge"],
        key_of: Callable[[pa.Table, int], object],
    ) -> tuple[pa.Table, list[Any]]:
        """Group `rows` by the columns `keys`; returns the groups and their accumulator columns.

        If `keys` has a column `_ROW`, it is not grouped by; the groups have its least value. An overflow in a partial
        result is an `OverflowInSumError`, one in a merged result a `SchemaError`.
        """
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
        varying = [name for name in group_columns if not _is_constant(keys[name])]
        if not varying and not self._order_free:
            varying = group_columns[:1]
        grouped = pa.table(table).group_by(_fields(varying), use_threads=False).aggregate(wanted)
        for name in group_columns:
            if name not in varying:
                grouped = grouped.append_column(name, keys[name].take(pa.array(np.zeros(grouped.num_rows, np.int64))))
        groups = _groups(contiguous(grouped.column(f"{_ROW}_list"))) if by_group else None
        columns: list[Any] = []
        functions = dict(wanted)
        for accumulator in self.plan.accumulators:
            if isinstance(accumulator, ArrowAccumulator):
                label = accumulator.labels[0]
                told = self._overflow(accumulator, lambda row: key_of(grouped, row))
                with told if step == "merge" else nullcontext():
                    columns.append(accumulator.to_stored(contiguous(grouped.column(f"{label}_{functions[label]}"))))
            elif isinstance(accumulator, GroupAccumulator) and groups is not None:
                names = accumulator.columns if step == "partial" else _names(accumulator, rows)
                inputs = [contiguous(rows.column(name)) for name in names]
                made = accumulator.partial(inputs, groups) if step == "partial" else accumulator.merge(inputs, groups)
                columns += made
        return grouped, columns

    def _combined(self, values: list[bytes | None], rows: pa.Table, keys: pa.Table) -> pa.RecordBatch:
        accumulators = self.plan.accumulators
        new = [contiguous(rows.column(label)) for label in self.labels]
        found = [value for value in values if value is not None]
        if found:
            old = self.codec.decode(found).columns
            known = np.ones(len(values), np.bool_)
            if len(found) < len(values):
                known = found_mask(values)
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
        return tuple(
            column_reader(types[name])(contiguous(keys.column(name).slice(row, 1)))[0] for name in self._key_columns
        )

    @contextmanager
    def _overflow(self, accumulator: Accumulator, key_of: Callable[[int], object]) -> Iterator[None]:
        """Turn an overflow of an accumulator into an error with the key."""
        try:
            yield
        except OverflowInSumError as error:
            raise SchemaError(
                f"{self.where}, key {key_of(error.row)}: sum({accumulator.columns[0]!r}) no longer fits "
                f"{accumulator.fields[0].type}; cast the column to a wider type first, such as a decimal or a double"
            ) from None


def _fields(names: Sequence[str]) -> list[Any]:
    """Columns to group by. Arrow takes a plain name that begins with a dot or a bracket for a path."""
    return [pc.field(name) for name in names]


def _is_constant(column: Any) -> bool:
    """Whether all rows have the same value; most columns that vary are told by a few rows."""
    count = len(column)
    if column.null_count or count == 0:
        return bool(count) and column.null_count == count
    first = column[0]
    if not all(column[at].equals(first) for at in (count // 3, count // 2, count - 1)):
        return False
    return bool(pc.all(pc.equal(column, first)).as_py())


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
        return accumulator.prepare_merge(contiguous(rows.column(_names(accumulator, rows)[0])))
    if not accumulator.columns:
        return rows.column(KEY_GROUP_COLUMN)
    return accumulator.prepare(contiguous(rows.column(accumulator.columns[0])))


def _names(accumulator: Accumulator, rows: Any) -> list[str]:
    """The names that `rows` has for the columns of an accumulator; a table of partial results has labels."""
    return accumulator.labels if isinstance(rows, pa.Table) else [field.name for field in accumulator.fields]


def _groups(lists: Any) -> Groups:
    edges = lists.offsets.to_numpy().astype(np.int64)
    return Groups(lists.values.to_numpy()[edges[0] : edges[-1]], edges - edges[0])
