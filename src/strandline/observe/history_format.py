"""The files of a run's history: compressed, checksummed and versioned."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import zlib
from collections.abc import Mapping

import msgspec
from backports import zstd

from strandline.checkpoint.unpacking import unpacked
from strandline.errors import HistoryError
from strandline.observe.facts import JobFacts
from strandline.observe.history_record import Events

FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 << 20
"""No file of the history is larger."""
MAX_CONTENT_BYTES = 128 << 20
"""No file of the history has more content. The largest one that a run writes has a third of it."""

_MAGIC = b"SLHY"
_START = struct.Struct("<4sH")
_REST = struct.Struct("<QQI")
"""The sizes of the compressed and of the uncompressed content, and the checksum of sizes and content."""
_HEADER = _START.size + _REST.size
_COMPRESSION = 3
_ODD_FLOAT = re.compile(rb"\xca[\x7f\xff]|\xcb[\x7f\xff]")
"""How every float begins that is not finite. Other bytes may look the same, so the figures are looked at then."""


class Part(msgspec.Struct, frozen=True):
    """One file of the history of a run.

    Attributes:
        job: The name of the job.
        run: The id of the run.
        number: The number of the file; numbers rise.
        whole: Whether the file repeats all files of the run before it.
        head: The facts of the run at that moment, without what `events` holds: a `JobFacts`.
        events: What happened since the file before, or since the run began.
    """

    job: str
    run: str
    number: int
    whole: bool
    head: msgspec.Raw
    events: Events


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Part)
_head_decoder = msgspec.msgpack.Decoder(JobFacts)


def encode_part(number: int, whole: bool, head: JobFacts, events: Events) -> bytes:
    """The content of a file of the history."""
    part = Part(head.name, head.run, number, whole, msgspec.Raw(_encoder.encode(head)), events)
    body = _encoder.encode(part)
    packed = zstd.compress(body, _COMPRESSION)
    sizes = (len(packed), len(body))
    return _START.pack(_MAGIC, FORMAT_VERSION) + _REST.pack(*sizes, _checksum(*sizes, packed)) + packed


def content_bytes(data: bytes) -> int:
    """The size of the content that a file of the history announces; 0 if it announces none."""
    return int(_REST.unpack_from(data, _START.size)[1]) if len(data) >= _HEADER else 0


def decode_part(data: bytes, where: str, limit: int = MAX_CONTENT_BYTES) -> Part:
    """Reads a file of the history. Raises `HistoryError` if it is damaged, or a later release wrote it.

    A content of more than `limit` bytes is not unpacked.
    """
    if len(data) < _START.size or not data.startswith(_MAGIC):
        raise _damaged(where, "it is no file of a history")
    version = _START.unpack_from(data)[1]
    if version > FORMAT_VERSION:
        raise HistoryError(
            f"{where}: a later release wrote this part of the history, in format version {version}; this release reads "
            f"up to version {FORMAT_VERSION}. Use the later release to see it"
        )
    if len(data) < _HEADER:
        raise _damaged(where, "it is cut off")
    packed_size, size, checksum = _REST.unpack_from(data, _START.size)
    packed = data[_HEADER:]
    if len(packed) != packed_size or _checksum(packed_size, size, packed) != checksum:
        raise _damaged(where, "its checksum is wrong")
    if size > limit:
        raise _damaged(where, f"it announces {size:,} bytes, and there is room for {limit:,}")
    try:
        body = unpacked(packed, size)
        if len(body) != size:
            raise _damaged(where, "it has another size than it announces")
        part = _decoder.decode(body)
        if _ODD_FLOAT.search(body) and not _is_finite(part.events):
            raise _damaged(where, "one of its figures is no finite number")
        return part
    except (zstd.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, f"its content cannot be read: {error}") from error


def decode_head(part: Part, where: str) -> JobFacts:
    """The facts in a file of the history. Raises `HistoryError` if they cannot be read."""
    try:
        head = _head_decoder.decode(part.head)
        if _ODD_FLOAT.search(part.head) and not _is_finite(head):
            raise _damaged(where, "one of its figures is no finite number")
        return head
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HistoryError(
            f"{where}: the figures of the run cannot be read; another release may have written them: {error}"
        ) from error


def _is_finite(value: object) -> bool:
    """Whether all numbers in a decoded value are finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (str, int)) or value is None:
        return True
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else _fields(value)
    return all(_is_finite(getattr(value, name)) for name in names)


def _fields(value: object) -> list[str]:
    return [one.name for one in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


def _checksum(packed_size: int, size: int, packed: bytes) -> int:
    return zlib.crc32(packed, zlib.crc32(struct.pack("<QQ", packed_size, size)))


def _damaged(where: str, why: str) -> HistoryError:
    return HistoryError(f"{where}: this part of the history is damaged: {why}. The rest can still be read")
