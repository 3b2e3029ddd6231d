"""Spark's value, list and map state on Strandline's states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self, cast

from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    ValueState,
)
from pyspark.sql.types import (
    StructType,
)

from strandline.errors import SchemaError
from strandline.operators.columns.row_reader import row_factory
from strandline.operators.spark.errors import SparkCallError, SparkValueError
from strandline.operators.spark.values import _has_times, _taker, giver, plain_value
from strandline.state.handles import states


class _Ending:
    """A state that `deleteIfExists` can end."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """The state itself: the copy of a processor works on the same state."""
        return self

    def end(self, reason: str) -> None:
        """From now on, every call of the state raises `SparkCallError` with this text."""

        def ended(*_args: Any) -> NoReturn:
            raise SparkCallError(reason)

        for name in vars(type(self)):
            if not name.startswith("_"):
                setattr(self, name, ended)


class SparkValueState(_Ending, ValueState):
    """Spark's value state. A value is a tuple, even if it has one column."""

    def __init__(self, state: states.ValueState, schema: StructType) -> None:
        self._state = state.as_rows()
        self._rows = _StateRows(schema)
        self.exists = state.exists  # type: ignore[method-assign]  # bound once, because both are called for every key
        if self._rows.given is None:
            self.get = state.get  # type: ignore[method-assign]

    def exists(self) -> bool:
        return self._state.exists()

    def get(self) -> tuple[Any, ...] | None:
        row = self._state.get()
        return row if row is None else self._rows.give(row)

    def update(self, newValue: Any) -> None:
        if self._rows.fits(newValue):
            try:
                self._state.update(newValue)
                return
            except SchemaError:
                pass  # Spark accepts more types than our states do
        _stored(self._state.update, self._rows.take(newValue))

    def clear(self) -> None:
        self._state.clear()


class SparkListState(_Ending, ListState):
    """Spark's list state."""

    def __init__(self, state: states.ListState, schema: StructType) -> None:
        self._state = state.as_rows()
        self._rows = _StateRows(schema)

    def exists(self) -> bool:
        return self._state.exists()

    def get(self) -> Iterator[tuple[Any, ...]]:
        rows = self._state.get()
        return rows if self._rows.given is None else map(self._rows.give, rows)

    def put(self, newState: Any) -> None:
        _stored(self._state.put, self._all(newState))

    def appendValue(self, newState: Any) -> None:
        if self._rows.fits(newState):
            try:
                self._state.append_value(newState)
                return
            except SchemaError:
                pass  # Spark accepts more types than our states do
        _stored(self._state.append_value, self._rows.take(newState))

    def appendList(self, newState: Any) -> None:
        _stored(self._state.append, self._all(newState))

    def clear(self) -> None:
        self._state.clear()

    def _all(self, values: Iterable[Any]) -> list[tuple[Any, ...]]:
        rows = [self._rows.take(value) for value in values]
        if not rows:
            raise SparkValueError(
                f"list state {self._state.descriptor.name!r}: put and appendList refuse an empty list, as in Spark; "
                "use clear() to remove the list"
            )
        return rows


class SparkMapState(_Ending, MapState):
    """Spark's map state."""

    def __init__(self, state: states.MapState, key_schema: StructType, schema: StructType) -> None:
        self._state = state.as_rows()
        self._keys = _StateRows(key_schema)
        self._rows = _StateRows(schema)
        self._row = row_factory(schema)

    def exists(self) -> bool:
        return self._state.exists()

    def getValue(self, key: Any) -> tuple[Any, ...] | None:
        row = _stored(self._state.get, self._keys.take(key))
        return None if row is None else cast("tuple[Any, ...]", self._row(self._rows.give(row)))

    def containsKey(self, key: Any) -> bool:
        return bool(_stored(self._state.contains, self._keys.take(key)))

    def updateValue(self, key: Any, value: Any) -> None:
        _stored(self._state.put, self._keys.take(key), self._rows.take(value))

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        give_key, give = self._keys.give, self._rows.give
        return ((give_key(key), give(value)) for key, value in self._state.items())

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return map(self._keys.give, self._state.keys())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return map(self._rows.give, self._state.values())

    def removeKey(self, key: Any) -> None:
        _stored(self._state.remove, self._keys.take(key))

    def clear(self) -> None:
        self._state.clear()


def _stored(call: Callable[..., Any], *rows: Any) -> Any:
    """Call a state; a row that does not fit raises `SparkValueError`."""
    try:
        return call(*rows)
    except SchemaError as error:
        raise SparkValueError(str(error)) from None


class _StateRows:
    """Converts the rows of one state between Spark's form and the stored form."""

    def __init__(self, schema: StructType) -> None:
        taken = [_taker(field.dataType) for field in schema.fields]
        self._taken = taken if any(taken) else None
        self._exact = not _has_times(schema)
        self.given = giver(schema)
        """Converts a stored row to the row that user code gets; None if they are the same."""

    def fits(self, value: Any) -> bool:
        """Whether a value may be stored without a conversion; the state itself refuses it if it does not fit."""
        return self._exact and type(value) is tuple

    def take(self, value: Any) -> tuple[Any, ...]:
        """The row that Spark makes of an iterable of columns; numpy and pandas scalars become Python values."""
        row = tuple(map(plain_value, value))
        if self._taken is None or len(row) != len(self._taken):
            return row
        return tuple(
            item if take is None or item is None else take(item) for take, item in zip(self._taken, row, strict=True)
        )

    def give(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """The row that user code gets for a stored row."""
        return row if self.given is None else tuple(self.given(row))
