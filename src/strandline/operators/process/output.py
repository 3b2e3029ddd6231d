"""Rows that user code yields or emits, on their way into record batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.base import SideRows
from strandline.operators.columns.rows import RowWriter, arrow_schema
from strandline.operators.process.key_chunks import Key

OUTPUT_ROWS: Final = 8192
"""How many rows wait at most before they become a record batch."""


class Writer(Protocol):
    """Makes record batches of what user code yields."""

    def waiting(self) -> Any:
        """A place for what waits: it has `append` and `clear`, and its length is a number of rows."""

    def build(self, rows: Any, key_at: Callable[[int], object]) -> pa.RecordBatch:
        """A record batch of what waits; `key_at` names the key that yielded a row, for errors."""


class OutputRows:
    """Output rows that wait to become a record batch, and at which row each key's begin."""

    __slots__ = ("_writer", "error", "keys", "rows", "starts")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.rows: Any = writer.waiting()
        self.keys: list[Key] = []
        self.starts: list[int] = []
        self.error: SchemaError | None = None
        """What the rows were refused for: it may surface inside user code, which might swallow it."""

    def flush(self) -> pa.RecordBatch:
        """The rows as a record batch; raises `SchemaError` that names the key where one does not fit."""
        try:
            built = self._writer.build(self.rows, self._key_at)
        except SchemaError as error:
            self.error = error
            raise
        self.rows.clear()
        del self.keys[:-1]
        self.starts[:] = [0]
        return built

    def _key_at(self, row: int) -> object:
        return self.keys[bisect_right(self.starts, row) - 1]


class SideOutputs:
    """The side outputs of an operator subtask: full record batches wait in `ready` until the operator yields them."""

    __slots__ = ("_outputs", "_where", "ready")

    def __init__(self, schemas: Mapping[str, StructType], where: str) -> None:
        self._where = where
        self._outputs = {
            name: OutputRows(RowWriter(struct, arrow_schema(struct), f"{where}, side output {name!r}"))
            for name, struct in schemas.items()
        }
        self.ready: list[SideRows] = []

    def begin(self) -> None:
        """Forget what an earlier try left."""
        self.ready.clear()
        for output in self._outputs.values():
            output.rows.clear()
            output.keys.clear()
            output.starts.clear()
            output.error = None

    def emit(self, name: str, row: Any, key: Key) -> None:
        """Take a row of `key`."""
        output = self._outputs.get(name)
        if output is None:
            known = ", ".join(map(repr, self._outputs)) or "none"
            raise StrandlineError(f"there is no side output {name!r}; side_outputs= names {known}")
        if not output.keys or output.keys[-1] is not key:
            output.keys.append(key)
            output.starts.append(len(output.rows))
        output.rows.append(row)
        if len(output.rows) >= OUTPUT_ROWS:
            self.ready.append(SideRows(name, output.flush()))

    def take(self) -> list[SideRows]:
        """The record batches that are ready; the caller sends them on."""
        taken, self.ready = self.ready, []
        return taken

    def take_all(self) -> list[SideRows]:
        """All rows that are left, at the end of a batch."""
        for name, output in self._outputs.items():
            if output.rows:
                self.ready.append(SideRows(name, output.flush()))
        return self.take()

    @property
    def error(self) -> SchemaError | None:
        """What rows were refused for, if any were."""
        return next((output.error for output in self._outputs.values() if output.error), None)
