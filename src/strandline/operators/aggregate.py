"""Running aggregates per key, computed on Arrow columns and never row by row."""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    MapType,
    NullType,
    StructField,
    StructType,
)

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError
from strandline.operators.accumulators import (
    Accumulator,
    CountRows,
    Extreme,
    Greatest,
    Least,
    OverflowInSumError,
    SumDecimal,
    SumDouble,
    SumLong,
)
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.rows import arrow_schema, column_reader, fitted
from strandline.state.changes import ChangeSet
from strandline.state.codec import ColumnCodec
from strandline.state.descriptors import StateDescriptor
from strandline.state.keys import KeyEncoder, canonical_column

STATE_NAME: Final = "accumulators"
_GATHER_ROWS: Final = 1 << 18
_GATHER_BYTES: Final = 64 << 20
"""Input is gathered up to this much before it is grouped: small record batches are not worth a grouping each."""
_FOLD_GROUPS: Final = 1 << 20
_FOLD_BYTES: Final = 256 << 20
"""Partial results beyond this go into state before the batch is over."""
_SLICE_ROWS: Final = 1 << 16
_ROW: Final = "__sl_row"
_KEY: Final = "__sl_key"


class Aggregate(msgspec.Struct, frozen=True):
    """What is computed over a column; made by `count`, `sum`, `min`, `max` and `avg`."""

    function: Literal["count", "sum", "min", "max", "avg"]
    column: str | None = None

    def __str__(self) -> str:
        return f"{self.function}({'' if self.column is None else repr(self.column)})"


