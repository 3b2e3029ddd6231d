"""Keys and rows for user code: chunks of rows in the order of their keys, and keys that come back without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, StructField, StructType

from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.rows import column_reader, fitted, iterate_rows, row_factory
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.keys import EncodedKeys, KeyEncoder
from strandline.state.coding.values import rounds

_FIRST_CHUNK, _LARGEST_CHUNK, _SMALLEST_CHUNK = 1024, 32_768, 16
_CHUNK_BYTES: Final = 32 << 20
"""Chunks shrink while one takes more than this, its rows and the values read for it, and grow while it takes less."""

_msgpack: Final = msgspec.msgpack.Encoder().encode

Key = tuple[Any, ...]


class KeyChunk:
    """Some rows, ready for user code: the distinct keys in their order, how many rows each has, and the rows."""

    __slots__ = ("counts", "keys", "rows", "size", "values")

    def __init__(self, keys: EncodedKeys, values: list[Key], counts: list[int], rows: Iterator[Any], size: int) -> None:
        self.keys = keys
        self.size = size
        self.values = values
        self.counts = counts
        self.rows = rows

    def without_first(self) -> KeyChunk:
        """The chunk after its first key, whose rows have been taken."""
        return KeyChunk(self.keys.slice(1), self.values[1:], self.counts[1:], self.rows, self.size)


class KeyChunkReader:
    """Turns record batches into chunks."""

    def __init__(self, struct: StructType, schema: pa.Schema, key_columns: Sequence[str], where: str) -> None:
        self._where = where
        self._schema = schema.append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        self._encoder = KeyEncoder(schema, key_columns, KEY_GROUP_COLUMN)
        self._columns = [column_reader(field.dataType) for field in struct.fields]
        self._key_places = [schema.get_field_index(name) for name in key_columns]
        self._make = row_factory(struct)
        self.limit = _FIRST_CHUNK

    def fit(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The input columns and the key group in their declared types."""
        return fitted(rows, self._schema, self._where)

    def chunk(self, rows: pa.RecordBatch) -> KeyChunk:
        """A record batch as `fit` gave it, grouped by runs of equal keys."""
        encoded = self._encoder.encode(rows)
        starts = encoded.starts()
        counts = np.diff(starts, append=len(encoded)).tolist()
        columns = [read(rows.column(at)) for at, read in enumerate(self._columns)]
        keys = [columns[at] for at in self._key_places]
        if len(counts) < len(encoded):
            encoded = encoded.take(starts)
            first = starts.tolist()
            keys = [[column[at] for at in first] for column in keys]
        values = list(zip(*keys, strict=True))
        return KeyChunk(encoded, values, counts, iterate_rows(columns, self._make), rows.nbytes)


class KeyChunks:
    """The chunks of one batch, with one chunk of look-ahead for a key whose rows go on in the next."""

    def __init__(self, reader: KeyChunkReader, rows: Iterator[pa.RecordBatch]) -> None:
        self._reader = reader
        self._rows = rows
        self._open: pa.RecordBatch | None = None
        self._ahead: KeyChunk | None = None
        self.error: Exception | None = None
        """What the input raised: it may surface inside user code, which is not to blame and might swallow it."""

    def next(self) -> KeyChunk | None:
        """The next chunk, or None at the end of the batch."""
        chunk = self._peek()
        self._ahead = None
        return chunk

    def rest_of(self, key: bytes) -> Iterator[Any]:
        """The rows of `key` in the chunks that follow; takes them away from there."""
        while (chunk := self._peek()) is not None and chunk.keys.one(0) == key:
            yield from islice(chunk.rows, chunk.counts[0])
            if len(chunk.counts) > 1:
                self._ahead = chunk.without_first()
                return
            self._ahead = None

    def adapt(self, size: int) -> None:
        """Choose the size of the next chunks, the last one having taken `size` bytes."""
        reader = self._reader
        if size > _CHUNK_BYTES:
            reader.limit = max(_SMALLEST_CHUNK, reader.limit // 2)
        elif size < _CHUNK_BYTES // 4:
            reader.limit = min(_LARGEST_CHUNK, reader.limit * 2)

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


class KeyCodec:
    """A key as user code sees it to bytes and back, for keys that come back without rows."""

    def __init__(self, struct: StructType, key_columns: Sequence[str], clock: str) -> None:
        key = StructType([struct[name] for name in key_columns])
        self.schema = StructType([StructField(clock, key, False)])
        """Names the clock, too: stored timers are read again only by an operator with the same keys and clock."""
        codec = ValueCodec(self.schema, "the key of a timer")
        revive = [_reviver(field.dataType) for field in key.fields]
        self._revive = revive if any(revive) else None
        # Keys come out of Arrow columns, so they fit; only nested ones and decimals have to be brought into form.
        self._fits = self._revive is None and not rounds(key)
        self._checked = codec.encode
        self._decode = codec.decode

    def encode(self, key: Key) -> bytes:
        """The bytes of a key that user code was given."""
        return _msgpack((key,)) if self._fits else self._checked(key)

    def decode(self, data: bytes) -> Key:
        """The key that `encode` was given, nested structs as rows again."""
        key: Key = self._decode(data)
        if self._revive is None:
            return key
        return tuple(value if one is None else one(value) for one, value in zip(self._revive, key, strict=True))


def _reviver(data_type: DataType) -> Callable[[Any], Any] | None:
    """Turns the tuples that stand for nested structs in stored values into rows; None where there are none."""
    match data_type:
        case StructType():
            make = row_factory(data_type)
            inner = [_reviver(field.dataType) for field in data_type.fields]

            def revive_struct(value: Any) -> Any:
                if value is None:
                    return None
                return make(tuple(part if one is None else one(part) for one, part in zip(inner, value, strict=True)))

            return revive_struct
        case ArrayType():
            element = _reviver(data_type.elementType)
            if element is None:
                return None
            return lambda value: None if value is None else [element(part) for part in value]
        case _:
            return None  # Spark refuses maps as keys
