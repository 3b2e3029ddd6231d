"""Output rows of user code, collected until they fill a record batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import SideRows
from strandline.operators.columns.row_writer import RowWriter
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.key_chunks import Key
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.process.output_times import OutputTimes


class Writer(Protocol):
    """Builds record batches from what user code yields."""

    def waiting(self) -> Any:
        """A new container for waiting rows: it has `append` and `clear`, and its length is the number of rows."""

    def build(self, rows: Any, key_at: Callable[[int], object]) -> pa.RecordBatch:
        """A record batch of the waiting rows; `key_at` tells errors which key yielded a row."""


class OutputRows:
    """Output rows that wait for their record batch, and the row at which each key's rows begin."""

    __slots__ = ("_times", "_writer", "error", "keys", "rows", "starts")

    def __init__(self, writer: Writer, times: OutputTimes | None = None) -> None:
        self._writer = writer
        self._times = times
        self.rows: Any = writer.waiting()
        self.keys: list[Key] = []
        self.starts: list[int] = []
        self.error: SchemaError | UserCodeError | None = None
        """The error that `flush` raised. Kept because it is raised inside user code, which might swallow it."""

    def flush(self) -> pa.RecordBatch:
        """The waiting rows as a record batch.

        Raises `SchemaError`, with the key, if a row does not fit, and `UserCodeError` if its event time is too old.
        """
        try:
            built = self._writer.build(self.rows, self._key_at)
            if self._times is not None:
                self._times.check(built, self._key_at)
        except (SchemaError, UserCodeError) as error:
            self.error = error
            raise
        self.rows.clear()
        del self.keys[:-1]
        self.starts[:] = [0]
        return built

    def _key_at(self, row: int) -> object:
        return self.keys[bisect_right(self.starts, row) - 1]


class SideOutputs:
    """The side outputs of an operator subtask. Full record batches are in `ready` until the operator yields them."""

    __slots__ = ("_output_rows", "_outputs", "ready")

    def __init__(self, schemas: Mapping[str, StructType], where: str, limits: ProcessLimits = DEFAULT_LIMITS) -> None:
        self._output_rows = limits.output_rows
        self._outputs = {
            name: OutputRows(RowWriter(struct, arrow_schema(struct), f"{where}, side output {name!r}"))
            for name, struct in schemas.items()
        }
        self.ready: list[SideRows] = []

    def begin(self) -> None:
        """Start a batch: drop what an earlier try of the batch left."""
        self.ready.clear()
        for output in self._outputs.values():
            output.rows.clear()
            output.keys.clear()
            output.starts.clear()
            output.error = None

    def emit(self, name: str, row: Any, key: Key) -> None:
        """Add a row that was emitted for `key`; raises `StrandlineError` if there is no such side output."""
        output = self._outputs.get(name)
        if output is None:
            known = ", ".join(map(repr, self._outputs)) or "none"
            raise StrandlineError(f"there is no side output {name!r}; side_outputs= names {known}")
        if not output.keys or output.keys[-1] is not key:
            output.keys.append(key)
            output.starts.append(len(output.rows))
        output.rows.append(row)
        if len(output.rows) >= self._output_rows:
            self.ready.append(SideRows(name, output.flush()))

    def take(self) -> list[SideRows]:
        """Remove and return the record batches that are ready."""
        taken, self.ready = self.ready, []
        return taken

    def take_all(self) -> list[SideRows]:
        """Remove and return all rows that are left, at the end of a batch."""
        for name, output in self._outputs.items():
            if output.rows:
                self.ready.append(SideRows(name, output.flush()))
        return self.take()

    @property
    def error(self) -> SchemaError | UserCodeError | None:
        """The first error for which rows were refused, or None."""
        return next((output.error for output in self._outputs.values() if output.error), None)
