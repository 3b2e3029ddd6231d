"""Merged segments against a dict: of every key the last change counts, in whatever files it came."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import DamagedFileError
from strandline.state.batch.merge import merge, merged_changes
from strandline.state.batch.segment import (
    SegmentHeader,
    read_segment,
    read_table,
    write_segment,
    write_table,
)
from strandline.state.chunks import CHUNK_ENTRIES
from tests.examples import examples

Changes = dict[bytes, bytes | None]

GROUPS = 4
KEYS = st.builds(lambda group, rest: group.to_bytes(2, "big") + rest, st.integers(0, GROUPS - 1), st.binary(max_size=2))
VALUES = st.none() | st.binary(max_size=3)
SEGMENTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=8), max_size=6)
RANGES = st.none() | st.tuples(st.integers(0, GROUPS), st.integers(0, GROUPS)).map(lambda ends: range(*sorted(ends)))


def header(batch: int) -> SegmentHeader:
    return SegmentHeader(1, batch, 0, "op", 0, -1)


def written(folder: Path, segments: list[Changes], per_chunk: int = 3) -> list[Path]:
    """Each segment sealed in a file, in chunks as a change set gives them."""
    paths = []
    for batch, segment in enumerate(segments):
        keys = sorted(segment)
        chunks = [
            (part, [segment[key] for key in part])
            for part in (keys[at : at + per_chunk] for at in range(0, len(keys), per_chunk))
        ]
        paths.append(write_segment(folder / f"{batch}.segment", header(batch), chunks).path)
    return paths


def expected(segments: list[Changes], key_groups: range | None = None) -> Changes:
    whole: Changes = {}
    for segment in segments:
        whole.update(segment)
    return {
        key: value
        for key, value in sorted(whole.items())
        if key_groups is None or int.from_bytes(key[:2], "big") in key_groups
    }


def entries(table: pa.Table) -> list[tuple[bytes, bytes | None]]:
    return list(zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True))


@settings(deadline=None, max_examples=examples(60))
@given(SEGMENTS.filter(bool), RANGES)
def test_merged_tables_hold_the_last_change_of_every_key_in_order(
    segments: list[Changes], key_groups: range | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tables = [read_table(path, key_groups) for path in written(Path(folder), segments)]
        merged = merge(tables)
        assert entries(merged) == list(expected(segments, key_groups).items())
        target = Path(folder) / "merged.segment"
        sealed = write_table(target, header(9), merged)
        assert (sealed.entries, sealed.size_bytes) == (merged.num_rows, target.stat().st_size)
        assert read_segment(target)[0] == header(9)
        assert entries(read_table(target)) == entries(merged)


@settings(deadline=None, max_examples=examples(60))
@given(SEGMENTS, RANGES, st.sampled_from([1, 2000, 1 << 20]))
def test_changes_applied_in_their_order_give_the_state(
    segments: list[Changes], key_groups: range | None, at_once: int
) -> None:
    """Also where not all segments are merged at once: then a key may come again, its last change last."""
    with tempfile.TemporaryDirectory() as folder:
        state: Changes = {}
        for keys, values in merged_changes(written(Path(folder), segments), key_groups, at_once):
            assert keys == sorted(set(keys))
            state.update(zip(keys, values, strict=True))
        assert dict(sorted(state.items())) == expected(segments, key_groups)


@settings(deadline=None, max_examples=examples(40))
@given(SEGMENTS.filter(lambda segments: sum(map(len, segments)) > 1), st.integers(1, 5))
def test_merging_a_part_first_makes_no_difference(segments: list[Changes], split: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = written(Path(folder), segments)
        first = Path(folder) / "first.segment"
        write_table(first, header(9), merge([read_table(path) for path in paths[:split]]))
        halves = [read_table(path) for path in [first, *paths[split:]]]
        assert entries(merge(halves)) == list(expected(segments).items())


def test_many_entries_come_in_chunks(tmp_path: Path) -> None:
    keys = [number.to_bytes(4, "big") for number in range(2 * CHUNK_ENTRIES + 5)]
    older: Changes = dict.fromkeys(keys, b"older")
    newer: Changes = dict.fromkeys(keys[::2], b"newer") | dict.fromkeys(keys[1::4])
    found = list(merged_changes(written(tmp_path, [older, newer], per_chunk=CHUNK_ENTRIES)))
    assert [len(chunk) for chunk, _values in found] == [CHUNK_ENTRIES, CHUNK_ENTRIES, 5]
    merged = {key: value for chunk, values in found for key, value in zip(chunk, values, strict=True)}
    assert merged == {**older, **newer}


def test_large_values_come_in_small_chunks(tmp_path: Path) -> None:
    large: Changes = {bytes([0, 0, number]): bytes(20 << 20) for number in range(3)}
    found = list(merged_changes(written(tmp_path, [large, {b"\0\0\1": None}])))
    assert [keys for keys, _values in found] == [[b"\0\0\0"], [b"\0\0\1", b"\0\0\2"]]
    assert [value and len(value) for _keys, values in found for value in values] == [20 << 20, None, 20 << 20]


def test_no_segments_and_empty_segments_change_nothing(tmp_path: Path) -> None:
    assert list(merged_changes([])) == []
    assert [chunk for chunk in merged_changes(written(tmp_path, [{}, {}, {}])) if chunk[0]] == []
    assert merge([read_table(path) for path in written(tmp_path, [{}, {}])]).num_rows == 0


def test_the_highest_key_groups_are_read_to_the_end(tmp_path: Path) -> None:
    segment: Changes = {group.to_bytes(2, "big"): b"x" for group in (0, 1, 0x7FFF, 0xFFFF)}
    (path,) = written(tmp_path, [segment])
    assert [key for key, _value in entries(read_table(path, range(1, 1 << 16)))] == sorted(segment)[1:]
    assert [key for key, _value in entries(read_table(path, range(0x7FFF, 0x8000)))] == [b"\x7f\xff"]


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    content: list[Changes] = [{bytes([0, group]): bytes(group) for group in range(20)} for _ in range(3)]
    return written(tmp_path_factory.mktemp("segments"), content)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_one_damaged_segment_is_an_error_before_any_change_comes(segments: list[Path], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, 2))
    whole = segments[which].read_bytes()
    damaged = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged[at] ^= 1 + data.draw(st.integers(0, 254))
    else:
        del damaged[at:]
    segments[which].write_bytes(damaged)
    try:
        with pytest.raises(DamagedFileError):
            next(merged_changes(segments))
        with pytest.raises(DamagedFileError):
            read_table(segments[which])
    finally:
        segments[which].write_bytes(whole)


def test_a_missing_segment_is_an_error(tmp_path: Path) -> None:
    paths = written(tmp_path, [{b"\0\0": b"x"}])
    with pytest.raises(DamagedFileError):
        list(merged_changes([*paths, tmp_path / "missing.segment"]))


def test_what_is_read_as_a_table_is_what_is_read_in_chunks(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [{bytes([0, 0, number]): None if number % 3 else b"x" for number in range(10)}])
    _header, chunks = read_segment(path)
    assert entries(read_table(path)) == [pair for keys, values in chunks for pair in zip(keys, values, strict=True)]
