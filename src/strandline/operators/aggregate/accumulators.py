"""Accumulators: the columns in which an aggregate is computed, merged and stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.state.coding.keys import float_bits_in_order

_LONG_LIMIT: Final = 1 << 63
_WHOLE_LIMIT: Final = 1 << 53
_WIDE_DECIMAL: Final = 28
"""Up to this precision the sum of a batch fits in 38 digits. Beyond it, sums are computed in 256 bits."""


class OverflowInSumError(Exception):
    """A sum no longer fits its type, in row `row`."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of rows: group i has the rows `order[edges[i]:edges[i + 1]]`, at least one."""

    order: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of rows of each group."""
        return np.diff(self.edges)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The group of each row of `order`."""
        return np.repeat(np.arange(len(self)), self.counts)


class Accumulator(ABC):
    """Computes the stored columns of an aggregate, `fields`, from the input columns, `columns`, for many keys."""

    combinable: ClassVar[bool] = False
    """Whether rows may be combined before they reach the slot: their order and their distribution do not matter."""

    def __init__(self, name: str, columns: Sequence[str], fields: Sequence[pa.Field]) -> None:
        self.name = name
        self.columns = tuple(columns)
        self.fields = list(fields)
        # The names of the fields in a table of partial results. No column of a user begins with this prefix.
        self.labels = [f"__sl_{field.name}" for field in fields]

    def exact(self, inputs: Sequence[Any]) -> bool:
        """Whether the partial results of these input columns are the same in whatever order the rows are added up."""
        return True

    @abstractmethod
    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """The stored columns, merged with those of the batch. Where not `known`, a row of `old` is null in all columns.

        Raises `OverflowInSumError`.
        """


class GroupAccumulator(Accumulator):
    """An accumulator that computes groups itself, where Arrow has no aggregate function for it."""

    @abstractmethod
    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The stored columns for groups of input rows, one row per group."""

    @abstractmethod
    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The stored columns for groups of partial results, one row per group."""

    @abstractmethod
    def shown(self, states: list[Any]) -> Any:
        """The result column that follows from the stored columns."""

    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """Merge each pair of old and new as a group of partial results."""
        count = len(known)
        pairs = np.arange(2 * count).reshape(2, count).T
        keep = np.column_stack((known, np.ones(count, np.bool_)))
        edges = np.concatenate(([0], np.cumsum(known + 1)))
        both = [pa.concat_arrays([before, now]) for before, now in zip(old, new, strict=True)]
        return self.merge(both, Groups(pairs[keep], edges))


