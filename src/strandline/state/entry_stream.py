"""Reads an Arrow stream of keys and values that may be crafted: within a bound of memory, and validated in full.

Arrow trusts the bytes of a stream: without validation, wrong offsets read memory outside the buffers and end the
process, and so does a crafted description of the columns. A compressed buffer announces its own size, which may be
thousands of times larger than the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import Final

import pyarrow as pa

MAX_RATIO: Final = 256
SMALL_BYTES: Final = 256 << 20
"""Entries take at most this much memory, or at most `MAX_RATIO` times as much as their file."""

_COMPRESSED_BUFFER: Final = struct.Struct("<q")
_PLAIN: Final = -1
"""The announced size of a buffer in a compressed batch that is not compressed itself."""


class BadStreamError(ValueError):
    """The stream is not what a writer of entries produces. The message is a part of a sentence."""


def most_bytes(file_bytes: int) -> int:
    """How many bytes the entries of a file of this size may take in memory."""
    return max(SMALL_BYTES, MAX_RATIO * file_bytes)


def read_batches(data: pa.Buffer, schema: pa.Schema, limit: int) -> Iterator[pa.RecordBatch]:
    """The batches of a stream with `schema`, each validated.

    Raises `BadStreamError` if the stream is damaged, or if its batches would take more than `limit` bytes of memory.
    """
    try:
        messages = _checked_messages(data, limit)
        if messages and messages[0].metadata.equals(_schema_message(schema)):
            batches: Iterator[pa.RecordBatch] = iter(pa.ipc.open_stream(pa.BufferReader(data)))
        else:
            batches = (pa.ipc.read_record_batch(message, schema) for message in messages[1:])
        for batch in batches:
            batch.validate(full=True)
            for field, column in zip(schema, batch.columns, strict=True):
                if column.null_count and not field.nullable:
                    raise BadStreamError(f"an entry has no {field.name}")
            yield batch
    except BadStreamError:
        raise
    except MemoryError:
        raise  # the announced sizes are bounded, so the process has no memory left
    except (pa.ArrowException, OSError, ValueError, OverflowError, struct.error) as error:
        raise BadStreamError(f"Arrow cannot read it: {error}") from error


def _checked_messages(data: pa.Buffer, limit: int) -> list[pa.ipc.Message]:
    """The messages of a stream. None is decompressed yet, and the first one, which describes the columns, is not read.

    Arrow (26) reads memory outside the buffer of a crafted description. So only a description that is byte for byte
    the one that Arrow writes for our columns goes to Arrow. A stream with another one is read as if it had our columns.
    """
    messages = list(pa.ipc.MessageReader.open_stream(pa.BufferReader(data)))
    for place, message in enumerate(messages):
        if message.type != ("record batch" if place else "schema"):
            raise BadStreamError(f"its message {place} is a {message.type}")
        if place:
            limit -= _announced_bytes(message)
        if limit < 0:
            raise BadStreamError("it announces more entries than a file of its size can hold")
    return messages


@cache
def _schema_message(schema: pa.Schema) -> pa.Buffer:
    return pa.ipc.read_message(schema.serialize()).metadata


def _announced_bytes(message: pa.ipc.Message) -> int:
    """The memory that the buffers of a record batch take after decompression, as the message itself announces it."""
    body = message.body
    total = 0
    for offset, length, compressed in _buffers(message.metadata.to_pybytes()):
        if offset < 0 or length < 0 or offset + length > body.size:
            raise BadStreamError("a buffer lies outside its message")
        announced = _PLAIN
        if compressed and length >= _COMPRESSED_BUFFER.size:
            (announced,) = _COMPRESSED_BUFFER.unpack(body.slice(offset, _COMPRESSED_BUFFER.size))
        if announced < _PLAIN:
            raise BadStreamError("a buffer announces a negative size")
        total += length if announced == _PLAIN else announced
    return total


# The metadata of a message is a flatbuffer. Arrow's Python interface does not show the buffers of a batch, so these
# few fields are read here. Arrow has verified the flatbuffer when it read the message.

_HEADER_FIELD: Final = 2
_LENGTH_FIELD, _BUFFERS_FIELD, _COMPRESSION_FIELD = 0, 2, 3


def _buffers(metadata: bytes) -> Iterator[tuple[int, int, bool]]:
    """Offset and length of every buffer of a record batch, and whether the batch is compressed."""
    message = _follow(metadata, 0)
    header = _field(metadata, message, _HEADER_FIELD)
    if header is None:
        raise BadStreamError("a message has no header")
    batch = _follow(metadata, header)
    vector = _field(metadata, batch, _BUFFERS_FIELD)
    if vector is None:
        return
    compressed = _field(metadata, batch, _COMPRESSION_FIELD) is not None
    start = _follow(metadata, vector)
    (count,) = struct.unpack_from("<I", metadata, start)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, start + 4 + 16 * number)
        yield offset, length, compressed


def _follow(data: bytes, place: int) -> int:
    (distance,) = struct.unpack_from("<I", data, place)
    return place + int(distance)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where the field of a table is; None if the table does not have it."""
    (distance,) = struct.unpack_from("<i", data, table)
    fields = table - int(distance)
    if fields < 0:
        raise BadStreamError("a message is damaged")
    (size,) = struct.unpack_from("<H", data, fields)
    if 4 + 2 * number + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", data, fields + 4 + 2 * number)
    return table + int(offset) if offset else None
