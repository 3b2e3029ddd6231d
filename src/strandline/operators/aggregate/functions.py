"""The aggregates that a user names in a job: `count`, `sum` and so on."""

from __future__ import annotations

from typing import Literal

import msgspec

from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate

Function = Literal[
    "count", "sum", "min", "max", "avg", "first", "last", "collect_list", "approx_count_distinct", "user"
]


class Aggregate(msgspec.Struct, frozen=True):
    """An aggregate over columns, made by `count`, `sum` and so on, or by calling an `ArrowAggregate`."""

    function: Function
    column: str | None = None
    more_columns: tuple[str, ...] = ()
    ignore_nulls: bool = False
    code: ArrowAggregate | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All input columns."""
        return () if self.column is None else (self.column, *self.more_columns)

    def __str__(self) -> str:
        name = self.function if self.code is None else type(self.code).__name__
        return f"{name}({', '.join(map(repr, self.columns))})"


def count(column: str | None = None) -> Aggregate:
    """The number of rows, or of rows where `column` is not null."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """The sum of a numeric column: long for integers, double for floats, a wider decimal for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """The least value of a column; NaN counts as greater than any number, and -0.0 as less than 0.0."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """The greatest value of a column; NaN counts as greater than any number, and -0.0 as less than 0.0."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """The average of a numeric column, as double."""
    return Aggregate("avg", column)


def first(column: str, ignore_nulls: bool = False) -> Aggregate:
    """The value of the row that arrived first, which may be null; with `ignore_nulls`, the first value that is not."""
    return Aggregate("first", column, ignore_nulls=ignore_nulls)


def last(column: str, ignore_nulls: bool = False) -> Aggregate:
    """The value of the row that arrived last, which may be null; with `ignore_nulls`, the last value that is not."""
    return Aggregate("last", column, ignore_nulls=ignore_nulls)


def collect_list(column: str) -> Aggregate:
    """All values of a column except nulls, as an array, in the order of arrival.

    Sliding and session windows join the arrays of their parts in the order of event time.
    """
    return Aggregate("collect_list", column)


def approx_count_distinct(column: str) -> Aggregate:
    """An estimate of the number of distinct values, with a standard error of 1.6 %, in at most 4 kB per key."""
    return Aggregate("approx_count_distinct", column)
