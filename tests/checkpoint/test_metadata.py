"""The `_metadata` file: it comes back as it was, or not at all."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.metadata import (
    FORMAT_VERSION,
    CheckpointMetadata,
    FileHandle,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskState,
    all_files,
    decode,
    encode,
    file_key,
    full_bytes,
    keyed_files,
)
from strandline.checkpoint.registry import SharedKey
from strandline.errors import MetadataError

GOLDEN = Path(__file__).parent / "golden"


def sample(version: int = 2) -> CheckpointMetadata:
    """The checkpoint that `golden/v1_metadata` and `golden/v2_metadata` hold."""
    manifest = FileHandle("visits/chk-7/cd34", 120, "crc32:00000001")
    if version >= 2:
        manifest = FileHandle("visits/shared/cd34-group", 120, "crc32:00000001", 4000, 5000)
    return CheckpointMetadata(
        format_version=version,
        job="visits",
        checkpoint_id=7,
        generation=3,
        batch_id=3_000_000_011,
        kind="checkpoint",
        parallelism=2,
        max_parallelism=128,
        operators=("count",),
        subtasks=(
            SubtaskState(
                operator="count",
                subtask=0,
                key_group_start=0,
                key_group_end=64,
                backend="rocksdb",
                incremental=True,
                files=(
                    StateFile(
                        "000015.sst", "3f2a/000015", True, FileHandle("visits/shared/ab12", 4096, "crc32:89abcdef")
                    ),
                    StateFile("MANIFEST-000004", "m", False, manifest),
                    StateFile("CURRENT", "c", False, inline=b"MANIFEST-000004\n"),
                ),
                states=({"name": "total", "kind": "value", "schema": "n long", "ttl": None},),
            ),
            SubtaskState("count", 1, 64, 128, "rocksdb", True, ()),
        ),
        source=SourcePosition(batch=3_000_000_011, files={"offsets/11": b"v1\n{}\n7", "metadata": b'{"id":"x"}'}),
        sink_files=(SinkFile("out", "_staged/p-0", "part-0.parquet", 10, 2048),),
        trigger_time=1_700_000_000.25,
        completed_time=1_700_000_001.5,
        properties={"strandline": "0.1.0"},
    )


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_the_golden_file_of_every_version_is_read(version: int) -> None:
    assert decode((GOLDEN / f"v{version}_metadata").read_bytes(), "golden") == sample(version)


def test_what_was_encoded_is_decoded() -> None:
    assert decode(encode(sample()), "here") == sample()


paths = st.text("abc/-", min_size=1, max_size=8)
handles = st.builds(FileHandle, path=paths, size=st.integers(0, 2**40), checksum=paths)
state_files = st.builds(
    StateFile,
    name=st.text(max_size=5),
    identity=st.text(max_size=5),
    shared=st.booleans(),
    handle=st.none() | handles,
    inline=st.none() | st.binary(max_size=5),
)
subtask_states = st.builds(
    SubtaskState,
    operator=st.text(max_size=5),
    subtask=st.integers(0, 9),
    key_group_start=st.integers(0, 2**15),
    key_group_end=st.integers(0, 2**15),
    backend=st.sampled_from(["heap", "rocksdb"]),
    incremental=st.booleans(),
    files=st.lists(state_files, max_size=4).map(tuple),
    states=st.lists(
        st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3) | st.integers(-5, 5)), max_size=2
    ).map(tuple),
)
metadatas = st.builds(
    CheckpointMetadata,
    job=st.text(max_size=8),
    checkpoint_id=st.integers(0, 2**40),
    generation=st.integers(0, 2**31),
    batch_id=st.integers(-1, 2**60),
    kind=st.sampled_from(["checkpoint", "savepoint"]),
    parallelism=st.integers(1, 2**15),
    max_parallelism=st.integers(1, 2**15),
    operators=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    subtasks=st.lists(subtask_states, max_size=3).map(tuple),
    source=st.builds(
        SourcePosition, batch=st.integers(-1, 2**60), files=st.dictionaries(paths, st.binary(max_size=5), max_size=3)
    ),
    sink_files=st.lists(
        st.builds(SinkFile, sink=paths, staged=paths, final=paths, rows=st.integers(0, 9), size=st.integers(0, 9)),
        max_size=2,
    ).map(tuple),
    trigger_time=st.floats(0, 2e9),
    completed_time=st.floats(0, 2e9),
    properties=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)


@given(metadatas)
def test_any_metadata_comes_back_as_it_was(metadata: CheckpointMetadata) -> None:
    assert decode(encode(metadata), "here") == metadata


def test_every_flipped_byte_is_noticed() -> None:
    data = encode(sample())
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            with pytest.raises(MetadataError, match="chk-7/_metadata"):
                decode(bytes(damaged), "chk-7/_metadata")


def test_every_truncation_is_noticed() -> None:
    data = encode(sample())
    for length in range(len(data)):
        with pytest.raises(MetadataError, match="chk-7/_metadata is truncated"):
            decode(data[:length], "chk-7/_metadata")


def test_bytes_behind_the_end_are_damage() -> None:
    with pytest.raises(MetadataError, match="damaged: 1 bytes too many"):
        decode(encode(sample()) + b"x", "here")


def test_another_file_is_not_metadata() -> None:
    for data in (b"PAR1 and more", b"x", b'{"json": true}'):
        with pytest.raises(MetadataError, match="not a metadata file"):
            decode(data, "here")


def test_a_newer_version_names_both_versions() -> None:
    data = bytearray(encode(sample()))
    struct.pack_into(">H", data, 4, FORMAT_VERSION + 1)
    with pytest.raises(MetadataError, match=rf"version {FORMAT_VERSION + 1}, too new .* version {FORMAT_VERSION}\."):
        decode(bytes(data), "here")


def test_the_helpers_know_which_file_is_which() -> None:
    metadata = sample(1)
    assert [file.name for _, file in all_files(metadata)] == ["000015.sst", "MANIFEST-000004", "CURRENT"]
    assert [file_key(state, file) for state, file in all_files(metadata) if file.shared] == [
        SharedKey("count", 0, 64, "3f2a/000015")
    ]
    assert [handle.path for _key, handle in keyed_files(metadata.subtasks)] == [
        "visits/shared/ab12",
        "visits/chk-7/cd34",
    ]
    assert full_bytes(metadata) == 4096 + 120 + len(b"MANIFEST-000004\n")
