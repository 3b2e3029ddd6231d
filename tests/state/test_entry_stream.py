"""Crafted segments and full snapshots with right checksums: an error of ours, no crash, and bounded memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from strandline.errors import DamagedFileError
from strandline.state import entry_stream
from strandline.state.backends.full_snapshot import read_full_snapshot, write_full_snapshot
from strandline.state.batch.segment import SegmentHeader, read_segment, read_table, write_segment
from strandline.state.entry_stream import BadStreamError, read_batches

HEADER = SegmentHeader(1, 7, 1, "visits", 0, 1)
SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
ZSTD = pa.ipc.IpcWriteOptions(compression="zstd")


def stream(
    *batches: pa.RecordBatch, schema: pa.Schema = SCHEMA, options: pa.ipc.IpcWriteOptions | None = None
) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = out.getvalue().to_pybytes()
    return data


def column(offsets: list[int], data: bytes, nulls: bytes | None = None) -> pa.Array:
    """A binary column with any offsets, right or wrong."""
    buffers = [
        nulls and pa.py_buffer(nulls),
        pa.py_buffer(struct.pack(f"<{len(offsets)}i", *offsets)),
        pa.py_buffer(data),
    ]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def batch(keys: pa.Array, values: pa.Array | None = None) -> pa.RecordBatch:
    other = keys if values is None else values
    return pa.RecordBatch.from_arrays([keys, other], schema=pa.schema([("key", pa.binary()), ("value", pa.binary())]))


GOOD = batch(pa.array([b"\0\0a", b"\0\0b"], pa.binary()))

CRAFTED: dict[str, Callable[[], bytes]] = {
    "offsets behind the data": lambda: stream(batch(column([0, 1 << 30, 4], b"abcd")).cast(SCHEMA)),
    "offsets that descend": lambda: stream(batch(column([0, 4, 2, 4], b"abcd")).cast(SCHEMA)),
    "negative offsets": lambda: stream(batch(column([0, -1000, 4], b"abcd")).cast(SCHEMA)),
    "null keys": lambda: stream(batch(pa.array([b"a", None], pa.binary())), schema=GOOD.schema),
    "other columns": lambda: stream(
        pa.record_batch({"key": pa.array([1]), "value": pa.array([2])}),
        schema=pa.schema([("key", pa.int64()), ("value", pa.int64())]),
    ),
    "large columns": lambda: stream(
        pa.record_batch({"key": pa.array([b"a"], pa.large_binary()), "value": pa.array([b"b"], pa.large_binary())}),
        schema=pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())]),
    ),
    "no columns": lambda: stream(schema=pa.schema([])),
    "a cut stream": lambda: stream(GOOD.cast(SCHEMA))[:-60],
    "nothing": lambda: b"",
    "no arrow": lambda: b"\xff" * 64,
}


def sealed(path: Path, body: bytes, entries: int) -> Path:
    """A segment with right checksums around any stream."""
    packed = msgspec.msgpack.encode(HEADER)
    data = struct.pack("<8sII", b"SLSEG\x00\x00\x01", len(packed), zlib.crc32(packed)) + packed + body
    crc = zlib.crc32(struct.pack("<QQ", entries, len(data)), zlib.crc32(data))
    path.write_bytes(data + struct.pack("<QQI8s", entries, len(data), crc, b"SLSEG\x00\x00\x01"))
    return path


def full(path: Path, body: bytes, group: int = 0, compression: str = "none", raw: int = 0, entries: int = 2) -> Path:
    """A full snapshot with right checksums around one block."""
    block = [group, 8, len(body), raw, entries, zlib.crc32(body)]
    index = msgspec.msgpack.encode([compression, [block]])
    foot = struct.pack("<QII8s", 8 + len(body), len(index), zlib.crc32(index), b"SLFULL\x00\x01")
    path.write_bytes(b"SLFULL\x00\x01" + body + index + foot)
    return path


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_stream_is_a_damaged_file(case: str, tmp_path: Path) -> None:
    body = CRAFTED[case]()
    segment = sealed(tmp_path / "s", body, 2)
    with pytest.raises(DamagedFileError, match="segment"):
        read_table(segment)
    with pytest.raises(DamagedFileError, match="segment"):
        list(read_segment(segment)[1])
    with pytest.raises(DamagedFileError, match="full snapshot"):
        list(read_full_snapshot(full(tmp_path / "f", body)))


def test_the_same_frame_around_a_good_stream_is_read(tmp_path: Path) -> None:
    body = stream(GOOD.cast(SCHEMA))
    assert read_table(sealed(tmp_path / "s", body, 2)).num_rows == 2
    strict = pa.schema([field.with_nullable(False) for field in SCHEMA])
    assert list(read_full_snapshot(full(tmp_path / "f", stream(GOOD.cast(strict), schema=strict)))) != []


def test_a_number_of_entries_that_is_wrong_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="2 entries instead of 3"):
        read_table(sealed(tmp_path / "s", stream(GOOD.cast(SCHEMA)), 3))


@pytest.mark.parametrize("announced", [1 << 30, 1 << 62, (1 << 63) - 1, -2])
def test_a_buffer_that_announces_too_much_is_not_decompressed(announced: int) -> None:
    data = bytearray(stream(batch(pa.array([bytes(1000)] * 50, pa.binary())).cast(SCHEMA), options=ZSTD))
    at = data.index(struct.pack("<q", 50_000))
    struct.pack_into("<q", data, at, announced)
    with pytest.raises(BadStreamError, match=r"announces|cannot read"):
        list(read_batches(pa.py_buffer(bytes(data)), SCHEMA, 1 << 20))


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_state_that_compresses_very_well_is_written_so_that_it_can_be_read(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_stream, "SMALL_BYTES", 1000)
    entries = [(b"\0\0%04d" % number, bytes(20_000)) for number in range(100)]
    keys, values = map(list, zip(*entries, strict=True))
    write_segment(tmp_path / "s", HEADER, [(keys, values)])
    assert [value for _keys, some in read_segment(tmp_path / "s")[1] for value in some] == values
    write_full_snapshot(tmp_path / "f", iter(entries), compression)
    assert [value for _keys, some in read_full_snapshot(tmp_path / "f") for value in some] == values


def test_a_small_file_with_much_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_segment(tmp_path / "s", HEADER, [([b"k"], [bytes(10 << 20)])])
    write_full_snapshot(tmp_path / "f", iter([(b"\0\0k", bytes(10 << 20))]), "zstd")
    monkeypatch.setattr(entry_stream, "SMALL_BYTES", 1000)
    with pytest.raises(DamagedFileError, match="more entries than a file of its size"):
        read_table(tmp_path / "s")
    with pytest.raises(DamagedFileError, match="cannot be as its index says"):
        list(read_full_snapshot(tmp_path / "f"))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([b"\0\0b", b"\0\0a"], "ascend"),
        ([b"\0\0a", b"\0\0a"], "ascend"),
        ([b"\0\1a", b"\0\1b"], "another key group"),
        ([b"", b"\0\0a"], "another key group"),
    ],
)
def test_keys_of_a_full_snapshot_are_in_order(keys: list[bytes], why: str, tmp_path: Path) -> None:
    """RocksDB refuses other keys with an error of its own."""
    strict = pa.schema([field.with_nullable(False) for field in SCHEMA])
    body = stream(batch(pa.array(keys, pa.binary())).cast(strict), schema=strict)
    with pytest.raises(DamagedFileError, match=why):
        list(read_full_snapshot(full(tmp_path / "f", body)))


@pytest.mark.parametrize(
    "block", [[0, -1, 8, 8, 0, 0], [0, 0, -1, 8, 0, 0], [0, 0, 1 << 62, 8, 0, 0], [1 << 16, 0, 8, 8, 0, 0]]
)
def test_an_index_that_leads_out_of_the_file_is_damage(block: list[int], tmp_path: Path) -> None:
    index = msgspec.msgpack.encode(["none", [block]])
    foot = struct.pack("<QII8s", 8, len(index), zlib.crc32(index), b"SLFULL\x00\x01")
    (tmp_path / "f").write_bytes(b"SLFULL\x00\x01" + index + foot)
    with pytest.raises(DamagedFileError, match="index"):
        read_full_snapshot(tmp_path / "f")


def test_a_description_of_the_columns_that_is_not_ours_never_reaches_arrow() -> None:
    """Arrow crashes on some. Another release of Arrow may write another form, and the entries are read all the same."""
    good = stream(GOOD.cast(SCHEMA))
    at = good.index(b"value")
    for changed in (b"VALUE", b"\xff\xff\xff\xff\xff", b"key\0\0"):
        (batch,) = read_batches(pa.py_buffer(good[:at] + changed + good[at + 5 :]), SCHEMA, 1 << 20)
        assert batch.to_pydict() == GOOD.to_pydict()
