"""Chunks of rows for per-key user code: the distinct keys, and the rows of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.errors import SchemaError
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.row_reader import UnreadableValueError, column_reader, iterate_rows, row_factory
from strandline.operators.columns.schemas import fitted
from strandline.operators.columns.unreadable import guarded, guarded_row_factory
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.state.coding.keys import EncodedKeys, KeyEncoder

Key = tuple[Any, ...]


class KeyChunk:
    """Rows for user code: the distinct keys in their order, the number of rows of each key, and the rows."""

    __slots__ = ("counts", "keys", "rows", "size", "values")

    def __init__(self, keys: EncodedKeys, values: list[Key], counts: list[int], rows: Iterator[Any], size: int) -> None:
        self.keys = keys
        self.size = size
        self.values = values
        self.counts = counts
        self.rows = rows

    def without_first(self) -> KeyChunk:
        """The chunk without its first key; the rows of that key must have been read."""
        return KeyChunk(self.keys.slice(1), self.values[1:], self.counts[1:], self.rows, self.size)


class KeyChunkReader:
    """Turns record batches into chunks of up to `limit` rows."""

    def __init__(
        self,
        struct: StructType,
        schema: pa.Schema,
        key_columns: Sequence[str],
        where: str,
        limits: ProcessLimits = DEFAULT_LIMITS,
    ) -> None:
        self._where = where
        self._limits = limits
        self._schema = schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        self._encoder = KeyEncoder(schema, key_columns, KEY_GROUP_COLUMN)
        self._columns = [column_reader(field.dataType) for field in struct.fields]
        self._key_places = [schema.get_field_index(name) for name in key_columns]
        self._struct = struct
        self._make = row_factory(struct)
        self.limit = limits.first_chunk

    def fit(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The input columns and the key group, in their declared types."""
        return fitted(rows, self._schema, self._where)

    def chunk(self, rows: pa.RecordBatch) -> KeyChunk:
        """The chunk of a record batch that `fit` returned; each run of equal keys is one key."""
        encoded = self._encoder.encode(rows)
        starts = encoded.starts()
        counts = np.diff(starts, append=len(encoded)).tolist()
        keys = self._keys(rows)
        columns, make = self._values(rows, dict(zip(self._key_places, keys, strict=True)))
        if len(counts) < len(encoded):
            encoded = encoded.take(starts)
            first = starts.tolist()
            keys = [[column[at] for at in first] for column in keys]
        values = list(zip(*keys, strict=True))
        return KeyChunk(encoded, values, counts, iterate_rows(columns, make), rows.nbytes)

    def _keys(self, rows: pa.RecordBatch) -> list[list[Any]]:
        """The key columns of the rows; raises `SchemaError` for a value that Python cannot hold."""
        keys = []
        for at in self._key_places:
            try:
                keys.append(self._columns[at](rows.column(at)))
            except UnreadableValueError as error:
                name = self._schema.names[at]
                raise SchemaError(
                    f"{self._where}: the key column {name!r} has {error}; filter such rows before the step"
                ) from None
        return keys

    def _values(
        self, rows: pa.RecordBatch, known: dict[int, list[Any]]
    ) -> tuple[list[list[Any]], Callable[[tuple[Any, ...]], Any]]:
        """All columns of the rows, and the function that makes rows of them."""
        columns, make = [], self._make
        for at, read in enumerate(self._columns):
            try:
                columns.append(known[at] if at in known else read(rows.column(at)))
            except UnreadableValueError:
                columns.append(guarded(read, rows.column(at), self._schema.names[at]))
                make = guarded_row_factory(self._struct)
        return columns, make

    def adapt(self, size: int) -> None:
        """Choose the length of the next chunks; the last one took `size` bytes."""
        limits = self._limits
        if size > limits.chunk_bytes:
            self.limit = max(limits.smallest_chunk, self.limit // 2)
        elif size < limits.chunk_bytes // 4:
            self.limit = min(limits.largest_chunk, self.limit * 2)


class KeyChunks:
    """The chunks of one batch. It reads one chunk ahead, because the rows of a key may go on in the next chunk."""

    def __init__(self, reader: KeyChunkReader, rows: Iterator[pa.RecordBatch]) -> None:
        self._reader = reader
        self._rows = rows
        self._open: pa.RecordBatch | None = None
        self._ahead: KeyChunk | None = None
        self.error: Exception | None = None
        """The error that the input raised. Kept because it is raised inside user code, which might swallow it."""

    def next(self) -> KeyChunk | None:
        """The next chunk, or None at the end of the batch."""
        chunk = self._peek()
        self._ahead = None
        return chunk

    def rest_of(self, key: bytes) -> Iterator[Any]:
        """Remove and yield the rows of `key` that the following chunks begin with."""
        while (chunk := self._peek()) is not None and chunk.keys.one(0) == key:
            yield from islice(chunk.rows, chunk.counts[0])
            if len(chunk.counts) > 1:
                self._ahead = chunk.without_first()
                return
            self._ahead = None

    def _peek(self) -> KeyChunk | None:
        if self.error is not None:
            raise self.error
        if self._ahead is None:
            try:
                self._ahead = self._read()
            except Exception as error:
                self.error = error
                raise
        return self._ahead

    def _read(self) -> KeyChunk | None:
        while self._open is None or self._open.num_rows == 0:
            following = next(self._rows, None)
            if following is None:
                return None
            self._open = self._reader.fit(following)
        limit = self._reader.limit
        part, self._open = self._open.slice(0, limit), self._open.slice(limit)
        return self._reader.chunk(part)
