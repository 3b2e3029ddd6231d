"""Files that hold state, as formats that are fuzzed: segments, full snapshots, RocksDB's own files."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa

from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.backends.full_snapshot import FULL_SNAPSHOT_NAME, write_full_snapshot
from strandline.state.batch.merge import merged_changes
from strandline.state.batch.segment import SegmentHeader, read_segment, write_segment
from strandline_bench.fuzz.format import Format
from strandline_bench.fuzz.mutation import mutated_bytes, mutated_tree

WRONG_OFFSETS = (-1, -16, 3, 1 << 20, (1 << 31) - 1, -(1 << 31))


def entries_of(count: int, groups: int = 3) -> Iterator[tuple[bytes, bytes]]:
    for number in range(count):
        group = number * groups // count
        yield group.to_bytes(2, "big") + b"total\0%06d" % number, b"\x91\x07" * (number % 5)


class Segments(Format):
    """A segment: read alone, and merged with a good one into a backend."""

    name = "segment"
    weight = 18
    _MAGIC = b"SLSEG\x00\x00\x01"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._good, self._bad = folder / "good", folder / "bad"
        header = SegmentHeader(1, 7, 1, "count", 0, 1)
        self._header = msgspec.msgpack.encode(header)
        keys = [key for key, _value in entries_of(60)]
        values: list[bytes | None] = [value or None for _key, value in entries_of(60)]
        write_segment(self._good, header, [(keys, values)])
        compressed = self._good.read_bytes()
        self._start = 16 + len(self._header)
        self._streams = [compressed[self._start : -28]]
        for some in ((keys, values), ([b"\0\0a"], [None]), ([], [])):
            self._streams.append(_stream([some, some], nullable=True))
        self._streams.append(_stream([(keys, values)], nullable=True, compression="lz4"))
        self.samples = (compressed, *(self._wrap(self._header, stream, 60) for stream in self._streams[1:]))

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        stream = mutated_bytes(random, random.choice(self._streams), tuple(self._streams))
        return self._wrap(self._header, stream, _rows(stream))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        """A mutated header, or a stream with a plausible shape and wrong offsets."""
        if random.random() < 0.1:
            packed = mutated_bytes(random, self._header, (self._header,))
            return self._wrap(packed, random.choice(self._streams), 60)
        stream = crafted_stream(random)
        return self._wrap(self._header, stream, _rows(stream))

    @classmethod
    def _wrap(cls, packed: bytes, stream: bytes, entries: int) -> bytes:
        data = struct.pack("<8sII", cls._MAGIC, len(packed), zlib.crc32(packed)) + packed + stream
        crc = zlib.crc32(struct.pack("<QQ", entries, len(data)), zlib.crc32(data))
        return data + struct.pack("<QQI8s", entries, len(data), crc, cls._MAGIC)

    def read(self, data: bytes) -> None:
        self._bad.write_bytes(data)
        _header, chunks = read_segment(self._bad)
        for _keys, _values in chunks:
            pass
        for keys, values in merged_changes([self._good, self._bad], range(1, 3)):
            assert len(keys) == len(values)


def _stream(chunks: list[tuple[list[bytes], list[Any]]], *, nullable: bool, compression: str | None = None) -> bytes:
    schema = pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=nullable)]
    )
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for keys, values in chunks:
            columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    data: bytes = out.getvalue().to_pybytes()
    return data


def crafted_stream(random: Random, *, nullable: bool = True) -> bytes:
    """A stream whose buffers are well placed, but whose offsets are wrong."""
    count = random.choice((2, 10, 30))
    keys = [b"\0\0total\0%08d" % number for number in range(count)]
    good = [16 * number for number in range(count + 1)]
    wrong = list(good)
    for _ in range(random.choice((1, 1, 2))):
        wrong[random.randrange(count + 1)] = random.choice((*WRONG_OFFSETS, 16 * count + 1))
    pattern = struct.pack(f"<{count + 1}i", *good)
    before, middle, after = _stream([(keys, keys)], nullable=nullable).split(pattern)
    first, second = random.choice(((good, wrong), (wrong, good), (wrong, wrong)))
    return before + struct.pack(f"<{count + 1}i", *first) + middle + struct.pack(f"<{count + 1}i", *second) + after


_COLUMNS = pa.schema([("key", pa.binary()), ("value", pa.binary())])


def _rows(stream: bytes) -> int:
    """How many entries Arrow finds in a stream, so that the footer agrees with it; 0 if it cannot be read."""
    try:
        messages = list(pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)))[1:]
        # The schema of a mutated stream must not be read: Arrow may crash.
        return sum(pa.ipc.read_record_batch(message, _COLUMNS).num_rows for message in messages)
    except (pa.ArrowException, OSError, ValueError, MemoryError):
        return 0


class FullSnapshots(Format):
    """A full snapshot, loaded into the heap backend."""

    name = "full snapshot"
    weight: float = 15
    backend = "heap"
    _MAGIC = b"SLFULL\x00\x01"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / FULL_SNAPSHOT_NAME
        samples = []
        for compression in ("none", "lz4", "zstd", "snappy"):
            write_full_snapshot(self._path, entries_of(40), compression)
            samples.append(self._path.read_bytes())
        self.samples = tuple(samples)
        entries = list(entries_of(40, 1))
        self._stream = _stream([([key for key, _ in entries], [value for _, value in entries])], nullable=False)

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        """One block with a mutated stream, compressed or not; or with a mutated compressed form."""
        compression = random.choice(("none", "lz4", "zstd", "snappy"))
        stream = mutated_bytes(random, self._stream, (self._stream,))
        block = stream if compression == "none" else pa.Codec(compression).compress(stream, asbytes=True)
        if random.random() < 0.3:
            block = mutated_bytes(random, block, (block,))
        return self._wrap(compression, [[0, 8, len(block), len(stream), _rows(stream), zlib.crc32(block)]], block)

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        if random.random() < 0.6:
            stream = crafted_stream(random, nullable=False)
            return self._wrap("none", [[0, 8, len(stream), len(stream), _rows(stream), zlib.crc32(stream)]], stream)
        offset, length = struct.unpack_from("<QI", data, len(data) - 24)
        tree = mutated_tree(random, msgspec.msgpack.decode(data[offset : offset + length]))
        try:
            return self._wrap_index(msgspec.msgpack.encode(tree), data[8:offset])
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None

    def _wrap(self, compression: str, blocks: list[list[int]], body: bytes) -> bytes:
        return self._wrap_index(msgspec.msgpack.encode([compression, blocks]), body)

    def _wrap_index(self, index: bytes, body: bytes) -> bytes:
        foot = struct.pack("<QII8s", 8 + len(body), len(index), zlib.crc32(index), self._MAGIC)
        return self._MAGIC + body + index + foot

    def read(self, data: bytes) -> None:
        self._path.write_bytes(data)
        files = [RestoredFile(FULL_SNAPSHOT_NAME, self._path, "i", False)]
        backend = open_backend(self.backend, self.folder / "db", restored_files=files, key_groups=range(2))
        try:
            for _key, _value in backend.scan(b""):
                pass
        finally:
            backend.close()


class FullSnapshotsIntoRocksDB(FullSnapshots):
    """A full snapshot, loaded into RocksDB."""

    name = "full snapshot into RocksDB"
    weight = 0.3
    backend = "rocksdb"


class RocksDBFiles(Format):
    """The files of an incremental snapshot, one of them mutated. An input is the place of the file and its content."""

    name = "RocksDB files"
    weight = 0.3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        backend = open_backend("rocksdb", folder / "first")
        for _round in range(2):
            keys, values = map(list, zip(*entries_of(200), strict=True))
            backend.apply(keys, values)
            snapshot = backend.snapshot(folder / f"snapshot-{_round}")
            files = snapshot.write()
        backend.close()
        self._files = files
        self.samples = tuple(bytes([place]) + file.path.read_bytes() for place, file in enumerate(files))

    def mutated(self, random: Random, mode: str) -> bytes:
        sample = random.choice(self.samples)
        return sample[:1] + mutated_bytes(random, sample[1:], tuple(other[1:] for other in self.samples))

    def read(self, data: bytes) -> None:
        bad = self.folder / "bad"
        bad.write_bytes(data[1:])
        files = [
            RestoredFile(file.name, bad if place == data[0] else file.path, file.identity, file.shared)
            for place, file in enumerate(self._files)
        ]
        try:
            backend = open_backend("rocksdb", self.folder / "db", restored_files=files, key_groups=range(2))
            try:
                for _key, _value in backend.scan(b""):
                    pass
            finally:
                backend.close()
        finally:
            shutil.rmtree(self.folder / "db", ignore_errors=True)
