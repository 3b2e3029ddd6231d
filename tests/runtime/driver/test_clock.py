"""The time of a batch: it follows from the batches before it, never goes back, and survives a restore."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.metadata import SourcePosition, Times
from strandline.errors import CheckpointError, StorageError
from strandline.operators.base import TimeMode
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.spark_times import times_of
from strandline.runtime.driver.watermarks import Seen, SourceTime, WatermarkPlan
from strandline.runtime.protocol.messages import BatchTime, StepWatermarks

MODES: dict[str, TimeMode] = {"join": "event", "window": "event", "idle": "processing", "sums": "none"}


class Batches:
    """A clock, and Spark's offset log for it."""

    def __init__(self, folder: Path, plan: WatermarkPlan, restored: Times | None = None) -> None:
        (folder / "offsets").mkdir(exist_ok=True, parents=True)
        self.folder = folder
        self.clock = Clock(folder, plan, MODES, restored)
        self.number = 0

    def begin(self, stamp: int) -> BatchTime:
        self.number += 1
        entry = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": stamp, "conf": {"a": "2"}})
        (self.folder / "offsets" / str(self.number)).write_text(f'v1\n{entry}\n{{"logOffset":0}}')
        return self.clock.of(self.number)

    def run(self, stamp: int, *latest: int | None, timers: Sequence[dict[str, int]] = ()) -> BatchTime:
        """A batch in which every source shows a time, or has no rows if it is None."""
        when = self.begin(stamp)
        seen = {number: Seen((one,), 0 if one is None else 1) for number, one in enumerate(latest)}
        self.clock.committed(when, seen, timers)
        return when


TWO = WatermarkPlan(
    (SourceTime((10,)), SourceTime((0,), idle_after_ms=30_000), SourceTime()), {"join": {0: 0, 1: 0}, "window": {0: 5}}
)


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(tmp_path, TWO)


def test_each_step_follows_the_sources_that_it_reads(batches: Batches) -> None:
    assert batches.run(1000, 500, None) == BatchTime(1000)
    assert batches.run(2000, 400, 300).steps == {"window": StepWatermarks(485, None)}
    assert batches.run(3000).steps == {"window": StepWatermarks(485, 485), "join": StepWatermarks(300, None)}
    assert batches.run(4000).steps == {"window": StepWatermarks(485, 485), "join": StepWatermarks(300, 300)}
    assert batches.clock.times.steps == {"window": 485, "join": 300}


def test_a_batch_that_is_repeated_has_the_same_time(batches: Batches) -> None:
    batches.run(1000, 500, 600)
    assert batches.begin(2000) == batches.clock.of(batches.number) == batches.clock.of(batches.number)


def test_nobody_waits_for_an_idle_source_until_it_has_rows_again(batches: Batches) -> None:
    batches.run(0, 1000, 100)
    assert batches.run(29_999, 2000).of("join").watermark_ms == 100
    assert batches.run(30_000).of("join").watermark_ms == 100  # this batch finds that the source is idle
    assert batches.run(30_001, 3000).of("join").watermark_ms == 1990
    assert batches.run(30_002, None, 150).of("join").watermark_ms == 2990
    assert batches.run(30_003, 9000).of("join") == StepWatermarks(2990, 2990)  # it is back, and holds the step back
    assert batches.run(30_004, None, 5000).of("join").watermark_ms == 2990
    assert batches.run(30_005).of("join").watermark_ms == 5000


def test_a_long_pause_between_two_batches_makes_no_source_idle(batches: Batches) -> None:
    batches.run(0, 1000, 100)
    batches.run(100_000, 2000, 200)
    assert batches.run(200_000, 3000, 300).of("join").watermark_ms == 200


def test_if_all_sources_are_idle_the_watermark_stays(tmp_path: Path) -> None:
    batches = Batches(tmp_path, WatermarkPlan((SourceTime((0,), 10),), {"window": {0: 0}}))
    batches.run(0, 100)
    batches.run(1000)
    assert batches.run(2000).of("window") == StepWatermarks(100, 100)


