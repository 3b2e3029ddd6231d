"""The time of a batch, as Spark's offset log tells it; and entries that a crafted checkpoint has put there."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.errors import CheckpointError
from strandline.runtime.driver.clock import Clock
from strandline.runtime.protocol.messages import BatchTime

ENTRY = 'v1\n{"batchWatermarkMs":%d,"batchTimestampMs":%d,"conf":{"spark.sql.shuffle.partitions":"2"}}\n{"logOffset":0}'


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
    return Clock(tmp_path, frozenset({"event"}), restored=False)


def test_the_time_of_a_batch_comes_from_its_entry_and_the_one_before(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "offsets" / "4").write_text(ENTRY % (1000, 50_000))
    (tmp_path / "offsets" / "5").write_text(ENTRY % (2000, 60_000))
    assert clock.of(5) == BatchTime(60_000, 2000, 1000)
    assert clock.of(4) == BatchTime(50_000, 1000, None)


@pytest.mark.parametrize(
    "entry",
    [b"", b"v1", b"v1\n{}", b"v1\n[]", b"v1\n\xff\xfe", b"v1\n" + b"[" * 100_000, b'v1\n{"batchTimestampMs":"x"}'],
)
def test_a_damaged_entry_is_an_error_of_ours(entry: bytes, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "offsets" / "5").write_bytes(entry)
    with pytest.raises(CheckpointError, match="offset log"):
        clock.of(5)
    (tmp_path / "commits" / "5").write_bytes(entry)
    clock.committed(5, [{"event": 1}])
    assert not clock.event_timer_due()


def test_a_timer_is_due_when_the_next_watermark_reaches_it(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "commits" / "5").write_text('v1\n{"nextBatchWatermarkMs":3000}')
    for time, due in ((2999, True), (3000, True), (3001, False)):
        clock.committed(5, [{"event": time}])
        assert clock.event_timer_due() is due
