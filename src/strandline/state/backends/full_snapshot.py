"""The full snapshot: the whole state in one file that every backend can read, one key group at a time.

    magic · blocks · index (msgpack) · index offset, length, crc32 · magic

A block is an Arrow IPC stream of the entries of one key group. Each block is compressed by itself, so that one key
group can be read alone. A key group of more than `BLOCK_BYTES` takes several blocks, so that memory stays bounded.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from operator import lt
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal
from uuid import uuid4

import msgspec
import pyarrow as pa

from strandline.decoding import msgpack_decoder
from strandline.errors import ConfigError, DamagedFileError
from strandline.state.disk_full import disk_full_error
from strandline.state.entry_stream import MAX_RATIO, BadStreamError, most_bytes, read_batches
from strandline.state.key_ranges import KEY_GROUP_BYTES

FULL_SNAPSHOT_NAME: Final = "state.full"
BLOCK_BYTES: Final = 16 << 20
COMPRESSIONS: Final = ("none", "snappy", "lz4", "zstd")

_MAGIC: Final = b"SLFULL\x00\x01"
_FOOT: Final = struct.Struct("<QII8s")
_SKIPPED: Final = struct.Struct("<II")
_SKIPPED_MAGIC: Final = 0x184D2A50
"""The start of a frame that Zstandard's readers skip: magic number and length."""
_SCHEMA: Final = pa.schema([pa.field(name, pa.binary(), nullable=False) for name in ("key", "value")])

