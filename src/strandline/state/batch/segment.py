"""The segment: a sealed file with the changes of one attempt at a batch in one operator subtask.

    magic · header length, crc32 · header (msgpack) · Arrow IPC stream (key, value) · padding · entries, length, crc32 ·
    magic

The last checksum covers everything before it, so that damage is found before any entry is used. The padding is empty
unless the entries compress so well that a reader would refuse the file: see `entry_stream.most_bytes`.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

import msgspec
import pyarrow as pa

from strandline.decoding import msgpack_decoder
from strandline.errors import DamagedFileError
from strandline.state.disk_full import disk_full_error
from strandline.state.entry_stream import MAX_RATIO, BadStreamError, most_bytes, read_batches
from strandline.state.key_ranges import first_key

_MAGIC: Final = b"SLSEG\x00\x00\x01"
_HEAD: Final = struct.Struct("<8sII")
_FOOT: Final = struct.Struct("<QQI8s")
_CHECKED: Final = struct.Struct("<QQ")
_READ_BYTES: Final = 4 << 20
_HEADER_BYTES: Final = 1 << 20
"""The longest header. A header has the uid of an operator and a few numbers."""
_TABLE_ROWS: Final = 1024
"""Rows of a table per record batch, so that a column with large values stays below 2 GB."""
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
"""Sorted keys compress well: half the size of lz4, for a few more milliseconds per 100,000 changes."""
_SCHEMA: Final = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])

Chunk = tuple[list[bytes], list[bytes | None]]
"""Keys in ascending order and their new values; the value None deletes the key."""


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True):
    """The attempt whose changes a segment holds."""

    generation: int
    batch: int
    round: int
    operator: str
    subtask: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment on the local disk."""

    path: Path
    header: SegmentHeader
    entries: int
    size_bytes: int


def write_segment(path: Path, header: SegmentHeader, chunks: Iterable[Chunk]) -> Segment:
    """Write `chunks` to a file that appears at `path` complete or not at all.

    The file is not synced: it survives the process, but not the host. Raises `StorageFullError` if the disk is full.
    """
    return _seal(path, header, (_batch(keys, values) for keys, values in chunks))


def seal_in_memory(path: Path, header: SegmentHeader, chunks: Iterable[Chunk]) -> tuple[Segment, bytes]:
    """The content of a segment for `path`, where nothing is written yet: see `put`."""
    buffer = BytesIO()
    entries, size = _write(buffer, header, (_batch(keys, values) for keys, values in chunks))
    return Segment(path, header, entries, size), buffer.getvalue()


def put(path: Path, content: bytes) -> None:
    """Write a segment that was sealed in memory, as `write_segment` does."""
    with _appears_at(path) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]


def write_table(path: Path, header: SegmentHeader, table: pa.Table) -> Segment:
    """Write a table of changes, as `read_table` or `merge` returns it, to a file: see `write_segment`."""
    return _seal(path, header, (batch.cast(_SCHEMA) for batch in table.to_batches(max_chunksize=_TABLE_ROWS)))


def read_segment(path: Path) -> tuple[SegmentHeader, Iterator[Chunk]]:
    """The header and the changes. The whole file is verified first. Raises `DamagedFileError`."""
    header, start = _open(path)
    entries, end = _verify(path)
    batches = _batches(path, start, end, entries)
    return header, ((batch.column(0).to_pylist(), batch.column(1).to_pylist()) for batch in batches)


def read_table(path: Path, key_groups: range | None = None) -> pa.Table:
    """The changes of a segment, or only those in `key_groups`. The whole file is verified first.

    Raises `DamagedFileError`.
    """
    _header, start = _open(path)
    entries, end = _verify(path)
    table = pa.Table.from_batches(_batches(path, start, end, entries), _SCHEMA)
    if key_groups is None:
        return table
    keys = table.column("key")
    first, end = (
        len(keys) if bound is None else bisect_left(range(len(keys)), bound, key=lambda at: keys[at].as_py())
        for bound in map(first_key, (key_groups.start, key_groups.stop))
    )
    return table.slice(first, end - first)


