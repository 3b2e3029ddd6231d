"""Accumulators: the columns in which a running aggregate is computed, merged and stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.state.coding.keys import canonical_column, float_bits_in_order

_LONG_LIMIT: Final = 1 << 63
_WIDE_DECIMAL: Final = 28
"""Up to this precision the sum of any batch fits 38 digits; beyond it sums are made in 256 bits."""


class OverflowInSumError(Exception):
    """A sum left its type; `row` is where."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows of some columns belong together: group i has the rows `order[edges[i]:edges[i + 1]]`, at least one."""

    order: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many rows each group has."""
        return np.diff(self.edges)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The group of every row, in the sequence of `order`."""
        return np.repeat(np.arange(len(self)), self.counts)


class Accumulator(ABC):
    """The stored columns of an aggregate, `fields`, made of the input columns `columns`. It works on whole columns."""

    def __init__(self, name: str, columns: Sequence[str], fields: Sequence[pa.Field]) -> None:
        self.name = name
        self.columns = tuple(columns)
        self.fields = list(fields)
        # What a table of partial results calls them: no user's column begins like this.
        self.labels = [f"__sl_{field.name}" for field in fields]

    @abstractmethod
    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """The stored columns and the batch's as one; a row of `old` is all null where it is not `known`.

        Raises `OverflowInSumError`.
        """


class GroupAccumulator(Accumulator):
    """An accumulator that is handed the rows group by group, for what Arrow has no function for."""

    @abstractmethod
    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The stored columns for groups of input rows: a row for each group."""

    @abstractmethod
    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The stored columns for groups of partial results: a row for each group."""

    @abstractmethod
    def shown(self, states: list[Any]) -> Any:
        """The result column of stored columns."""

    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """Each pair is a group of partial results."""
        count = len(known)
        pairs = np.arange(2 * count).reshape(2, count).T
        keep = np.column_stack((known, np.ones(count, np.bool_)))
        edges = np.concatenate(([0], np.cumsum(known + 1)))
        both = [pa.concat_arrays([before, now]) for before, now in zip(old, new, strict=True)]
        return self.merge(both, Groups(pairs[keep], edges))


class ArrowAccumulator(Accumulator):
    """One stored column, by one of Arrow's own functions for groups.

    A batch's rows go through `prepare` and the Arrow function `partial` per key; partial results are merged with
    `merge`; `combine` lays the result over the stored value of each key, null standing for "no value yet".
    """

    partial: ClassVar[str]
    merge: ClassVar[str]
    type: pa.DataType

    def __init__(self, name: str, column: str | None, kind: pa.DataType | None = None) -> None:
        if kind is not None:
            self.type = kind
        super().__init__(name, () if column is None else (column,), [pa.field(name, self.type)])

    def prepare(self, column: Any) -> Any:
        """The input column as `partial` takes it."""
        return column

    def prepare_merge(self, column: Any) -> Any:
        """A column of partial results as `merge` takes it."""
        return column

    def settle(self, column: Any) -> Any:
        """The outcome of `partial` or `merge` in the stored type; raises `OverflowInSumError`."""
        return column.cast(self.type)

    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """Row by row; nulls say what is not known."""
        return [self.combine(old[0], new[0])]

    @abstractmethod
    def combine(self, old: Any, new: Any) -> Any:
        """The stored column and the batch's column as one; raises `OverflowInSumError`."""


class CountRows(ArrowAccumulator):
    """How many rows there were, or how many with a value."""

    partial = "count"
    merge = "sum"
    type = pa.int64()

    def combine(self, old: Any, new: Any) -> Any:
        """Their sum."""
        return _either(pc.add(old, new), old, new)


class SumLong(ArrowAccumulator):
    """The sum of integers in 64 bits; as in Spark's ANSI mode an overflow is an error, never a wrong number."""

    partial = "sum"
    merge = "sum"
    type = pa.int64()

    def prepare(self, column: Any) -> Any:
        """As it is where no sum can overflow, as decimals otherwise: Arrow's sum of integers wraps silently."""
        edges = pc.min_max(column).as_py()
        largest = max(abs(edges["min"] or 0), abs(edges["max"] or 0))
        if largest * len(column) < _LONG_LIMIT:
            return column
        return column.cast(pa.decimal128(19, 0))

    def prepare_merge(self, column: Any) -> Any:
        """Partial sums are summed with the same care."""
        return self.prepare(column)

    def settle(self, column: Any) -> Any:
        """Back to 64 bits."""
        return _checked_cast(column, self.type)

    def combine(self, old: Any, new: Any) -> Any:
        """Their sum."""
        try:
            return _either(pc.add_checked(old, new), old, new)
        except pa.ArrowInvalid:
            wide = pa.decimal128(20, 0)
            _checked_cast(pc.add(old.cast(wide), new.cast(wide)), self.type)
            raise


