"""The position between two epochs: where the query began, what relays have read, and what Spark has skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strandline.checkpoint.metadata import SourcePosition, Times
from strandline.errors import CheckpointError, NotFoundError, StrandlineError
from strandline.runtime.driver.first_offsets import FirstOffsets
from strandline.runtime.driver.realtime.offsets import EpochPosition, Offsets, for_realtime
from strandline.runtime.driver.restore.position import seed
from strandline.runtime.driver.restore.tick_offset import FIRST_TICK
from strandline.runtime.protocol.cuts import ReadPart

NO_TIMES = Times(0, (), {}, ())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def began(folder: Path, number: int, offsets: str) -> None:
    """Spark writes down where it begins to read a stream."""
    write(folder / "sources" / str(number) / "0", f"\0v1\n{offsets}")


def ended(folder: Path, batch: int, *offsets: str) -> None:
    """Spark writes down that a batch of its own has ended."""
    write(folder / "offsets" / str(batch), "\n".join(["v1", "{}", *offsets]))
    write(folder / "commits" / str(batch), "v2\n{}")


def read(partition: int, next_offset: int, topic: str = "t", stream: int = 0) -> ReadPart:
    return ReadPart(stream, topic, partition, next_offset - 1, next_offset, 1, None)


def after(position: EpochPosition, *parts: ReadPart) -> list[Offsets]:
    """The position after an epoch with these parts."""
    end = position.spark_end()
    position.become(position.advanced(parts, end), end)
    return position.offsets()


def test_a_partition_that_nobody_has_read_is_where_the_query_began(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":5,"1":7}}')
    position = EpochPosition(tmp_path, (0,), None)
    assert after(position, read(1, 9)) == [{"t": {"0": 5, "1": 9}}]
    assert after(position, read(2, 3), read(0, 1, "new")) == [{"t": {"0": 5, "1": 9, "2": 3}, "new": {"0": 1}}]


def test_rows_that_a_filter_dropped_are_skipped_once_sparks_batch_has_ended(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":0,"1":0}}')
    position = EpochPosition(tmp_path, (0,), None)
    after(position, read(0, 3))
    assert not position.skips()
    ended(tmp_path, 0, '{"t":{"0":10,"1":4}}')
    assert position.skips()
    assert after(position) == [{"t": {"0": 10, "1": 4}}]
    assert not position.skips()


def test_relays_of_the_next_batch_of_spark_may_be_ahead_of_the_end_of_the_last(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":0,"1":0}}')
    position = EpochPosition(tmp_path, (0,), None)
    after(position, read(0, 12))
    ended(tmp_path, 0, '{"t":{"0":10,"1":4}}')
    assert after(position) == [{"t": {"0": 12, "1": 4}}]


def test_the_position_goes_on_following_spark_where_a_batch_has_ended_level_with_it(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":0}}')
    position = EpochPosition(tmp_path, (0,), None)
    after(position, read(0, 3))
    ended(tmp_path, 0, '{"t":{"0":3}}')
    assert (position.running(), position.skips(), position.followed) == (1, False, 0)
    ended(tmp_path, 1, '{"t":{"0":2}}')  # relays are ahead
    assert (position.running(), position.skips(), position.followed) == (2, False, 1)
    ended(tmp_path, 2, '{"t":{"0":9}}')
    assert (position.running(), position.skips(), position.followed) == (3, True, 1)
    assert after(position) == [{"t": {"0": 9}}]
    assert position.followed == 2


def test_a_checkpoint_of_the_first_epoch_can_be_restored(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":0}}')
    position = EpochPosition(tmp_path, (0,), None)
    after(position, read(0, 3))
    captured = position.capture(0, NO_TIMES)
    assert all(re.fullmatch(r"(offsets|commits|sources/\d+)/\d+", name) for name in captured.files)
    seed(for_realtime(captured), tmp_path / "again", ticks=False, places=(0,))
    assert EpochPosition(tmp_path / "again", (0,), captured).offsets() == [{"t": {"0": 3}}]


def test_each_mode_starts_from_what_the_other_has_written(tmp_path: Path) -> None:
    """Spark numbers streams by their place in the plan, and a position by the order of `job.source(...)`."""
    places = (1, 0)
    began(tmp_path, 0, '{"second":{"0":1}}')
    began(tmp_path, 1, '{"first":{"0":2}}')
    position = EpochPosition(tmp_path, places, None)
    after(position, read(0, 8, "first"), read(0, 9, "second", stream=1))
    captured = position.capture(4, NO_TIMES)

    batch, realtime = tmp_path / "batch", tmp_path / "realtime"
    seed(captured, batch, ticks=True, places=places)
    lines = (batch / "offsets" / "4").read_text().split("\n")
    assert lines[2:] == ['{"second":{"0":9}}', '{"first":{"0":8}}', FIRST_TICK]
    assert (batch / "offsets" / "3").exists()
    assert (batch / "commits" / "4").read_text().startswith("v1\n")
    assert (batch / "sources" / "0" / "0").read_text() == '\0v1\n{"second":{"0":1}}'

    ticking = {**captured.files, "offsets/4": captured.files["offsets/4"] + b"\n" + FIRST_TICK.encode()}
    of_batches = SourcePosition(4, ticking, times=NO_TIMES)
    seed(for_realtime(of_batches), realtime, ticks=False, places=places)
    assert (realtime / "commits" / "4").read_text().startswith("v2\n")
    assert (realtime / "offsets" / "4").read_text().split("\n")[2:] == lines[2:4]
    restored = EpochPosition(realtime, places, of_batches)
    assert restored.offsets() == [{"first": {"0": 8}}, {"second": {"0": 9}}]
    ended(realtime, 4, '{"second":{"0":90}}', '{"first":{"0":80}}')
    assert not restored.skips(), "that is the batch from which it starts"


def test_rows_that_come_again_are_refused(tmp_path: Path) -> None:
    began(tmp_path, 0, '{"t":{"0":5}}')
    position = EpochPosition(tmp_path, (0,), None)
    after(position, read(0, 9))
    with pytest.raises(StrandlineError, match=r"offset 8 of partition 0 of topic 't' again.*up to 9"):
        after(position, read(0, 9))
    assert after(position, read(0, 12)) == [{"t": {"0": 12}}], "offsets may have gaps"


def test_a_position_of_another_source_is_refused(tmp_path: Path) -> None:
    position = SourcePosition(0, {"offsets/0": b'v1\n{}\n{"logOffset":3}'}, times=NO_TIMES)
    with pytest.raises(CheckpointError, match=r"no position in Kafka.*latency_mode='batch'"):
        EpochPosition(tmp_path, (0,), position)


def test_a_query_that_has_not_begun_to_read_has_no_position(tmp_path: Path) -> None:
    position = EpochPosition(tmp_path, (0,), None)
    with pytest.raises(NotFoundError, match="has not written where it began"):
        position.offsets()


def test_a_run_begins_again_where_its_sources_began(tmp_path: Path) -> None:
    """The second source had not begun when the first query failed; a source of files writes other files."""
    first, again = tmp_path / "first", tmp_path / "again"
    began(first, 0, '{"t":{"0":5}}')
    (first / "sources" / "2").mkdir(parents=True)
    (first / "sources" / "2" / "0").write_text('v1\n{"path":"file:///a","timestamp":1,"batchId":0}')
    known = FirstOffsets()
    known.remember(first)
    known.seed(again)
    position = EpochPosition(again, (1, 0), None)
    assert position.first_offsets() == {1: {"t": {"0": 5}}}
    assert not (again / "sources" / "2").exists()
    position.begin_at({1: {"t": {"0": 7}}})
    assert position.first_offsets() == {1: {"t": {"0": 7}}}
    assert (again / "sources" / "0" / "0").read_bytes() == b'\0v1\n{"t":{"0":7}}'
