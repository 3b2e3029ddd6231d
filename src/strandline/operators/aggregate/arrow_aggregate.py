"""`ArrowAggregate`: the base class of a user-defined aggregate on Arrow columns, and the accumulator that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.aggregate.accumulators import GroupAccumulator, Groups
from strandline.operators.user_code import NOT_BY_USER_CODE, call_failed


class ArrowAggregate(ABC):
    """Base class of a user-defined aggregate. It is called with the columns of many keys, never key by key.

    Every table has a column `group_id` (int64). Rows with the same number belong to one group, and the result must have
    one row for each number. Arrow's own `table.group_by("group_id").aggregate(...)` does most of the work::

        class Vwap(sl.ArrowAggregate):
            state_schema = pa.schema([("amount", pa.float64()), ("volume", pa.float64())])
            result_type = "double"

            def partial(self, rows):  # columns: group_id, and the input columns under their own names
                amount = pc.multiply(rows["price"], rows["size"])
                table = pa.table({"group_id": rows["group_id"], "amount": amount, "volume": rows["size"]})
                return self.merge(table)

            def merge(self, states):  # columns: group_id and the state's
                sums = states.group_by("group_id").aggregate([("amount", "sum"), ("volume", "sum")])
                return sums.rename_columns({"amount_sum": "amount", "volume_sum": "volume"})

            def result(self, states):  # the state's columns, a row per result
                return pc.divide(states["amount"], states["volume"])

        stream.key_by("symbol").aggregate(vwap=Vwap()("price", "size"))

    Results must not depend on how rows are spread over partial results. If a method raises, the job fails with
    `UserCodeError`; if it returns a table of another shape, with `SchemaError`.
    """

    state_schema: ClassVar[pa.Schema]
    """The columns that are stored for each key: numbers, times, booleans, strings or binary."""
    result_type: ClassVar[str]
    """The type of the result in Spark's notation: `double`, `array<string>`."""

    @abstractmethod
    def partial(self, rows: pa.Table) -> pa.Table:
        """The states of input rows: `group_id` and the columns of `state_schema`, one row per group."""

    @abstractmethod
    def merge(self, states: pa.Table) -> pa.Table:
        """The states of each group, merged into one row per group; columns as `partial` returns them.

        The states of a group come in the order in which they were made.
        """

    @abstractmethod
    def result(self, states: pa.Table) -> Any:
        """The result column, one value for each row of `states`."""

    def __call__(self, *columns: str) -> Any:
        """This aggregate over some columns, to be passed to `aggregate()`."""
        from strandline.operators.aggregate.functions import Aggregate

        return Aggregate("user", columns[0] if columns else None, columns[1:], code=self)


GROUP_ID = "group_id"


class UserAccumulator(GroupAccumulator):
    """The accumulator that runs an `ArrowAggregate`, and checks what it returns."""

    def __init__(self, name: str, code: ArrowAggregate, columns: tuple[str, ...], result: pa.DataType) -> None:
        super().__init__(name, columns, [field.with_name(f"{name}:{field.name}") for field in code.state_schema])
        self._code = code
        self._result = result
        self.code_name = type(code).__name__
        self._where = f"aggregate {name!r} ({self.code_name})"

    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """Call the user's `partial` once, for all groups."""
        return self._called(self._code.partial, list(self.columns), inputs, groups)

    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """Call the user's `merge` once, for all groups."""
        return self._called(self._code.merge, self._code.state_schema.names, states, groups)

    def shown(self, states: list[Any]) -> Any:
        """Call the user's `result` once, for all rows."""
        table = pa.table(dict(zip(self._code.state_schema.names, states, strict=True)))
        made = self._guarded(self._code.result, table)
        made = made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made
        if not isinstance(made, pa.Array) or len(made) != len(table):
            raise SchemaError(f"{self._where}: result() must return a column of {len(table)} values, one for each row")
        return self._cast(made, self._result, "result()")

    def _called(self, call: Callable[[Any], Any], names: list[str], columns: list[Any], groups: Groups) -> list[Any]:
        order = pa.array(groups.order)
        given = {GROUP_ID: pa.array(groups.ids)}
        given |= {name: column.take(order) for name, column in zip(names, columns, strict=True)}
        made = self._guarded(call, pa.table(given))
        what = f"{call.__name__}()"
        schema = self._code.state_schema
        if not isinstance(made, pa.Table) or set(made.column_names) != {GROUP_ID, *schema.names}:
            shown = ", ".join(made.column_names) if isinstance(made, pa.Table) else type(made).__name__
            wanted = ", ".join([GROUP_ID, *schema.names])
            raise SchemaError(f"{self._where}: {what} must return a table with the columns {wanted}, not {shown}")
        ids = made.column(GROUP_ID).to_numpy()
        by_id = np.argsort(ids, kind="stable")
        if not np.array_equal(ids[by_id], np.arange(len(groups))):
            raise SchemaError(
                f"{self._where}: {what} must return one row for each of the {len(groups)} values of {GROUP_ID}"
            )
        made = made.take(pa.array(by_id))
        return [self._cast(made.column(f.name).combine_chunks(), f.type, f"{what}, column {f.name!r}") for f in schema]

    def _guarded(self, call: Callable[[Any], Any], table: pa.Table) -> Any:
        try:
            return call(table)
        except (StrandlineError, *NOT_BY_USER_CODE):
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            raise call_failed(self._where, f"{call.__name__}()", error) from None

    def _cast(self, column: Any, kind: pa.DataType, what: str) -> Any:
        try:
            return column if column.type == kind else column.cast(kind)
        except pa.ArrowException as error:
            raise SchemaError(f"{self._where}: {what} is {column.type}, not {kind}: {error}") from error
