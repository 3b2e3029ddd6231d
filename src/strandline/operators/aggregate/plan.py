"""The plan of an aggregation: its accumulators, and how results follow from them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from strandline.checkpoint.steps import Column, ShownAggregate
from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.aggregate.accumulators import (
    Accumulator,
    ArrowAccumulator,
    CountRows,
    Extreme,
    Greatest,
    GroupAccumulator,
    Least,
    SumDecimal,
    SumDouble,
    SumLong,
)
from strandline.operators.aggregate.arrow_aggregate import GROUP_ID, ArrowAggregate, UserAccumulator
from strandline.operators.aggregate.collecting import ARRIVAL_COLUMNS, ListOfFixed, ListOfText, OneByArrival
from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.aggregate.hyperloglog import ApproxDistinct
from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits
from strandline.operators.columns.declared import column_type, is_collated
from strandline.operators.columns.schemas import arrow_schema
from strandline.pyspark_releases import spark_schema
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.ddl import parse_schema, type_text


class AggregatePlan:
    """Finds the accumulators that aggregates need; raises `JobDefinitionError` if a column or type is wrong."""

    def __init__(
        self,
        where: str,
        input_schema: StructType,
        key_columns: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        limits: GroupingLimits = DEFAULT_LIMITS,
    ) -> None:
        self._where = where
        self._limits = limits
        self._schema = input_schema
        self._known: dict[str, Accumulator] = {}
        self.fields: list[StructField] = []
        self.shown: list[Callable[[dict[str, Any]], Any]] = []
        for name in key_columns:
            self._type_of(name)
        if not aggregates:
            raise JobDefinitionError(f"{where}: there is no aggregate; give at least one, such as n=sl.count()")
        for name, aggregate in aggregates.items():
            if name in key_columns:
                raise JobDefinitionError(f"{where}: {name!r} is a key column; give {aggregate} another name")
            if not isinstance(aggregate, Aggregate):
                raise JobDefinitionError(
                    f"{where}: {name}={aggregate!r} is not an aggregate; use one such as sl.count() or sl.sum('x')"
                )
            self._add(name, aggregate)
        self.accumulators = list(self._known.values())
        self.stored = pa.schema([field for a in self.accumulators for field in a.fields])
        self._check_names()
        used = dict.fromkeys(column for a in self.accumulators for column in a.columns)
        self.numbers_arrivals = not used.keys().isdisjoint(ARRIVAL_COLUMNS)
        self.input_columns = tuple(column for column in used if column not in ARRIVAL_COLUMNS)
        self.described: tuple[Column, ...] = tuple((a.name, self._inputs(a)) for a in self.accumulators)
        """The accumulators for the description of the step: their names, and the types of their input columns."""
        self.results = tuple(self._result(name, aggregate) for name, aggregate in aggregates.items())
        """The aggregates under their names, for the description of the step."""

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before they reach the slot."""
        return all(accumulator.combinable for accumulator in self.accumulators)

    def extended(self, *more: Accumulator) -> AggregatePlan:
        """The plan with further accumulators, which no result shows."""
        plan = copy(self)
        plan.accumulators = [*self.accumulators, *more]
        plan.stored = pa.schema([field for a in plan.accumulators for field in a.fields])
        return plan

    def _result(self, name: str, aggregate: Aggregate) -> ShownAggregate:
        column = aggregate.column
        kind = "" if column is None else type_text(self._type_of(column))
        return ShownAggregate(name, aggregate.function, column, kind, aggregate.ignore_nulls)

    def _inputs(self, accumulator: Accumulator) -> str:
        types = [type_text(self._type_of(name)) for name in accumulator.columns if name not in ARRIVAL_COLUMNS]
        if isinstance(accumulator, UserAccumulator):
            arguments = ", ".join(map(" ".join, zip(accumulator.columns, types, strict=True)))
            # Spark's types do not tell all of Arrow's apart, for instance not the units of timestamps.
            usual = arrow_schema(spark_schema(pa.schema(accumulator.fields)))
            others = [f for f, known in zip(accumulator.fields, usual, strict=True) if f.type != known.type]
            kept = f" with {', '.join(f'{field.name} {field.type}' for field in others)}" if others else ""
            return f"{accumulator.code_name}({arguments}){kept}"
        return ", ".join(types)

    def _add(self, name: str, aggregate: Aggregate) -> None:
        column, function = aggregate.column, aggregate.function
        if aggregate.code is not None:
            self._user(name, aggregate.code, aggregate.columns)
            return
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
        elif function == "avg":
            self._average(name, column, kind)
        else:
            self._collecting(name, aggregate, column, kind)

    def _extreme(self, name: str, make: type[Extreme], column: str, kind: DataType) -> None:
        if is_nested(kind) or isinstance(kind, NullType):
            raise self._wrong("min or max", column, kind, "a number, string, date or time")
        self._refuse_collation("min or max", column, kind)
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

    def _collecting(self, name: str, aggregate: Aggregate, column: str, kind: DataType) -> None:
        function = aggregate.function
        if is_nested(kind) or isinstance(kind, NullType):
            raise self._wrong(function, column, kind, "a number, string, binary, boolean, date or time")
        arrow = arrow_schema(StructType([StructField(column, kind)])).field(0).type
        label = f"{function}:{column}"
        if function in ("first", "last"):
            label = f"{label}:known" if aggregate.ignore_nulls else label
            self._group(name, OneByArrival(label, column, arrow, function == "last", aggregate.ignore_nulls), kind)
        elif function == "collect_list":
            make = ListOfText if isinstance(kind, StringType | BinaryType) else ListOfFixed
            self._group(name, make(label, column, arrow), ArrayType(kind, containsNull=False))
        else:
            self._refuse_collation(function, column, kind)
            self._group(name, ApproxDistinct(label, column, self._limits.sketch_bytes), LongType())

    def _user(self, name: str, code: ArrowAggregate, columns: tuple[str, ...]) -> None:
        if not columns:
            raise JobDefinitionError(f"{self._where}: {name}={type(code).__name__}()() needs a column")
        for column in columns:
            self._type_of(column)
            if column == GROUP_ID:
                raise JobDefinitionError(
                    f"{self._where}: {name}: an input column must not be called {GROUP_ID!r}; rename it"
                )
        try:
            ColumnCodec(code.state_schema)
            kind = parse_schema(f"value {code.result_type}")
            result = arrow_schema(kind).field(0).type
        except (AttributeError, SchemaError, JobDefinitionError) as error:
            raise JobDefinitionError(f"{self._where}: {name}: {type(code).__name__}: {error}") from error
        if GROUP_ID in code.state_schema.names:
            raise JobDefinitionError(
                f"{self._where}: {name}: a column of its state must not be called {GROUP_ID!r}; rename it"
            )
        self._group(name, UserAccumulator(f"user:{name}", code, columns, result), kind[0].dataType)

    def _group(self, name: str, made: GroupAccumulator, kind: DataType) -> None:
        known = self._known.setdefault(made.name, made)
        if known.columns != made.columns:
            raise self._ambiguous(known.columns[0], made.columns[0])
        nullable = not isinstance(made, ListOfFixed | ListOfText | ApproxDistinct)
        self._show(name, kind, lambda stored: made.shown([stored[f.name] for f in made.fields]), nullable)

    def _need(self, label: str, make: type[ArrowAccumulator], column: str | None) -> str:
        if label not in self._known:
            self._known[label] = make(label, column)
        return label

    def _check_names(self) -> None:
        """Some accumulators store further columns beside the one of their name; a user's column may have that name."""
        owners: dict[str, Accumulator] = {}
        for accumulator in self.accumulators:
            for field in accumulator.fields:
                other = owners.setdefault(field.name, accumulator)
                if other is not accumulator:
                    raise self._ambiguous(other.columns[0], accumulator.columns[0])

    def _ambiguous(self, one: str, other: str) -> JobDefinitionError:
        return JobDefinitionError(
            f"{self._where}: the names of the columns {one!r} and {other!r} are too similar: their aggregates would be "
            "stored under the same name; rename the column with the colon"
        )

    def _show(self, name: str, kind: DataType, show: Callable[[dict[str, Any]], Any], nullable: bool = True) -> None:
        self.fields.append(StructField(name, kind, nullable))
        self.shown.append(show)

    def _type_of(self, column: str) -> DataType:
        return column_type(self._schema, column, self._where)

    def _refuse_collation(self, function: str, column: str, kind: DataType) -> None:
        if is_collated(kind):
            wanted = f"texts that are compared by their bytes; convert the column with collate({column}, 'UTF8_BINARY')"
            raise self._wrong(function, column, kind, wanted)

    def _wrong(self, function: str, column: str, kind: DataType, wanted: str) -> JobDefinitionError:
        return JobDefinitionError(
            f"{self._where}: {function} of column {column!r} of type {kind.simpleString()}; it takes {wanted}"
        )


def is_nested(kind: DataType) -> bool:
    """Whether a type is a struct, an array or a map."""
    return isinstance(kind, StructType | ArrayType | MapType)
