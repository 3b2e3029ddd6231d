"""The operator that runs an `ArrowProcessor` on chunks of whole keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.checkpoint.steps import StepDescription
from strandline.errors import JobDefinitionError, StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.declared import column_type
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.schemas import arrow_schema, conform, fitted
from strandline.operators.process.arrow_context import ArrowChunk, ArrowContext, Rows
from strandline.operators.process.arrow_processor import ArrowFunction, ArrowProcessor
from strandline.operators.user_code import NOT_BY_USER_CODE, explained, opened_copy
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import EncodedKeys, KeyEncoder
from strandline.state.descriptors import StateDescriptor


@dataclass(frozen=True, slots=True)
class ArrowLimits:
    """About how much input a call of user code gets, and how many rows a record batch of output has at most.

    A chunk is larger if a single key has more rows.
    """

    chunk_rows: int = 1 << 15
    chunk_bytes: int = 32 << 20
    output_rows: int = 1 << 16


_DEFAULT: Final = ArrowLimits()


class ArrowProcessOperator(Operator):
    """Runs an `ArrowProcessor`, or a function of a table and a context, and checks its output."""

    sorted_input = True

    def __init__(
        self,
        uid: str,
        processor: ArrowProcessor | ArrowFunction,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
        limits: ArrowLimits = _DEFAULT,
    ) -> None:
        where = f"operator {uid!r}"
        if isinstance(processor, type):
            name = processor.__name__
            raise JobDefinitionError(f"{where}: {name} is a class; pass an instance of it, for example {name}()")
        if not callable(getattr(processor, "process", processor)):
            raise JobDefinitionError(
                f'{where}: rows="arrow" takes an sl.ArrowProcessor or a function of a table and a context, not '
                f"{processor!r}"
            )
        for name in key_columns:
            column_type(input_schema, name, where)
        self.uid = uid
        self.processor = processor
        self.limits = limits
        self.key_columns = tuple(key_columns)
        self.input_struct = input_schema
        self.output_struct = output_schema
        self.input_schema = arrow_schema(input_schema)
        self.output_schema = arrow_schema(output_schema)
        KeyEncoder(self.input_schema, self.key_columns, KEY_GROUP_COLUMN)
        self._where = where
        self._context: ArrowContext | None = None

    def check(self) -> list[StateDescriptor]:
        """The states that `open` declares, found in the driver; see `ProcessOperator.check`."""
        context = ArrowContext(SubtaskInfo("", self.uid, -1, 1, 1), self.key_columns, self.input_schema)
        name = getattr(self.processor, "__name__", type(self.processor).__name__)
        opened_copy(self.processor, context, self.uid, name)
        return list(context._states.values())

    def open(self, info: SubtaskInfo) -> None:
        """Call the processor's `open`; raises `UserCodeError` if it fails."""
        self._where = info.where
        context = ArrowContext(info, self.key_columns, self.input_schema)
        self._call("open", context)
        context._opening = False
        self._context = context

    def states(self) -> list[StateDescriptor]:
        """The states that `open` declared."""
        return [] if self._context is None else list(self._context._states.values())

    def describe(self) -> StepDescription:
        """The key. The states, which user code declares, are described one by one."""
        return StepDescription(self.uid, "arrow", described_columns(self.input_struct, self.key_columns))

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Call the processor with the rows, chunk by chunk, and yield its output."""
        if self._context is None:
            raise StrandlineError(f"{self._where} was run before it was opened")
        scope = self._context._scope
        scope.info, scope.change_set = batch, changes
        try:
            for table, encoded, starts in self._chunks(rows, scope.encoder):
                scope.chunk = ArrowChunk(scope, table, encoded, starts)
                for made in self._processed(table, self._context, batch):
                    yield from self._checked(made, batch)
        finally:
            scope.chunk = scope.info = scope.change_set = None

    def close(self) -> None:
        """Call the processor's `close`."""
        if self._context is not None:
            self._context = None
            self._call("close")

    def _chunks(
        self, rows: Iterator[pa.RecordBatch], encoder: KeyEncoder
    ) -> Iterator[tuple[pa.Table, EncodedKeys, npt.NDArray[np.int64]]]:
        """Chunks with all rows of their keys, with the encoded keys and the places where each key begins."""
        schema = self.input_schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        limits = self.limits
        held: list[pa.RecordBatch] = []
        count = size = 0
        patience = 1
        for incoming in rows:
            part = fitted(incoming, schema, self._where)
            held.append(part)
            count, size = count + part.num_rows, size + part.nbytes
            if count < patience * limits.chunk_rows and size < patience * limits.chunk_bytes:
                continue
            table = pa.Table.from_batches(held).combine_chunks()
            encoded = encoder.encode(table)
            starts = encoded.starts()
            if len(starts) == 1:
                patience *= (
                    2  # a long key must not be split; encoding all of it for every record batch would take too long
                )
                continue
            cut = int(starts[-1])  # the last key may have more rows in the next record batch
            yield self._input(table.slice(0, cut)), encoded.slice(0, cut), starts[:-1]
            rest = table.slice(cut)
            held, count, size, patience = rest.to_batches(), rest.num_rows, rest.nbytes, 1
        if any(part.num_rows for part in held):
            table = pa.Table.from_batches(held).combine_chunks()
            encoded = encoder.encode(table)
            yield self._input(table), encoded, encoded.starts()

    def _input(self, table: pa.Table) -> pa.Table:
        return pa.Table.from_arrays(table.columns[:-1], schema=self.input_schema)

    def _processed(self, table: pa.Table, context: ArrowContext, batch: BatchInfo) -> Iterator[Any]:
        process: Any = getattr(self.processor, "process", self.processor)
        try:
            made = process(table, context)
            if made is None:
                return
            yield from made if isinstance(made, Iterable) and not isinstance(made, Rows) else [made]
        except NOT_BY_USER_CODE:
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            raise explained(error, f"{self._where}, batch {batch.batch_id}", "process") from None

    def _checked(self, made: Any, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        where = f"{self._where}, batch {batch.batch_id}: output"
        table = conform(made, self.output_struct, self.output_schema, where).combine_chunks()
        for part in table.to_batches(max_chunksize=self.limits.output_rows):
            if part.num_rows:
                yield part

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self.processor, name, None)
        if method is not None:
            try:
                method(*arguments)
            except NOT_BY_USER_CODE:
                raise
            except BaseException as error:  # noqa: BLE001  # user code may raise anything
                raise explained(error, self._where, name) from None