Compression = Literal["none", "snappy", "lz4", "zstd"]
Entries = tuple[list[bytes], list[bytes]]


Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The position of entries of one key group in the file."""

    key_group: Annotated[int, msgspec.Meta(ge=0, lt=1 << (8 * KEY_GROUP_BYTES))]
    offset: Natural
    length: Natural
    raw_length: Natural
    entries: Natural
    crc32: Natural


class _Index(msgspec.Struct, frozen=True, array_like=True):
    compression: Compression
    blocks: list[Block]


def write_full_snapshot(path: Path, entries: Iterator[tuple[bytes, bytes]], compression: str = "lz4") -> int:
    """Write `entries`, in ascending key order, to `path` and return the size of the file.

    The file appears complete or not at all. Raises `StorageFullError` if the disk is full.
    """
    kind = _known(compression)
    draft = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with disk_full_error(path.parent):
        try:
            with draft.open("wb") as file:
                size = _write(file, entries, kind)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    return size


def read_full_snapshot(path: Path, key_groups: range | None = None) -> Iterator[Entries]:
    """The entries of `key_groups`, or of all key groups if None, in key order and in parts of bounded size.

    Every part is verified before it is returned. Raises `DamagedFileError`: at the call if the index is damaged, and
    during iteration if a block is.
    """
    file = _opened(path)
    try:
        index = _read_index(path, file)
    except BaseException:
        file.close()
        raise
    return _read_blocks(path, file, index, key_groups)


def _write(file: BinaryIO, entries: Iterator[tuple[bytes, bytes]], compression: Compression) -> int:
    file.write(_MAGIC)
    offset = len(_MAGIC)
    blocks: list[Block] = []
    codec = None if compression == "none" else pa.Codec(compression)
    for group, keys, values in _grouped(entries):
        raw = _to_ipc(keys, values)
        data = raw if codec is None else _packed(codec, raw)
        file.write(data)
        blocks.append(Block(group, offset, len(data), len(raw), len(keys), zlib.crc32(data)))
        offset += len(data)
    packed = msgspec.msgpack.encode(_Index(compression, blocks))
    file.write(packed)
    foot = _FOOT.pack(offset, len(packed), zlib.crc32(packed), _MAGIC)
    file.write(foot)
    return offset + len(packed) + len(foot)


def _grouped(entries: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    keys: list[bytes] = []
    values: list[bytes] = []
    prefix, size = b"", 0
    for key, value in entries:
        if size >= BLOCK_BYTES or (keys and not key.startswith(prefix)):
            yield int.from_bytes(prefix, "big"), keys, values
            keys, values, size = [], [], 0
        if not keys:
            prefix = key[:KEY_GROUP_BYTES]
        keys.append(key)
        values.append(value)
        size += len(key) + len(value)
    if keys:
        yield int.from_bytes(prefix, "big"), keys, values


def _to_ipc(keys: list[bytes], values: list[bytes]) -> pa.Buffer:
    out = pa.BufferOutputStream()
    columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
    with pa.ipc.new_stream(out, _SCHEMA) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
    return out.getvalue()


def _packed(codec: pa.Codec, raw: pa.Buffer) -> bytes:
    """The compressed bytes of a block. Padding follows if a reader would refuse them as too few for the block."""
    data: bytes = codec.compress(raw, asbytes=True)
    if raw.size > most_bytes(len(data)):  # only Zstandard compresses so well
        padding = raw.size // MAX_RATIO
        data += _SKIPPED.pack(_SKIPPED_MAGIC, padding) + bytes(padding)
    return data


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise _damaged(path, "it is missing") from error


def _read_index(path: Path, file: BinaryIO) -> _Index:
    size = path.stat().st_size
    if file.read(len(_MAGIC)) != _MAGIC or size < len(_MAGIC) + _FOOT.size:
        raise _damaged(path, "it does not begin like a full snapshot of this version")
    file.seek(size - _FOOT.size)
    offset, length, crc, magic = _FOOT.unpack(file.read(_FOOT.size))
    if magic != _MAGIC or offset + length + _FOOT.size != size:
        raise _damaged(path, "it is truncated, or its end is damaged")
    file.seek(offset)
    packed = file.read(length)
    if zlib.crc32(packed) != crc:
        raise _damaged(path, "its index is damaged")
    try:
        index = msgpack_decoder(_Index).decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, "its index cannot be read") from error
    for block in index.blocks:
        if block.offset + block.length > offset or block.raw_length > most_bytes(block.length):
            raise _damaged(path, f"the block of key group {block.key_group} cannot be as its index says")
    return index


def _read_blocks(path: Path, file: BinaryIO, index: _Index, key_groups: range | None) -> Iterator[Entries]:
    codec = None if index.compression == "none" else pa.Codec(index.compression)
    last: bytes | None = None
    with file:
        for block in index.blocks:
            if key_groups is not None and block.key_group not in key_groups:
                continue
            what = f"the block of key group {block.key_group}"
            file.seek(block.offset)
            data = file.read(block.length)
            if len(data) != block.length or zlib.crc32(data) != block.crc32:
                raise _damaged(path, f"{what} is damaged")
            try:
                entries = 0
                for batch in read_batches(_unpacked(codec, data, block), _SCHEMA, most_bytes(block.length)):
                    keys = batch.column(0).to_pylist()
                    last = _check_keys(keys, last, block.key_group)
                    entries += len(keys)
                    yield keys, batch.column(1).to_pylist()
            except BadStreamError as error:
                raise _damaged(path, f"{what} is damaged: {error}") from error
            if entries != block.entries:
                raise _damaged(path, f"{what} has {entries} entries instead of {block.entries}")


def _unpacked(codec: pa.Codec | None, data: bytes, block: Block) -> pa.Buffer:
    if codec is None:
        return pa.py_buffer(data)
    try:
        return codec.decompress(data, block.raw_length)
    except (pa.ArrowException, OSError) as error:
        raise BadStreamError(f"it cannot be decompressed: {error}") from error


def _check_keys(keys: list[bytes], last: bytes | None, key_group: int) -> bytes | None:
    """Raise `BadStreamError` unless `keys` ascend from `last` on and belong to the key group. Returns the last one."""
    prefix = key_group.to_bytes(KEY_GROUP_BYTES, "big")
    if not keys:
        return last
    if not (keys[0].startswith(prefix) and keys[-1].startswith(prefix)):
        raise BadStreamError("it has keys of another key group")
    if (last is not None and keys[0] <= last) or not all(map(lt, keys, islice(keys, 1, None))):
        raise BadStreamError("its keys do not ascend")
    return keys[-1]


def _known(compression: str) -> Compression:
    for known in COMPRESSIONS:
        if known == compression:
            return known
    raise ConfigError(f"snapshot_compression is {compression!r}; it must be one of {', '.join(COMPRESSIONS)}")


def _damaged(path: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"full snapshot {path} cannot be used: {what}; restore from another checkpoint")