def test_a_batch_runs_when_an_idle_source_would_let_a_timer_fire(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = batches.clock.ticks
    assert ticks is not None
    for now, due, ticking in ((29_000, 500, False), (31_000, 991, False), (31_000, 990, True)):
        batches.run(0, 1000, 100, timers=[{"join": due}])
        monkeypatch.setattr("strandline.runtime.driver.clock.time.time", lambda now=now: now / 1000)
        batches.clock.tick_if_due()
        assert ticks.exists() is ticking
    batches.run(31_000, timers=[{"join": 990}])
    assert batches.clock.event_timer_due()


def test_a_timer_is_due_by_the_clock_of_its_own_step(batches: Batches) -> None:
    for due, fires in ((985, True), (986, False)):
        batches.run(0, 1000, 100, timers=[{"window": due}, {"window": 10**6, "join": 101, "idle": -1}])
        assert batches.clock.event_timer_due() is fires
    batches.run(0, timers=[{"join": 100}])
    assert batches.clock.event_timer_due()


def test_the_watermark_has_moved_until_a_batch_has_seen_it(batches: Batches) -> None:
    assert not batches.clock.watermark_moved()
    batches.run(0, 1000)
    assert batches.clock.watermark_moved()
    batches.run(0)
    assert not batches.clock.watermark_moved()


def test_processing_time_does_not_go_back_with_the_clock_of_the_computer(
    batches: Batches, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [batches.run(stamp).processing_ms for stamp in (50_000, 20_000, 60_000)] == [50_000, 50_000, 60_000]
    assert len(caplog.messages) == 1
    assert "30.0 s behind" in caplog.messages[0]
    restored = Batches(tmp_path / "later", TWO, batches.clock.times)
    assert restored.run(10).processing_ms == 60_000
    assert restored.clock.now() > 60_000


def test_several_threads_may_ask_for_a_batch_at_once(batches: Batches) -> None:
    ticks = batches.clock.ticks
    assert ticks is not None
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(batches.clock.tick) for _ in range(2000)]:
            one.result()
    assert int(ticks.read_text()) > 0
    assert not ticks.with_suffix(".new").exists()


def test_a_disk_that_refuses_the_request_for_a_batch_is_named(batches: Batches) -> None:
    ticks = batches.clock.ticks
    assert ticks is not None
    ticks.with_suffix(".new").mkdir()
    batches.run(0, 1000, timers=[{"window": 1}])
    for _ in range(2):  # the request that failed is made again
        with pytest.raises(StorageError, match=r"tick.*asks Spark for a batch: Is a directory.*spark_checkpoint_dir"):
            batches.clock.tick_if_due()


times = st.none() | st.integers(-5000, 5000)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), times, times, st.booleans(), st.integers(0, 50), st.integers(0, 50)),
        max_size=12,
    )
)
def test_no_time_goes_back_over_restores_and_changed_jobs(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[int, int | None, int | None, bool, int, int]]
) -> None:
    batches = Batches(tmp_path_factory.mktemp("story"), TWO)
    last = BatchTime(0)
    for stamp, first, second, restore, delay, lag in story:
        if restore:
            plan = WatermarkPlan(
                (SourceTime((delay,)), SourceTime((0,), 10)), {"join": {0: lag, 1: lag}, "window": {0: 0}}
            )
            batches = Batches(tmp_path_factory.mktemp("story"), plan, batches.clock.times)
        when = batches.run(stamp, first, second)
        assert when.processing_ms >= last.processing_ms
        for uid in ("join", "window"):
            assert when.of(uid).late_watermark_ms == last.of(uid).watermark_ms
            assert when.of(uid).watermark_ms is not None or last.of(uid).watermark_ms is None
            assert (when.of(uid).watermark_ms or 0) >= (last.of(uid).watermark_ms or when.of(uid).watermark_ms or 0)
        last = when


def test_the_times_of_a_source_count_only_if_it_has_as_many_watermarks_as_before() -> None:
    plan = WatermarkPlan((SourceTime((10,)), SourceTime(), SourceTime((1, 2))), {"join": {0: 0}})
    stored = Times(7, ((5,), (6,), (8, None)), {"join": 3, "gone": 4})
    assert plan.restored(stored) == Times(7, ((5,), (), (8, None)), {"join": 3}, ((), (), ()))
    assert plan.restored(Times(7, ((5,),), {})).latest == ((5,), (), (None, None))


def test_the_times_of_another_column_do_not_count(tmp_path: Path) -> None:
    """Otherwise a new step, by the column `made`, would drop all its rows as late."""
    by_ts, by_made = (
        WatermarkPlan((SourceTime((10,), columns=(column,)),), {uid: {0: 0}})
        for column, uid in (("ts", "window"), ("made", "window by made"))
    )
    batches = Batches(tmp_path, by_ts)
    batches.run(1000, 900)
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(batches.clock.times), type=Times)
    assert by_ts.watermarks(by_ts.restored(stored)) == {"window": 890}
    assert by_made.watermarks(by_made.restored(stored)) == {}
    unnoted = Times(stored.processing_ms, stored.latest, stored.steps)
    assert by_made.watermarks(by_made.restored(unnoted)) == {"window by made": 890}


# --- entries of Spark's logs ---------------------------------------------------------------------------


def test_a_checkpoint_of_an_earlier_release_has_one_watermark_for_all(tmp_path: Path) -> None:
    files = {
        "offsets/5": b'v1\n{"batchWatermarkMs":1000,"batchTimestampMs":60000,"conf":{}}\n{"logOffset":0}',
        "commits/5": b'v1\n{"nextBatchWatermarkMs":3000}',
    }
    found = times_of(SourcePosition(5, files), ("join", "window"), TWO)
    batches = Batches(tmp_path, TWO, found)
    when = batches.run(50_000)
    assert when.processing_ms == 60_000
    assert when.steps == {"join": StepWatermarks(3000, 1000), "window": StepWatermarks(2995, 1000)}
    files["commits/5"] = b'v1\n{"nextBatchWatermarkMs":0}'
    files["offsets/5"] = files["offsets/5"].replace(b"1000", b"0")
    assert times_of(SourcePosition(5, files), ("join",), TWO) == Times(60_000, ((None,), (None,), ()), {})


@pytest.mark.parametrize(
    "entry",
    [b"", b"v1", b"v1\n{}", b"v1\n[]", b"v1\n\xff\xfe", b"v1\n" + b"[" * 100_000, b'v1\n{"batchTimestampMs":"x"}'],
)
def test_a_damaged_entry_is_an_error_of_ours(entry: bytes, batches: Batches, tmp_path: Path) -> None:
    (tmp_path / "offsets" / "5").write_bytes(entry)
    with pytest.raises(CheckpointError, match="offset log"):
        batches.clock.of(5)
    with pytest.raises(CheckpointError, match="offset log"):
        times_of(SourcePosition(5, {"offsets/5": entry}), (), TWO)


def test_a_batch_that_spark_does_not_know_is_an_error(batches: Batches) -> None:
    with pytest.raises(CheckpointError, match="no entry for batch 5"):
        batches.clock.of(5)
