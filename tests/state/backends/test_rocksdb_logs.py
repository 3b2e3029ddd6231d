"""The frame of RocksDB's log files: real ones pass, and one that RocksDB would read without end is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import DamagedFileError
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.backends.rocksdb_logs import is_log_file, log_problem
from tests.examples import examples

BLOCK = 32 << 10


def framed(lengths: list[int]) -> bytes:
    """A log file of records with these lengths, as RocksDB writes it."""
    data = bytearray()
    for length in lengths:
        first = True
        while True:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += bytes(left)
                left = BLOCK
            part = min(length, left - 7)
            last = part == length
            kind = (1 if last else 2) if first else (4 if last else 3)
            data += struct.pack("<IHB", 0, part, kind) + b"x" * part
            length -= part
            first = False
            if last:
                break
    return bytes(data)


@given(st.lists(st.integers(0, 100) | st.integers(BLOCK - 30, BLOCK + 30) | st.just(3 * BLOCK), max_size=8), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_logs_pass_and_cut_or_changed_ones_do_not(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "MANIFEST-000001"
    good = framed(lengths)
    path.write_bytes(good)
    assert log_problem(path) is None
    if lengths:
        path.write_bytes(good[: -data.draw(st.integers(1, min(len(good), lengths[-1] % BLOCK + 6)))])
        assert log_problem(path) is not None
        path.write_bytes(good[:6] + bytes([data.draw(st.integers(5, 255))]) + good[7:])
        assert log_problem(path) is not None


def test_a_record_of_an_unknown_type_does_not_hang_a_restore(tmp_path: Path) -> None:
    backend = open_backend("rocksdb", tmp_path / "db")
    backend.apply([b"\0\0k"], [b"v"])
    files = [RestoredFile(f.name, f.path, f.identity, f.shared) for f in backend.snapshot(tmp_path / "s").write()]
    backend.close()
    manifest = next(file for file in files if is_log_file(file.name))
    assert log_problem(manifest.path) is None
    data = bytearray(manifest.path.read_bytes())
    (length,) = struct.unpack_from("<H", data, 4)
    data[7 + length + 6] = 8  # the type of the second record
    manifest.path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="unknown type 8"):
        open_backend("rocksdb", tmp_path / "again", restored_files=files)
