"""The plan of a join: its input columns, the columns that are stored of each side, and its output columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa
from pyspark.sql.types import (
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from strandline.errors import JobDefinitionError
from strandline.operators.columns.declared import check_time_column, column_type
from strandline.operators.columns.schemas import arrow_schema

JoinType = Literal["inner", "left", "right", "full"]
SIDE_COLUMN: Final = "__sl_side"
LEFT: Final = 0
RIGHT: Final = 1
_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True)
class JoinColumn:
    """An input column of the operator, and the column of each side that fills it (None: it is null for that side).

    The planner projects each side to these columns, cast to `data_type`, adds `SIDE_COLUMN` (`LEFT` or `RIGHT`), and
    makes the union of both.
    """

    name: str
    data_type: DataType
    left: str | None
    right: str | None


class JoinPlan:
    """Checks the arguments of a join and plans its columns; raises `JobDefinitionError` if an argument is wrong.

    The output has the columns of the left side, then those of the right side. A key column with the same name on both
    sides comes once, at its place on the left, and has a value even if the row has no partner. Another column with the
    same name on both sides is an error.
    """

    def __init__(
        self,
        uid: str,
        left_keys: Sequence[str],
        right_keys: Sequence[str],
        schemas: tuple[StructType, StructType],
        times: tuple[str | None, str | None],
        how: JoinType,
        bounds_ms: tuple[int, int] | None,
    ) -> None:
        self._where = f"operator {uid!r}"
        left, right = schemas
        self.key_columns = tuple(left_keys)
        self.right_keys = tuple(right_keys)
        self.schemas, self.times, self.how, self.bounds_ms = schemas, times, how, bounds_ms
        self._check_how(how, times, bounds_ms)
        types = self._key_types(left_keys, right_keys, schemas)
        for schema, time in zip(schemas, times, strict=True):
            if time is not None:
                check_time_column(schema, time, self._where)
        shared = {a: kind for a, b, kind in zip(left_keys, right_keys, types, strict=True) if a == b}
        clashes = [name for name in left.fieldNames() if name in right.fieldNames() and name not in shared]
        if clashes:
            raise JobDefinitionError(
                f"{self._where}: both sides have a column {clashes[0]!r}; rename it on one side before the join"
            )
        keys = [JoinColumn(a, kind, a, b) for a, b, kind in zip(left_keys, right_keys, types, strict=True)]
        own: tuple[list[JoinColumn], list[JoinColumn]] = ([], [])
        fields: list[StructField] = []
        for side, (schema, label) in enumerate(zip(schemas, "lr", strict=True)):
            for at, field in enumerate(schema.fields):
                if field.name not in shared:
                    sources = (field.name, None) if side == LEFT else (None, field.name)
                    own[side].append(JoinColumn(f"__sl_{label}_{at}", field.dataType, *sources))
                    fields.append(StructField(field.name, field.dataType))
                elif side == LEFT:
                    fields.append(StructField(field.name, shared[field.name]))
        self.columns = (*keys, *own[LEFT], *own[RIGHT])
        inputs = [StructField(column.name, column.data_type) for column in self.columns]
        self.input_struct = StructType(
            [*inputs[: len(keys)], StructField(SIDE_COLUMN, ByteType()), *inputs[len(keys) :]]
        )
        self.output_struct = StructType(fields)
        self.output_schema = arrow_schema(self.output_struct)
        kept = [column for column in keys if column.name in shared]
        # The stored columns of a row: the shared key columns, then the other columns of its side, in input names.
        self.stored = tuple(
            StructType([StructField(column.name, column.data_type) for column in (*kept, *own[side])])
            for side in (LEFT, RIGHT)
        )
        self.time_columns = tuple(self._input_name(time, side) for side, time in enumerate(times))
        names = {name: name for name in shared} | {
            column.left or column.right or "": column.name for column in (*own[LEFT], *own[RIGHT])
        }
        self._output = [names[field.name] for field in fields]

    def output(self, left: pa.RecordBatch | None, right: pa.RecordBatch | None) -> pa.RecordBatch:
        """Output rows from stored rows of both sides, in pairs; None if the rows of the other side have no partner."""
        rows = left if left is not None else right
        assert rows is not None
        columns = []
        for name, field in zip(self._output, self.output_schema, strict=True):
            for side in (left, right):
                if side is not None and name in side.schema.names:
                    columns.append(side.column(name))
                    break
            else:
                columns.append(pa.nulls(rows.num_rows, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def input_rows(self, part: pa.RecordBatch, side: int) -> pa.RecordBatch:
        """Rows of a side as they came: its columns, with their own names and types."""
        schema = arrow_schema(self.schemas[side])
        names = {column.left if side == LEFT else column.right: column.name for column in self.columns}
        columns = [part.column(names[field.name]).cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def output_times(self) -> tuple[dict[str, int], str | None]:
        """The time columns of the output with their lags, and the one that a step reads by default.

        The lag of a column is how much older a row can be than a partner that comes in time. The default is the time of
        the left side, or of the right side in a right join. In a full join both can be null, so there is no default.
        """
        left, right = self.times
        if self.bounds_ms is None or left is None or right is None:
            return {}, None
        lower, upper = self.bounds_ms
        lags = {right: max(0, -lower)}
        lags[left] = max(lags.get(left, 0), upper, 0)
        return lags, {"right": right, "full": None}.get(self.how, left)

    def _check_how(self, how: str, times: tuple[str | None, str | None], bounds_ms: tuple[int, int] | None) -> None:
        if how not in ("inner", "left", "right", "full"):
            raise JobDefinitionError(f"{self._where}: how={how!r} is not valid; use inner, left, right or full")
        if (times[0] is None) != (times[1] is None):
            raise JobDefinitionError(
                f"{self._where}: only one side has a time column; give the time columns of both sides, or of none"
            )
        if times[0] is None:
            if how != "inner":
                raise JobDefinitionError(
                    f"{self._where}: a {how} join needs the time columns of both sides and bounds between them, "
                    "such as within='1h': without them a row would wait for a partner for ever"
                )
            if bounds_ms is not None:
                raise JobDefinitionError(
                    f"{self._where}: bounds in time need the time columns of both sides; give them"
                )
            return
        if bounds_ms is None:
            raise JobDefinitionError(f"{self._where}: a join by time needs a lower and an upper bound; give both")
        if bounds_ms[0] > bounds_ms[1]:
            raise JobDefinitionError(
                f"{self._where}: the lower bound {bounds_ms[0]} ms is above the upper bound {bounds_ms[1]} ms; a left "
                "row joins right rows from its time + lower to its time + upper"
            )

    def _key_types(
        self, left_keys: Sequence[str], right_keys: Sequence[str], schemas: tuple[StructType, StructType]
    ) -> list[DataType]:
        if len(left_keys) != len(right_keys) or not left_keys:
            raise JobDefinitionError(
                f"{self._where}: {len(left_keys)} key columns on the left and {len(right_keys)} on the right; "
                "give the same number of both"
            )
        if len(set(left_keys)) < len(left_keys) or len(set(right_keys)) < len(right_keys):
            raise JobDefinitionError(f"{self._where}: a key column is given twice; give each column once")
        types = []
        for one, other in zip(left_keys, right_keys, strict=True):
            a, b = column_type(schemas[0], one, self._where), column_type(schemas[1], other, self._where)
            common = _common_type(a, b)
            if common is None:
                raise JobDefinitionError(
                    f"{self._where}: key column {one!r} on the left is {a.simpleString()}, {other!r} on the right is "
                    f"{b.simpleString()}; cast one of them"
                )
            types.append(common)
        return types

    def _input_name(self, time: str | None, side: int) -> str | None:
        for column in self.columns:
            if time is not None and time == (column.left if side == LEFT else column.right):
                return column.name
        return None


def _common_type(a: DataType, b: DataType) -> DataType | None:
    if a == b:
        return a
    if isinstance(a, _INTEGERS) and isinstance(b, _INTEGERS):
        return max(a, b, key=lambda kind: [type(kind) is integer for integer in _INTEGERS].index(True))
    if isinstance(a, FloatType | DoubleType) and isinstance(b, FloatType | DoubleType):
        return DoubleType()
    return None