class _Checksummed:
    """The file object that Arrow writes to. It passes bytes on and computes their checksum and number."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0
        self.size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]  # an unbuffered write to a nearly full disk may be short
        self.crc = zlib.crc32(data, self.crc)
        written = len(data)
        self.size += written
        return written

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _batch(keys: list[bytes], values: list[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=_SCHEMA)


def _seal(path: Path, header: SegmentHeader, batches: Iterable[pa.RecordBatch]) -> Segment:
    with _appears_at(path) as file:
        entries, size = _write(file, header, batches)
    return Segment(path, header, entries, size)


@contextmanager
def _appears_at(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` complete or not at all."""
    draft = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with disk_full_error(path.parent):
        try:
            with draft.open("wb", buffering=0) as file:
                yield file
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _write(file: BinaryIO, header: SegmentHeader, batches: Iterable[pa.RecordBatch]) -> tuple[int, int]:
    out = _Checksummed(file)
    packed = msgspec.msgpack.encode(header)
    out.write(_HEAD.pack(_MAGIC, len(packed), zlib.crc32(packed)) + packed)
    entries = memory = 0
    with pa.ipc.new_stream(out, _SCHEMA, options=_COMPRESSED) as stream:
        for batch in batches:
            stream.write_batch(batch)
            entries += batch.num_rows
            memory += batch.nbytes
    if 2 * memory > most_bytes(out.size):  # `memory` leaves out the space between buffers
        out.write(bytes(2 * memory // MAX_RATIO))
    length = out.size
    crc = zlib.crc32(_CHECKED.pack(entries, length), out.crc)
    out.write(_FOOT.pack(entries, length, crc, _MAGIC))
    return entries, out.size


def _open(path: Path) -> tuple[SegmentHeader, int]:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise _damaged(path, "it ends within its header")
            magic, length, crc = _HEAD.unpack(head)
            if magic != _MAGIC:
                raise _damaged(path, "it does not begin like a segment of this version")
            if length > _HEADER_BYTES:
                raise _damaged(path, "its header is damaged")
            packed = file.read(length)
    except FileNotFoundError as error:
        raise _damaged(path, "it is missing") from error
    if len(packed) < length or zlib.crc32(packed) != crc:
        raise _damaged(path, "its header is damaged")
    try:
        return msgpack_decoder(SegmentHeader).decode(packed), _HEAD.size + length
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, "its header cannot be read") from error


def _verify(path: Path) -> tuple[int, int]:
    """Compare the checksum of the whole file. Returns the number of entries, and where the stream of entries ends."""
    size = path.stat().st_size
    body = size - _FOOT.size
    if body < _HEAD.size:
        raise _damaged(path, "it is truncated")
    with path.open("rb", buffering=0) as file:
        crc, left = 0, body
        while left and (data := file.read(min(left, _READ_BYTES))):
            crc = zlib.crc32(data, crc)
            left -= len(data)
        foot = file.read(_FOOT.size)
    if left or len(foot) < _FOOT.size:
        raise _damaged(path, "it is truncated")
    entries, length, expected, magic = _FOOT.unpack(foot)
    if magic != _MAGIC or length != body:
        raise _damaged(path, "it is truncated, or its end is damaged")
    if zlib.crc32(_CHECKED.pack(entries, length), crc) != expected:
        raise _damaged(path, "its checksum is wrong")
    return entries, body


def _batches(path: Path, start: int, end: int, entries: int) -> Iterator[pa.RecordBatch]:
    """The validated batches of a segment that has `entries` entries."""
    if start > end:
        raise _damaged(path, "its header is longer than the file")
    with pa.memory_map(str(path)) as file:
        file.seek(start)
        data = file.read_buffer(end - start)
    found = 0
    try:
        for batch in read_batches(data, _SCHEMA, most_bytes(end)):
            found += batch.num_rows
            yield batch
    except BadStreamError as error:
        raise _damaged(path, str(error)) from error
    if found != entries:
        raise _damaged(path, f"it has {found} entries instead of {entries}")


def _damaged(path: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"segment {path} cannot be used: {what}; the subtask must go back to its last checkpoint")
