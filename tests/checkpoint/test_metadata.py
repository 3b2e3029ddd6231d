"""The `_metadata` file: it comes back as it was, or not at all."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import (
    FORMAT_VERSION,
    CheckpointMetadata,
    FileHandle,
    Kind,
    SinkFile,
    SourceLog,
    SourceLogPiece,
    SourcePosition,
    StateFile,
    SubtaskState,
    Times,
    all_files,
    decode,
    encode,
    file_key,
    full_bytes,
    keyed_files,
    segment_file,
    segment_name,
)
from strandline.checkpoint.registry import SharedKey
from strandline.checkpoint.steps import StepDescription
from strandline.errors import MetadataError

GOLDEN = Path(__file__).parent / "golden"
HOME = Home("visits", 7)
STEP = StepDescription(
    "count",
    "window",
    (("user", "string"), ("place", "struct<`a b`:int>")),
    (("ts", "timestamp"),),
    {"size_ms": 300_000, "slide_ms": 60_000, "offset_ms": 0, "allowed_lateness_ms": 90_500, "emit": "close"},
    {"aggregates": (("count", ""), ("sum:x", "bigint"))},
)


def sample(version: int = FORMAT_VERSION) -> CheckpointMetadata:
    """The checkpoint that `golden/v<version>_metadata` holds."""
    manifest = FileHandle("visits/chk-7/cd34", 120, "crc32:00000001")
    if version >= 2:
        manifest = FileHandle("visits/shared/cd34-group", 120, "crc32:00000001", 4000, 5000)
    logs: tuple[SourceLog, ...] = ()
    if version >= 3:
        piece = SourceLogPiece("9f86d081", 70_000, FileHandle("visits/shared/ef56-source", 800, "crc32:00000002"))
        logs = (SourceLog(0, (("9.compact", 70_003), ("10", 2)), (piece,), b"\n{}{}"),)
    epochs = FileHandle(f"visits/epochs/3/{10:020d}", 70, "crc32:00000003", 6, 500)
    segments = (segment_file(3_000_000_011, epochs),) if version >= 5 else ()
    times = Times(1_790_000_000_000, ((1_780_000_000_000, None), ()), {"count": -5}) if version >= 4 else None
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
            SubtaskState("count", 1, 64, 128, "rocksdb", True, segments),
        ),
        source=SourcePosition(3_000_000_011, {"offsets/11": b"v1\n{}\n7", "metadata": b'{"id":"x"}'}, logs, times),
        sink_files=(SinkFile("out", "_staged/p-0", "part-0.parquet", 10, 2048),),
        trigger_time=1_700_000_000.25,
        completed_time=1_700_000_001.5,
        properties={"strandline": "0.1.0"},
        steps=() if version < 4 else (STEP,),
    )


def with_step(**changes: Any) -> CheckpointMetadata:
    return msgspec.structs.replace(sample(), steps=(msgspec.structs.replace(STEP, **changes),))


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_the_golden_file_of_every_version_is_read(version: int) -> None:
    assert decode((GOLDEN / f"v{version}_metadata").read_bytes(), "golden", HOME) == sample(version)


def test_what_was_encoded_is_decoded() -> None:
    assert decode(encode(sample()), "here", HOME) == sample()


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,8}", fullmatch=True).filter(lambda name: ".segment" not in name)
segments = st.integers(0, 10**18).map(segment_name)
numbers = st.integers(0, 2**40)


@st.composite
def handles(draw: st.DrawFn, job: str | None) -> FileHandle:
    path = draw(names)
    if job is not None:
        folder = draw(st.just("shared") | numbers.map("chk-{}".format))
        path = f"{draw(st.sampled_from(['', 's3://log//']))}{job}/{folder}/{path}"
    size, offset = draw(numbers), draw(numbers)
    return FileHandle(path, size, draw(st.text(max_size=5)), offset, draw(st.just(0) | st.just(offset + size + 1)))


def state_files(job: str | None) -> st.SearchStrategy[tuple[StateFile, ...]]:
    one = st.builds(
        StateFile,
        name=names | segments,
        identity=st.text(max_size=5),
        shared=st.booleans(),
        handle=st.none() | handles(job),
        inline=st.none() | st.binary(max_size=5),
    )
    return st.lists(one, max_size=4, unique_by=lambda file: file.name).map(tuple)


def subtask_states(job: str | None, groups: int) -> st.SearchStrategy[SubtaskState]:
    return st.builds(
        lambda start, count, **rest: SubtaskState(key_group_start=start, key_group_end=start + count, **rest),
        start=st.integers(0, groups // 2),
        count=st.integers(0, groups // 2),
        operator=st.text(max_size=5),
        subtask=st.integers(0, 9),
        backend=st.sampled_from(["heap", "rocksdb"]),
        incremental=st.booleans(),
        files=state_files(job),
        states=st.lists(
            st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3) | st.integers(-5, 5)), max_size=2
        ).map(tuple),
    )


source_names = (
    st.just("metadata")
    | st.builds("{}/{}".format, st.sampled_from(["offsets", "commits"]), numbers)
    | st.builds("sources/{}/{}".format, st.integers(0, 9), names)
)
sink_paths = st.builds("{}/{}".format, names, names) | names


described = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=2).map(tuple)


def steps(uid: str) -> st.SearchStrategy[StepDescription]:
    return st.builds(
        StepDescription,
        st.just(uid),
        st.sampled_from(["process", "window", "join"]),
        described,
        described,
        st.dictionaries(
            st.text(max_size=3), st.none() | st.text(max_size=3) | st.integers(-(2**61), 2**61), max_size=2
        ),
        st.dictionaries(st.text(max_size=3), described, max_size=2),
    )


@st.composite
def metadatas(draw: st.DrawFn) -> CheckpointMetadata:
    kind: Kind = draw(st.sampled_from(["checkpoint", "savepoint"]))
    job = draw(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,8}", fullmatch=True))
    groups = draw(st.integers(1, 2**15))
    operators = draw(st.lists(st.text(max_size=5), max_size=3, unique=True).map(tuple))
    return CheckpointMetadata(
        job=job,
        checkpoint_id=draw(numbers),
        generation=draw(st.integers(0, 2**31 - 1)),
        batch_id=draw(st.integers(-1, 2**60)),
        kind=kind,
        parallelism=draw(st.integers(1, 2**15)),
        max_parallelism=groups,
        operators=operators,
        subtasks=draw(st.lists(subtask_states(job if kind == "checkpoint" else None, groups), max_size=3).map(tuple)),
        source=SourcePosition(
            draw(st.integers(-1, 2**60)), draw(st.dictionaries(source_names, st.binary(max_size=5), max_size=3))
        ),
        sink_files=draw(
            st.lists(
                st.builds(
                    SinkFile,
                    sink=st.text(max_size=5),
                    staged=sink_paths,
                    final=sink_paths,
                    rows=numbers,
                    size=numbers,
                ),
                max_size=2,
            ).map(tuple)
        ),
        trigger_time=draw(st.floats(0, 2e9)),
        completed_time=draw(st.floats(0, 2e9)),
        properties=draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
        steps=tuple(draw(steps(uid)) for uid in operators if draw(st.booleans())),
    )


@given(metadatas())
def test_any_metadata_comes_back_as_it_was(metadata: CheckpointMetadata) -> None:
    home = Home(None) if metadata.kind == "savepoint" else Home(metadata.job, metadata.checkpoint_id, ("s3://log",))
    assert decode(encode(metadata), "here", home) == metadata


def test_every_flipped_byte_is_noticed() -> None:
    data = encode(sample())
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            with pytest.raises(MetadataError, match="chk-7/_metadata"):
                decode(bytes(damaged), "chk-7/_metadata", HOME)


def test_every_truncation_is_noticed() -> None:
    data = encode(sample())
    for length in range(len(data)):
        with pytest.raises(MetadataError, match="chk-7/_metadata is truncated"):
            decode(data[:length], "chk-7/_metadata", HOME)


def test_bytes_behind_the_end_are_damage() -> None:
    with pytest.raises(MetadataError, match="damaged: 1 bytes too many"):
        decode(encode(sample()) + b"x", "here", HOME)


def test_another_file_is_not_metadata() -> None:
    for data in (b"PAR1 and more", b"x", b'{"json": true}'):
        with pytest.raises(MetadataError, match="not a metadata file"):
            decode(data, "here", HOME)


def test_a_newer_version_names_both_versions() -> None:
    data = bytearray(encode(sample()))
    struct.pack_into(">H", data, 4, FORMAT_VERSION + 1)
    with pytest.raises(MetadataError, match=rf"version {FORMAT_VERSION + 1}, too new .* version {FORMAT_VERSION}\."):
        decode(bytes(data), "here", HOME)


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


def test_a_small_file_cannot_take_much_memory() -> None:
    """A body that compresses better than any real one is padded when it is written, and refused without the padding."""
    files = {f"sources/0/{number}": bytes(1 << 20) for number in range(20)}
    metadata = msgspec.structs.replace(sample(), source=SourcePosition(1, files))
    data = encode(metadata)
    assert decode(data, "here", HOME) == metadata
    bomb = forge(zstd.compress(msgspec.msgpack.encode(metadata)), 20 << 20)
    assert len(bomb) < len(data) / 10
    with pytest.raises(MetadataError, match="cannot hold"):
        decode(bomb, "here", HOME)


def test_a_body_longer_than_announced_is_not_decompressed_to_its_end() -> None:
    with pytest.raises(MetadataError, match="does not have the announced 100 bytes"):
        decode(forge(zstd.compress(bytes(1 << 20)), 100), "here", HOME)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x91" * 100_000, id="nested without end"),
        pytest.param(msgspec.msgpack.encode(sample()).replace(b"visits", b"vis\xff\xfes"), id="not UTF-8"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.replace(sample(), checkpoint_id=2**63)), id="large id"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.replace(sample(), batch_id=-2)), id="negative batch"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.replace(sample(), completed_time=1e300)), id="time"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.replace(sample(), trigger_time=float("nan"))), id="nan"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.replace(sample(), max_parallelism=2**31)), id="groups"),
        pytest.param(msgspec.msgpack.encode(with_step(kind="magic")), id="kind of step"),
        pytest.param(msgspec.msgpack.encode(with_step(parameters={"ttl_ms": 2**63})), id="parameter of a step"),
        pytest.param(msgspec.msgpack.encode(with_step(keys=(("user", "string", "x"),))), id="key of a step"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_crafted_content_with_a_right_checksum_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(MetadataError, match="here is damaged"):
        decode(forge(zstd.compress(body), len(body)), "here", HOME)


@pytest.mark.parametrize("steps", [(STEP, STEP), (msgspec.structs.replace(STEP, operator="other"),)])
def test_a_description_of_no_step_or_a_second_one_is_refused(steps: tuple[StepDescription, ...]) -> None:
    with pytest.raises(MetadataError, match="describes the steps"):
        decode(encode(msgspec.structs.replace(sample(), steps=steps)), "here", HOME)


def test_a_step_is_described_in_one_printable_line() -> None:
    assert STEP.line() == (
        "count: window by user string, place struct<`a b`:int>; time ts timestamp; size 5 min; slide 1 min; offset 0; "
        "allowed lateness 90500 ms; emit close; aggregates (count, sum:x bigint)"
    )
    crafted = msgspec.structs.replace(STEP, operator="a\x1b[2J\nb", parameters={"ttl_ms": None, "x\r": "\u202e"})
    assert crafted.line().isprintable()
    assert "ttl none" in crafted.line()


def forge(packed: bytes, size: int) -> bytes:
    """A `_metadata` file with a right checksum around any content."""
    digest = hashlib.sha256(struct.pack(">HQQ", FORMAT_VERSION, len(packed), size) + packed).digest()
    return struct.pack(">4sHQQ32s", b"SLMD", FORMAT_VERSION, len(packed), size, digest) + packed