class SumDouble(ArrowAccumulator):
    """The sum of floats, or of the numbers of an average, in 64-bit floats."""

    partial = "sum"
    merge = "sum"
    type = pa.float64()

    def prepare(self, column: Any) -> Any:
        """Any number as a double, as Spark's average does; large integers may round."""
        return column.cast(pa.float64(), safe=False)

    def combine(self, old: Any, new: Any) -> Any:
        """Their sum."""
        return _either(pc.add(old, new), old, new)


class SumDecimal(ArrowAccumulator):
    """The sum of decimals, ten digits wider than its input, as in Spark."""

    partial = "sum"
    merge = "sum"

    def __init__(self, name: str, column: str, precision: int, scale: int) -> None:
        super().__init__(name, column, pa.decimal128(min(38, precision + 10), scale))
        self._scale = scale

    def prepare(self, column: Any) -> Any:
        """In 256 bits where 128 may not be enough."""
        return column if column.type.precision <= _WIDE_DECIMAL else column.cast(pa.decimal256(60, self._scale))

    def prepare_merge(self, column: Any) -> Any:
        """Partial sums are summed with the same care."""
        return self.prepare(column)

    def settle(self, column: Any) -> Any:
        """Back to the stored precision."""
        return _checked_cast(column, self.type)

    def combine(self, old: Any, new: Any) -> Any:
        """Their sum."""
        wide = pa.decimal256(60, self._scale)
        return _either(_checked_cast(pc.add(old.cast(wide), new.cast(wide)), self.type), old, new)


class Extreme(ArrowAccumulator):
    """The least or the greatest value, kept in a type that Arrow can compare: numbers for times and floats."""

    def __init__(self, name: str, column: str, kind: pa.DataType) -> None:
        super().__init__(name, column, _comparable(kind))
        self._shown = kind

    def prepare(self, column: Any) -> Any:
        """The comparable form: a NaN is greater than all numbers, as in Spark."""
        if pa.types.is_floating(self._shown):
            return _float_order(canonical_column(column).view(self.type))
        if pa.types.is_boolean(self._shown):
            return column.cast(self.type)
        return column if column.type == self.type else column.view(self.type)

    def shown(self, column: Any) -> Any:
        """The stored column in the type that the user sees."""
        if pa.types.is_floating(self._shown):
            return _float_order(column).view(self._shown)
        if pa.types.is_boolean(self._shown):
            return column.cast(self._shown)
        return column if column.type == self._shown else column.view(self._shown)


class Least(Extreme):
    """The least value."""

    partial = "min"
    merge = "min"

    def combine(self, old: Any, new: Any) -> Any:
        """The lesser of both."""
        return pc.min_element_wise(old, new, skip_nulls=True)


class Greatest(Extreme):
    """The greatest value."""

    partial = "max"
    merge = "max"

    def combine(self, old: Any, new: Any) -> Any:
        """The greater of both."""
        return pc.max_element_wise(old, new, skip_nulls=True)


def _comparable(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_floating(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if types.is_boolean(kind):
        return pa.int8()
    if types.is_date32(kind):
        return pa.int32()
    return pa.int64() if types.is_timestamp(kind) or types.is_duration(kind) else kind


def _either(both: Any, old: Any, new: Any) -> Any:
    return pc.coalesce(both, old, new) if both.null_count else both


def _float_order(column: Any) -> Any:
    bits = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(float_bits_in_order(np.asarray(bits)), column.type, mask=mask)


def _checked_cast(column: Any, kind: pa.DataType) -> Any:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        for row, value in enumerate(column):
            try:
                value.cast(kind)
            except pa.ArrowInvalid:
                raise OverflowInSumError(row) from None
        raise
