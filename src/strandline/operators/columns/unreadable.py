"""Values that Python cannot hold: a row that has one raises an error when user code reads it, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pyspark.sql.types import Row, StructType

from strandline.errors import SchemaError
from strandline.operators.columns.row_reader import Convert, UnreadableValueError


class Unreadable:
    """Takes the place of a value in a row; `reason` is the text of the error."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class GuardedRow(Row):
    """A row in which some values are `Unreadable`: to read one raises `SchemaError`."""

    __slots__ = ()

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        return tuple(map(_readable, found)) if isinstance(item, slice) else _readable(found)

    def __iter__(self) -> Iterator[Any]:
        return map(_readable, super().__iter__())


def guarded_row_factory(schema: StructType) -> Callable[[tuple[Any, ...]], Any]:
    """A function that makes guarded rows from value tuples."""
    made = type("Row", (GuardedRow,), {"__slots__": (), "__fields__": schema.fieldNames()})
    return partial(tuple.__new__, made)


def guarded(read: Convert, column: Any, name: str) -> list[Any]:
    """The values of a column; `Unreadable` takes the place of values that `read` refuses."""
    values: list[Any] = []
    for at in range(len(column)):
        try:
            values += read(column.slice(at, 1))
        except UnreadableValueError as error:
            values.append(Unreadable(f"the input column {name!r} has {error}"))
    return values


def _readable(value: Any) -> Any:
    if isinstance(value, Unreadable):
        raise SchemaError(value.reason)
    return value