class ArrowAccumulator(Accumulator):
    """An accumulator of one stored column, computed with Arrow's aggregate functions.

    `prepare` and the Arrow function `partial` turn the rows of a batch into partial results per key. The Arrow function
    `merge` merges partial results. `combine` merges the result with the stored value; null means "no value yet".
    """

    combinable = True
    partial: ClassVar[str]
    merge: ClassVar[str]
    type: pa.DataType

    def __init__(self, name: str, column: str | None, kind: pa.DataType | None = None) -> None:
        if kind is not None:
            self.type = kind
        super().__init__(name, () if column is None else (column,), [pa.field(name, self.type)])

    def prepare(self, column: Any) -> Any:
        """The input column in the form that `partial` takes."""
        return column

    def prepare_merge(self, column: Any) -> Any:
        """A column of partial results in the form that `merge` takes."""
        return column

    def to_stored(self, column: Any) -> Any:
        """The result of `partial` or `merge`, cast to the stored type; raises `OverflowInSumError`."""
        return column.cast(self.type)

    def combined(self, old: list[Any], new: list[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
        """Combine old and new row by row."""
        return [self.combine(old[0], new[0])]

    @abstractmethod
    def combine(self, old: Any, new: Any) -> Any:
        """The stored column, merged with the batch's column; raises `OverflowInSumError`."""


class CountRows(ArrowAccumulator):
    """The number of rows, or of rows with a value."""

    partial = "count"
    merge = "sum"
    type = pa.int64()

    def combine(self, old: Any, new: Any) -> Any:
        """The sum of both."""
        return _either(pc.add(old, new), old, new)


class SumLong(ArrowAccumulator):
    """The sum of integers in 64 bits. As in Spark's ANSI mode, an overflow is an error."""

    partial = "sum"
    merge = "sum"
    type = pa.int64()

    def prepare(self, column: Any) -> Any:
        """The column itself if no sum can overflow, otherwise decimals: Arrow's sum of integers wraps silently."""
        edges = pc.min_max(column).as_py()
        largest = max(abs(edges["min"] or 0), abs(edges["max"] or 0))
        if largest * len(column) < _LONG_LIMIT:
            return column
        return column.cast(pa.decimal128(19, 0))

    def prepare_merge(self, column: Any) -> Any:
        """Partial sums can overflow, too."""
        return self.prepare(column)

    def to_stored(self, column: Any) -> Any:
        """Back to 64 bits."""
        return _checked_cast(column, self.type)

    def combine(self, old: Any, new: Any) -> Any:
        """The sum of both."""
        try:
            return _either(pc.add_checked(old, new), old, new)
        except pa.ArrowInvalid:
            wide = pa.decimal128(20, 0)
            _checked_cast(pc.add(old.cast(wide), new.cast(wide)), self.type)
            raise


class SumDouble(ArrowAccumulator):
    """The sum of floats, or of the numbers of an average, as a double."""

    partial = "sum"
    merge = "sum"
    type = pa.float64()

    def prepare(self, column: Any) -> Any:
        """The numbers as doubles, as in Spark's average; large integers may be rounded."""
        return column.cast(pa.float64(), safe=False)

    def exact(self, inputs: Sequence[Any]) -> bool:
        """Sums of doubles depend on the order, unless all of them are whole numbers below 2 ** 53."""
        column = inputs[0]
        edges = pc.min_max(column).as_py()
        largest = max(abs(edges["min"] or 0), abs(edges["max"] or 0))
        if not largest * len(column) < _WHOLE_LIMIT:
            return False
        if not pa.types.is_floating(column.type):
            return True
        # A NaN is equal to nothing. `min_max` passes over it.
        return bool(pc.all(pc.equal(pc.trunc(column), column)).as_py() is not False)

    def combine(self, old: Any, new: Any) -> Any:
        """The sum of both."""
        return _either(pc.add(old, new), old, new)


class SumDecimal(ArrowAccumulator):
    """The sum of decimals, with ten digits more than its input, as in Spark."""

    partial = "sum"
    merge = "sum"

    def __init__(self, name: str, column: str, precision: int, scale: int) -> None:
        super().__init__(name, column, pa.decimal128(min(38, precision + 10), scale))
        self._scale = scale

    def prepare(self, column: Any) -> Any:
        """The column with 256 bits, if 128 bits may be too few."""
        return column if column.type.precision <= _WIDE_DECIMAL else column.cast(pa.decimal256(60, self._scale))

    def prepare_merge(self, column: Any) -> Any:
        """Partial sums can overflow, too."""
        return self.prepare(column)

    def to_stored(self, column: Any) -> Any:
        """Back to the stored precision."""
        return _checked_cast(column, self.type)

    def combine(self, old: Any, new: Any) -> Any:
        """The sum of both."""
        wide = pa.decimal256(60, self._scale)
        return _either(_checked_cast(pc.add(old.cast(wide), new.cast(wide)), self.type), old, new)


class Extreme(ArrowAccumulator):
    """The least or the greatest value, stored in a type that Arrow compares in Spark's order."""

    def __init__(self, name: str, column: str, kind: pa.DataType) -> None:
        super().__init__(name, column, _comparable(kind))
        self._shown = kind

    def prepare(self, column: Any) -> Any:
        """The column in the stored type. As in Spark, NaN is greater than all numbers, and -0.0 keeps its sign.

        Of 0.0 and -0.0 Spark takes the one that it sees first. Here -0.0 is the lesser, whatever the order of the rows.
        """
        if pa.types.is_floating(self._shown):
            one_nan = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)
            return _float_order(one_nan.view(self.type))
        if pa.types.is_boolean(self._shown):
            return column.cast(self.type)
        return column if column.type == self.type else column.view(self.type)

    def shown(self, column: Any) -> Any:
        """The stored column in the type of the input."""
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