def count(column: str | None = None) -> Aggregate:
    """The number of rows, or of rows where `column` is not null."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """The sum of a numeric column: long for integers, double for floats, a wider decimal for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """The least value of a column; NaN counts as greater than any number."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """The greatest value of a column; NaN counts as greater than any number."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """The average of a numeric column, as double."""
    return Aggregate("avg", column)


class AggregateOperator(Operator):
    """Emits, for every batch, one row per key that changed: the key columns, then the running values."""

    sorted_input = False

    def __init__(
        self, uid: str, key_columns: Sequence[str], input_schema: StructType, aggregates: Mapping[str, Aggregate]
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.aggregates = dict(aggregates)
        self.input_struct = input_schema
        plan = AggregatePlan(f"operator {uid!r}", input_schema, self.key_columns, self.aggregates)
        self.output_struct = StructType([*(input_schema[name] for name in self.key_columns), *plan.fields])
        self.output_schema = arrow_schema(self.output_struct)
        self._plan = plan
        self._where = f"operator {uid!r}"
        # What Arrow cannot group by itself is grouped by its encoded key.
        self._nested_keys = any(_is_nested(input_schema[name].dataType) for name in self.key_columns)
        needed = [*self.key_columns, *(a.column for a in plan.accumulators if a.column is not None)]
        whole = arrow_schema(input_schema)
        self._input = pa.schema([whole.field(name) for name in dict.fromkeys(needed)]).append(
            pa.field(KEY_GROUP_COLUMN, pa.int32())
        )
        self._encoder = KeyEncoder(self._input, self.key_columns, KEY_GROUP_COLUMN)
        self._codec = ColumnCodec(plan.stored)
        self._group_columns = [_KEY] if self._nested_keys else [*self.key_columns, KEY_GROUP_COLUMN]

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what it was made of travels to the slots."""
        return AggregateOperator, (self.uid, self.key_columns, self.input_struct, self.aggregates)

    def open(self, info: SubtaskInfo) -> None:
        """Remember where this runs."""
        self._where = f"operator {info.uid!r}, subtask {info.subtask}"

    def states(self) -> list[StateDescriptor]:
        """The one state that holds all accumulators of a key."""
        return [StateDescriptor(STATE_NAME, "aggregate", from_arrow_schema(self._plan.stored).json())]

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Aggregate the batch, lay it over the state and yield one row per key of the batch."""
        partials: list[pa.Table] = []
        groups = size = 0
        folded: list[pa.Table] = []
        for gathered in self._gather(rows):
            part = self._partial(gathered)
            partials.append(part)
            groups += part.num_rows
            size += part.nbytes
            if groups > _FOLD_GROUPS or size > _FOLD_BYTES:
                merged = self._merge(partials)
                partials, groups, size = [merged], merged.num_rows, merged.nbytes
                if groups > _FOLD_GROUPS // 2 or size > _FOLD_BYTES // 2:
                    for keys, _ in self._fold(merged, changes):
                        folded.append(keys)
                    partials, groups, size = [], 0, 0
        if partials:
            for keys, values in self._fold(self._merge(partials), changes):
                if folded:
                    folded.append(keys)
                else:
                    yield from self._output(keys, values)
        if folded:
            yield from self._reread(folded, changes)

    def _gather(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        count = size = 0
        for incoming in rows:
            part = fitted(incoming, self._input, self._where)
            if part.num_rows == 0:
                continue
            held.append(part)
            count += part.num_rows
            size += part.nbytes
            if count >= _GATHER_ROWS or size >= _GATHER_BYTES:
                yield pa.Table.from_batches(held).combine_chunks()
                held, count, size = [], 0, 0
        if held:
            yield pa.Table.from_batches(held).combine_chunks()

    def _partial(self, rows: pa.Table) -> pa.Table:
        """One row per key: its columns, its key group and its accumulators."""
        columns = self._keys_of(rows)
        for accumulator in self._plan.accumulators:
            if accumulator.column is None:
                columns[accumulator.label] = rows.column(KEY_GROUP_COLUMN)
            else:
                columns[accumulator.label] = accumulator.prepare(_flat(rows.column(accumulator.column)))
        return self._grouped(rows, columns, "partial")

    def _merge(self, partials: list[pa.Table]) -> pa.Table:
        if len(partials) == 1:
            return partials[0]
        rows = pa.concat_tables(partials).combine_chunks()
        columns = self._keys_of(rows)
        for accumulator in self._plan.accumulators:
            columns[accumulator.label] = accumulator.prepare_merge(_flat(rows.column(accumulator.label)))
        return self._grouped(rows, columns, "merge")

    def _keys_of(self, rows: pa.Table) -> dict[str, Any]:
        if self._nested_keys:
            encoded = self._encoder.encode(rows)
            return {_KEY: pa.array(encoded.stored(""), pa.binary()), _ROW: pa.array(np.arange(rows.num_rows))}
        keys = {name: canonical_column(_flat(rows.column(name))) for name in self.key_columns}
        return {**keys, KEY_GROUP_COLUMN: rows.column(KEY_GROUP_COLUMN)}

    def _grouped(self, rows: pa.Table, columns: dict[str, Any], step: Literal["partial", "merge"]) -> pa.Table:
        accumulators = self._plan.accumulators
        wanted = [(a.label, a.partial if step == "partial" else a.merge) for a in accumulators]
        firsts = [(_ROW, "min")] if self._nested_keys else []
        grouping = pa.table(columns).group_by(self._group_columns, use_threads=False)
        grouped = grouping.aggregate([*wanted, *firsts])
        if self._nested_keys:
            keys = rows.select([*self.key_columns, KEY_GROUP_COLUMN]).take(grouped.column(f"{_ROW}_min"))
        else:
            keys = grouped.select(self._group_columns)
        made = {name: keys.column(name) for name in keys.column_names}
        for accumulator, (label, function) in zip(accumulators, wanted, strict=True):
            with _named_overflow(self, accumulator, keys):
                made[label] = accumulator.settle(_flat(grouped.column(f"{label}_{function}")))
        return pa.table(made)

    def _fold(self, partial: pa.Table, changes: ChangeSet) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
        """Lay partial results over the state, in key order; gives keys and running accumulators by slices."""
        partial = partial.combine_chunks()
        encoded = self._encoder.encode(partial)
        order = encoded.order()
        labels = [a.label for a in self._plan.accumulators]
        for start in range(0, len(order), _SLICE_ROWS):
            places = order[start : start + _SLICE_ROWS]
            rows = partial.take(pa.array(places)).combine_chunks()
            keys = rows.select([*self.key_columns, KEY_GROUP_COLUMN])
            stored = encoded.take(places).stored(STATE_NAME)
            new = [_flat(rows.column(label)) for label in labels]
            running = self._combined(changes.get_many(stored), new, keys)
            changes.put_many(stored, self._codec.encode(running))
            yield keys, running

    def _combined(self, values: list[bytes | None], new: list[Any], keys: pa.Table) -> pa.RecordBatch:
        known = [value for value in values if value is not None]
        if known:
            old = self._codec.decode(known).columns
            if len(known) < len(values):
                present = np.fromiter((value is not None for value in values), np.bool_, len(values))
                places = pa.array(np.cumsum(present) - 1, mask=~present)
                old = [column.take(places) for column in old]
            combined = []
            for accumulator, before, now in zip(self._plan.accumulators, old, new, strict=True):
                with _named_overflow(self, accumulator, keys):
                    combined.append(accumulator.combine(before, now))
            new = combined
        return pa.RecordBatch.from_arrays(new, schema=self._plan.stored)

    def _reread(self, folded: list[pa.Table], changes: ChangeSet) -> Iterator[pa.RecordBatch]:
        """The running values of keys that went into state in several folds."""
        rows = pa.concat_tables(folded).combine_chunks()
        if self._nested_keys:
            grouped = pa.table(self._keys_of(rows)).group_by(_KEY, use_threads=False).aggregate([(_ROW, "min")])
            keys = rows.take(grouped.column(f"{_ROW}_min")).combine_chunks()
        else:
            keys = rows.group_by(self._group_columns, use_threads=False).aggregate([]).combine_chunks()
        encoded = self._encoder.encode(keys)
        order = encoded.order()
        for start in range(0, len(order), _SLICE_ROWS):
            places = order[start : start + _SLICE_ROWS]
            values = changes.get_many(encoded.take(places).stored(STATE_NAME))
            running = self._codec.decode([value for value in values if value is not None])
            if running.num_rows != len(values):
                raise StrandlineError(f"{self._where}: state that this batch wrote is missing from its change set")
            yield from self._output(keys.take(pa.array(places)), running)

    def _output(self, keys: pa.Table, running: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        columns = [_flat(keys.column(name)) for name in self.key_columns]
        by_name = dict(zip(running.schema.names, running.columns, strict=True))
        columns += [show(by_name) for show in self._plan.shown]
        yield pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def _key_shown(self, keys: pa.Table, row: int) -> tuple[Any, ...]:
        types = {field.name: field.dataType for field in self.input_struct.fields}
        return tuple(column_reader(types[name])(_flat(keys.column(name).slice(row, 1)))[0] for name in self.key_columns)


@contextmanager
def _named_overflow(operator: AggregateOperator, accumulator: Accumulator, keys: pa.Table) -> Iterator[None]:
    """Turns an overflow of an accumulator into an error that names the key."""
    try:
        yield
    except OverflowInSumError as error:
        raise SchemaError(
            f"{operator._where}, key {operator._key_shown(keys, error.row)}: sum({accumulator.column!r}) "
            f"no longer fits {accumulator.type}; sum a wider type, such as a decimal or a double"
        ) from None


class AggregatePlan:
    """Which accumulators some aggregates need, and how results are shown; all type errors are found here."""

    def __init__(
        self, where: str, input_schema: StructType, key_columns: Sequence[str], aggregates: Mapping[str, Aggregate]
    ) -> None:
        self._where = where
        self._schema = input_schema
        self._known: dict[str, Accumulator] = {}
        self.fields: list[StructField] = []
        self.shown: list[Callable[[dict[str, Any]], Any]] = []
        for name in key_columns:
            self._type_of(name)
        if not aggregates:
            raise JobDefinitionError(f"{where}: no aggregate given, such as n=sl.count()")
        for name, aggregate in aggregates.items():
            if name in key_columns:
                raise JobDefinitionError(f"{where}: {name!r} is a key column; give {aggregate} another name")
            if not isinstance(aggregate, Aggregate):
                raise JobDefinitionError(
                    f"{where}: {name}={aggregate!r} is no aggregate such as sl.count() or sl.sum('x')"
                )
            self._add(name, aggregate)
        self.accumulators = list(self._known.values())
        self.stored = pa.schema([pa.field(a.name, a.type) for a in self.accumulators])

    def _add(self, name: str, aggregate: Aggregate) -> None:
        column, function = aggregate.column, aggregate.function
        kind = None if column is None else self._type_of(column)
        if function == "count":
            label = self._need("count" if column is None else f"count:{column}", CountRows, column)
            self._show(name, LongType(), lambda stored: stored[label], nullable=False)
            return
        if column is None or kind is None:
            raise JobDefinitionError(f"{self._where}: {name}={function}() needs a column")
        if function in ("min", "max"):
            self._extreme(name, Least if function == "min" else Greatest, column, kind)
        elif function == "sum":
            self._sum(name, column, kind)
        else:
            self._average(name, column, kind)

    def _extreme(self, name: str, make: type[Extreme], column: str, kind: DataType) -> None:
        if _is_nested(kind) or isinstance(kind, NullType):
            raise self._wrong("min or max", column, kind, "a number, string, date or time")
        arrow = arrow_schema(StructType([StructField(column, kind)])).field(0).type
        extreme = make(f"{make.partial}:{column}", column, arrow)
        self._known.setdefault(extreme.name, extreme)
        self._show(name, kind, lambda stored: extreme.shown(stored[extreme.name]))

    def _sum(self, name: str, column: str, kind: DataType) -> None:
        result: DataType
        label = f"sum:{column}"
        if isinstance(kind, DecimalType):
            self._known.setdefault(label, SumDecimal(label, column, kind.precision, kind.scale))
            result = DecimalType(builtins.min(38, kind.precision + 10), kind.scale)
        elif isinstance(kind, IntegralType):
            self._need(label, SumLong, column)
            result = LongType()
        elif isinstance(kind, FractionalType):
            self._need(label, SumDouble, column)
            result = DoubleType()
        else:
            raise self._wrong("sum", column, kind, "a number")
        self._show(name, result, lambda stored: stored[label])

    def _average(self, name: str, column: str, kind: DataType) -> None:
        if isinstance(kind, DecimalType):
            raise self._wrong("avg", column, kind, "an integer or a float; cast the column to double")
        if not isinstance(kind, IntegralType | FractionalType):
            raise self._wrong("avg", column, kind, "a number")
        label = f"sum:{column}" if isinstance(kind, FractionalType) else f"double:{column}"
        total = self._need(label, SumDouble, column)
        number = self._need(f"count:{column}", CountRows, column)
        self._show(name, DoubleType(), lambda stored: pc.divide(stored[total], stored[number].cast(pa.float64())))

    def _need(self, label: str, make: type[Accumulator], column: str | None) -> str:
        if label not in self._known:
            self._known[label] = make(label, column)
        return label

    def _show(self, name: str, kind: DataType, show: Callable[[dict[str, Any]], Any], nullable: bool = True) -> None:
        self.fields.append(StructField(name, kind, nullable))
        self.shown.append(show)

    def _type_of(self, column: str) -> DataType:
        names = self._schema.fieldNames()
        if column in names:
            return self._schema[column].dataType
        near = difflib.get_close_matches(column, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise JobDefinitionError(f"{self._where}: no column {column!r}; {hint}")

    def _wrong(self, function: str, column: str, kind: DataType, wanted: str) -> JobDefinitionError:
        return JobDefinitionError(
            f"{self._where}: {function} of column {column!r} of type {kind.simpleString()}: it takes {wanted}"
        )


def _is_nested(kind: DataType) -> bool:
    return isinstance(kind, StructType | ArrayType | MapType)


def _flat(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
