"""Writes the Python rows that user code yields as Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import StructType

from strandline.errors import SchemaError
from strandline.state.coding.values import MisfitError, check_for, exact_types, shown

_NULL: Final = type(None)


class RowWriter:
    """Builds record batches from the rows that user code yields, and checks them against the output schema."""

    def __init__(self, schema: StructType, arrow: pa.Schema, where: str) -> None:
        self._arrow = arrow
        self._where = where
        self._names = schema.fieldNames()
        self._types = [field.dataType for field in schema.fields]
        self._checks = [check_for(field.dataType, field.nullable) for field in schema.fields]
        self._exact = [
            exact_types(field.dataType) | ({_NULL} if field.nullable else set())
            if exact_types(field.dataType)
            else frozenset()
            for field in schema.fields
        ]

    def waiting(self) -> list[Any]:
        """A new list for rows that wait."""
        return []

    def build(self, rows: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of `rows`; `key_at` tells errors which key yielded a row."""
        if set(map(type, rows)) != {tuple}:
            rows = [row if type(row) is tuple else self._as_tuple(row, at, key_at) for at, row in enumerate(rows)]
        if set(map(len, rows)) != {len(self._names)}:
            at = next(at for at, row in enumerate(rows) if len(row) != len(self._names))
            raise SchemaError(
                f"{self._where}, key {key_at(at)}: an output row has {len(rows[at])} values, expected "
                f"{len(self._names)} ({', '.join(self._names)}): {shown(rows[at])}"
            )
        columns = [self._column(at, values, key_at) for at, values in enumerate(zip(*rows, strict=True))]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _as_tuple(self, row: Any, at: int, key_at: Callable[[int], object]) -> tuple[Any, ...]:
        names = getattr(row, "__fields__", None) if isinstance(row, Row) else None
        if names is not None and names != self._names and len(set(names)) == len(row) == len(self._names):
            row = dict(zip(names, row, strict=True))
        if isinstance(row, tuple | list):
            return tuple(row)
        if isinstance(row, dict):
            unknown = [name for name in row if name not in self._names]
            if unknown:
                raise SchemaError(
                    f"{self._where}, key {key_at(at)}: an output row has a column {unknown[0]!r}, "
                    f"expected {', '.join(self._names)}"
                )
            return tuple(map(row.get, self._names))
        raise SchemaError(
            f"{self._where}, key {key_at(at)}: an output row must be a tuple, Row, list or dict with "
            f"{', '.join(self._names)}, got {shown(row)}; yield rows, or return a list of rows, not a single row"
        )

    def _column(self, at: int, values: Sequence[Any], key_at: Callable[[int], object]) -> Any:
        kind = self._arrow.field(at).type
        if set(map(type, values)) <= self._exact[at]:
            try:
                return pa.array(values, kind)
            except (pa.ArrowException, OverflowError, UnicodeError):
                pass  # the checks below find the value that does not fit
        check = self._checks[at]
        checked = []
        for row, value in enumerate(values):
            try:
                checked.append(check(value))
            except MisfitError as misfit:
                column = self._names[at] + misfit.path
                raise SchemaError(f"{self._where}, key {key_at(row)}: output column {column!r}: {misfit}") from None
        try:
            return pa.array(checked, kind)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise SchemaError(
                f"{self._where}, keys {key_at(0)} to {key_at(len(values) - 1)}: output column {self._names[at]!r} "
                f"cannot be written as {self._types[at].simpleString()}: {error}"
            ) from error
