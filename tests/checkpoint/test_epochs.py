"""Files of epochs: what is written is read, nothing else is believed, and a chain has no gaps."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.batch import batch_id, numbered
from strandline.checkpoint.epochs import (
    EPOCHS_VERSION,
    EpochEntry,
    Rows,
    Segment,
    StoredEpochs,
    chain,
    damaged_part,
    decode_epochs,
    encode_epochs,
    extended,
    misfit,
    segment_files,
)
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskState,
    Times,
    decode,
    encode,
    last_batch,
)
from strandline.errors import CheckpointError, MetadataError, NewerFormatError
from tests.factories import checkpoint_metadata

JOB = "visits"
GENERATION = 3


def position(number: int) -> SourcePosition:
    return SourcePosition(number, {f"offsets/{number}": b"v1", "sources/0/0": b"0"}, times=Times(1_700_000_000_000))


def written(
    first: int, last: int, segments: list[Segment] | None = None, rows: list[Rows] | None = None
) -> tuple[bytes, EpochEntry]:
    return encode_epochs(
        JOB,
        GENERATION,
        batch_id(GENERATION, first - 1),
        batch_id(GENERATION, last),
        position(last),
        segments or [],
        rows or [],
        1_700_000_000.0,
    )


def stored(first: int, last: int, **parts: Any) -> StoredEpochs:
    data, entry = written(first, last, **parts)
    return StoredEpochs(entry, f"{JOB}/epochs/{GENERATION}/{first:020d}", len(data))


numbers = st.integers(0, 1_000_000)
parts = st.binary(max_size=60)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, EpochEntry, list[Segment], list[Rows]]:
    first = draw(numbers)
    last = first + draw(st.integers(0, 3))
    batches = [batch_id(GENERATION, number) for number in range(first, last + 1)]
    segments: list[Segment] = [
        ("count", subtask, batch, draw(parts)) for batch in batches for subtask in range(2) if draw(st.booleans())
    ]
    outputs = st.sampled_from([None, "late"])
    rows: list[Rows] = [("count", draw(outputs), 0, batch, draw(parts)) for batch in batches if draw(st.booleans())]
    return (*written(first, last, segments, rows), segments, rows)


@given(files())
def test_what_was_written_is_read(file: tuple[bytes, EpochEntry, list[Segment], list[Rows]]) -> None:
    data, entry, segments, rows = file
    assert decode_epochs(data, "here", JOB) == entry
    assert damaged_part(data, entry) is None

    def content(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    assert [(one.operator, one.subtask, one.batch, content(one.offset, one.size)) for one in entry.segments] == segments
    read = [(one.operator, one.output, one.subtask, one.batch, content(one.offset, one.size)) for one in entry.rows]
    assert read == rows
    for (operator, subtask, named), segment in zip(segment_files(entry, "path", len(data)), segments, strict=True):
        assert (operator, subtask, last_batch(named)) == segment[:3]
        assert named.handle is not None
        assert named.handle.part is not None
        assert content(named.handle.part.start, named.handle.size) == segment[3]
        assert named.handle.stored_size == len(data)


@given(files(), st.data())
def test_a_changed_or_truncated_file_is_damaged_or_its_part_is(
    file: tuple[bytes, EpochEntry, list[Segment], list[Rows]], draw: st.DataObject
) -> None:
    data, entry, _segments, _rows = file
    place = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytes([*data[:place], data[place] ^ draw.draw(st.integers(1, 255)), *data[place + 1 :]])
    for damaged in (flipped, data[:place]):
        try:
            read = decode_epochs(damaged, "here", JOB)
        except MetadataError:
            continue
        assert read == entry
        assert damaged_part(damaged, entry) is not None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_file_of_epochs(data: bytes) -> None:
    with pytest.raises(MetadataError):
        decode_epochs(data, "here", JOB)


def sealed(**changes: Any) -> bytes:
    """A file with right checksums whose entry says something else."""
    data, entry = written(5, 6, [("count", 0, batch_id(GENERATION, 5), b"changes")])
    values = {name: getattr(entry, name) for name in entry.__struct_fields__} | changes
    entry = EpochEntry(**values)
    index = msgspec.msgpack.encode(entry)
    start = data[: 6 + len(b"changes")]
    digest = hashlib.sha256(struct.pack(">HQQ", EPOCHS_VERSION, len(start), len(index)) + index).digest()
    return start + index + struct.pack(">Q32s", len(index), digest)


def part(**changes: Any) -> Any:
    _data, entry = written(5, 6, [("count", 0, batch_id(GENERATION, 5), b"changes")])
    return msgspec.structs.replace(entry.segments[0], **changes)


CRAFTED: dict[str, dict[str, Any]] = {
    "another job": {"job": "clicks"},
    "another generation": {"generation": 4},
    "no epoch": {"batch": batch_id(GENERATION, 4)},
    "a later generation's epoch": {"batch": batch_id(GENERATION + 1, 4)},
    "a part before the file": {"segments": (part(offset=0),)},
    "a part in the index": {"segments": (part(size=8),)},
    "a part of another epoch": {"segments": (part(batch=batch_id(GENERATION, 7)),)},
    "a huge part": {"segments": (part(size=(1 << 62) - 1),)},
    "a segment twice": {"segments": (part(), part())},
    "a subtask beyond all": {"segments": (part(subtask=1 << 20),)},
    "a path": {"source": SourcePosition(6, {"../x": b""})},
    "a negative time": {"written": -1.0},
}


@pytest.mark.parametrize("changes", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_entry_is_refused(changes: dict[str, Any]) -> None:
    assert decode_epochs(sealed(), "here", JOB).generation == GENERATION
    with pytest.raises(MetadataError, match="here"):
        decode_epochs(sealed(**changes), "here", JOB)


def golden_epochs() -> tuple[bytes, EpochEntry]:
    """What the golden file of this version holds."""
    batches = [batch_id(GENERATION, number) for number in (5, 6)]
    return written(
        5,
        6,
        [("count", subtask, batch, b"changes") for batch in batches for subtask in range(2)],
        [("count", output, 0, batches[1], b"rows") for output in (None, "late")],
    )


def test_files_of_the_first_version_stay_readable() -> None:
    data = (Path(__file__).parent / "golden" / "v1_epochs").read_bytes()
    _data, entry = golden_epochs()
    assert decode_epochs(data, "golden", JOB) == entry
    assert damaged_part(data, entry) is None


def test_a_file_of_a_later_release_is_told_from_a_damaged_one() -> None:
    data, _entry = written(0, 0)
    with pytest.raises(NewerFormatError, match="version 2, too new"):
        decode_epochs(data[:4] + struct.pack(">H", 2) + data[6:], "here", JOB)
    with pytest.raises(MetadataError, match="no format version 0"):
        decode_epochs(data[:4] + struct.pack(">H", 0) + data[6:], "here", JOB)


@given(
    st.integers(-1, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=12), st.sets(st.integers())
)
def test_a_chain_goes_on_from_the_checkpoint_without_a_gap(
    covered: int, spans: list[tuple[int, int]], damaged: set[int]
) -> None:
    known = {first: stored(first, first + more) for first, more in spans}

    def read(first: int) -> StoredEpochs | None:
        generation, number = numbered(first)
        return known.get(number) if generation == GENERATION and number not in damaged else None

    found = list(chain(batch_id(GENERATION, covered), read))
    last = covered
    for one in found:
        assert numbered(one.entry.follows) == (GENERATION, last)
        last = numbered(one.entry.batch)[1]
    assert last + 1 not in known or last + 1 in damaged
    assert list(chain(batch_id(GENERATION - 1, covered), read)) == []


def a_checkpoint(covered: int) -> CheckpointMetadata:
    file = StateFile("000001.sst", "one", True, inline=b"state")
    return checkpoint_metadata(
        4,
        generation=GENERATION,
        batch_id=batch_id(GENERATION, covered),
        parallelism=2,
        operators=("count",),
        subtasks=tuple(SubtaskState("count", n, 64 * n, 64 * n + 64, "rocksdb", True, (file,)) for n in range(2)),
        source=position(covered),
        sink_files=(SinkFile("out", "_strandline/a.staged", "a", 3, 4),),
    )


def test_the_extended_checkpoint_has_the_state_the_rows_and_the_position_of_both() -> None:
    batches = [batch_id(GENERATION, number) for number in range(5, 8)]
    epochs = [
        stored(5, 6, segments=[("count", n, batch, b"x") for batch in batches[:2] for n in range(2)]),
        stored(7, 7, segments=[("count", 1, batches[2], b"yy")]),
    ]
    more = SinkFile("out", "_strandline/b.staged", "b", 1, 2)
    made = extended(
        a_checkpoint(4),
        epochs,
        checkpoint_id=9,
        generation=GENERATION + 1,
        sink_files=(more,),
        now=5.0,
        properties={"owner": JOB},
    )
    assert [[last_batch(file) for file in state.files if file.is_segment] for state in made.subtasks] == [
        batches[:2],
        batches,
    ]
    assert [state.files[0].name for state in made.subtasks] == ["000001.sst"] * 2
    assert (made.checkpoint_id, made.generation, made.batch_id) == (9, GENERATION + 1, batches[-1])
    assert made.source == position(7)
    assert made.sink_files == (*a_checkpoint(4).sink_files, more)
    assert (made.trigger_time, made.completed_time, made.properties) == (5.0, 5.0, {"owner": JOB})
    assert decode(encode(made), "made", Home(JOB, 9)) == made


def test_epochs_of_other_subtasks_or_generations_extend_nothing() -> None:
    strange = stored(5, 5, segments=[("count", 2, batch_id(GENERATION, 5), b"x")])
    assert "subtask 2 of 'count'" in (misfit(a_checkpoint(4), strange.entry) or "")
    other = msgspec.structs.replace(a_checkpoint(4), batch_id=batch_id(GENERATION - 1, 4))
    assert "generation 3" in (misfit(other, stored(5, 5).entry) or "")
    with pytest.raises(CheckpointError, match="cannot extend checkpoint 4"):
        extended(a_checkpoint(4), [strange], checkpoint_id=9, generation=4, sink_files=(), now=0.0, properties={})
