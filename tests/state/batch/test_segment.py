"""A segment gives back what was sealed, or says that it is damaged; never anything else."""

from __future__ import annotations

import errno
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import DamagedFileError, StorageFullError
from strandline.state.batch.segment import Chunk, SegmentHeader, read_segment, write_segment
from strandline.state.disk_full import disk_full_error
from tests.examples import examples

HEADER = SegmentHeader(generation=3, batch=1_000_012, round=1, operator="visits", subtask=2, attempt=77)
CHUNKS: list[Chunk] = [([b"aa", b"bb"], [b"1", None]), ([b"cc"], [b""])]


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[Chunk]:
    keys = sorted(draw(st.sets(st.binary(min_size=2, max_size=20), max_size=40)))
    values = [draw(st.none() | st.binary(max_size=30)) for _ in keys]
    size = draw(st.integers(1, 40))
    return [(keys[at : at + size], values[at : at + size]) for at in range(0, len(keys), size)]


@given(chunks=chunk_lists(), operator=st.text(max_size=20), numbers=st.tuples(*[st.integers(0, 2**62)] * 5))
@settings(max_examples=examples(60), deadline=None)
def test_a_segment_gives_back_what_was_sealed(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[Chunk], operator: str, numbers: tuple[int, ...]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.segment"
    generation, batch, round_, subtask, attempt = numbers
    header = SegmentHeader(generation, batch, round_, operator, subtask, attempt)
    segment = write_segment(path, header, iter(chunks))
    assert (segment.header, segment.entries) == (header, sum(len(keys) for keys, _ in chunks))
    assert segment.size_bytes == path.stat().st_size
    found, entries = read_segment(path)
    assert found == header
    assert list(entries) == chunks


def test_any_flipped_byte_and_any_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_segment(path, HEADER, CHUNKS)
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes((good[at] ^ 0x20,)) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(DamagedFileError, match=str(path)):
                read_segment(path)
    path.write_bytes(good + b"\x00")
    with pytest.raises(DamagedFileError):
        read_segment(path)


@given(at=st.integers(0, 10**9), byte=st.integers(1, 255))
@settings(max_examples=examples(100), deadline=None)
def test_a_flipped_byte_is_found_in_a_large_segment_too(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "large.segment"
    keys = [b"key-%06d" % i for i in range(3_000)]
    write_segment(path, HEADER, [(keys, list(keys))])
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= byte
    path.write_bytes(data)
    with pytest.raises(DamagedFileError):
        read_segment(path)


def test_a_missing_segment_is_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="missing"):
        read_segment(tmp_path / "none")


def test_a_header_is_never_read_wrong(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_segment(path, HEADER, CHUNKS)
    good = path.read_bytes()
    for at in range(60):
        path.write_bytes(good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :])
        with suppress(DamagedFileError):
            assert read_segment(path)[0] == HEADER


def test_a_failed_seal_leaves_nothing_and_keeps_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_segment(path, HEADER, CHUNKS)

    def failing() -> object:
        yield CHUNKS[0]
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFullError, match=f"{tmp_path}.*local_dir"):
        write_segment(path, HEADER, failing())  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert list(read_segment(path)[1]) == CHUNKS


def test_an_error_of_the_disk_itself_reaches_the_caller(tmp_path: Path) -> None:
    """A limit on the size of files makes the kernel refuse a write in the middle, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    keys = [b"%020d" % i for i in range(20_000)]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(OSError, match="large"):
            write_segment(tmp_path / "s", HEADER, [(keys, list(keys))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_known_by_number_and_by_message(tmp_path: Path) -> None:
    for error in (OSError(errno.EDQUOT, "?"), Exception("IO error: No space left on device: 000012.sst")):
        with pytest.raises(StorageFullError), disk_full_error(tmp_path):
            raise error
    with pytest.raises(ValueError), disk_full_error(tmp_path):
        raise ValueError("other")
