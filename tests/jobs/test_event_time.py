"""Event time through the whole runtime: watermarks, windows, timers, late rows, and batches without rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from strandline.errors import JobDefinitionError, StrandlineError
from tests.jobs.place import Sum
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

START = datetime(2026, 1, 1, tzinfo=UTC)
Click = tuple[str, float, int]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def window(start: float, end: float) -> tuple[datetime, datetime, datetime]:
    """The columns of a window in an output row."""
    return at(start), at(end), at(end) - timedelta(microseconds=1)


class Clicks:
    """Clicks of users, (user, second, x), written file by file."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark
        self._files = 0

    def write(self, rows: list[Click], folder: str = "in") -> None:
        path = self.root / folder
        path.mkdir(exist_ok=True)
        table = pa.table(
            {
                "user": pa.array([user for user, _, _ in rows], pa.string()),
                "ts": pa.array([at(second) for _, second, _ in rows], pa.timestamp("us", "UTC")),
                "x": pa.array([x for _, _, x in rows], pa.int64()),
            }
        )
        pq.write_table(table, path / f".{self._files:05d}")
        (path / f".{self._files:05d}").rename(path / f"{self._files:05d}.parquet")
        self._files += 1

    def source(self, folder: str = "in") -> DataFrame:
        (self.root / folder).mkdir(exist_ok=True)
        reader = self.spark.readStream.schema("user string, ts timestamp, x long").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.root / folder))

    def job(self, **options: Any) -> sl.Job:
        defaults: dict[str, Any] = {"checkpoint_interval": "500ms", "parallelism": 2}
        return sl.Job(
            "clicks", self.spark, sl.Config(checkpoint_dir=str(self.root / "ckpt"), **{**defaults, **options})
        )

    def rows(self, folder: str = "out") -> list[tuple[Any, ...]]:
        path = self.root / folder
        if not path.exists() or not any(path.glob("*.parquet")):
            return []
        rows = (row.values() for row in pq.ParquetDataset(str(path)).read().to_pylist())
        return sorted((tuple(row) for row in rows), key=repr)

    def sink(self, folder: str = "out") -> sl.ParquetSink:
        return sl.ParquetSink(str(self.root / folder))


@pytest.fixture
def clicks(tmp_path: Path, spark: SparkSession) -> Clicks:
    return Clicks(tmp_path, spark)


def test_windows_close_by_the_watermark_and_late_rows_go_aside(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    def start() -> sl.JobRun:
        job = clicks.job()
        source = job.source(clicks.source(), event_time="ts", watermark_delay="5s")
        windows = (
            source.key_by("user")
            .window(sl.tumbling("10s"), late="late")
            .aggregate(n=sl.count(), total=sl.sum("x"), uid="windows")
        )
        windows.sink(clicks.sink())
        windows.side("late").sink(clicks.sink("late"))
        runs.append(job.start())
        return runs[-1]

    run = start()
    clicks.write([("a", 1, 1), ("b", 2, 10), ("a", 12, 2)])
    run.process_all_available()
    assert clicks.rows() == []  # the watermark is at 7
    clicks.write([("a", 3, 4), ("a", 16, 8)])
    run.process_all_available()
    # The watermark is at 11: the rows of this batch were in time, and it closed their window without another row.
    first = [("a", *window(0, 10), 2, 5), ("b", *window(0, 10), 1, 10)]
    assert clicks.rows() == first
    clicks.write([("b", 4, 99), ("b", 13, 1)])
    run.process_all_available()
    assert (clicks.rows(), clicks.rows("late")) == (first, [("b", at(4), 99)])
    assert run.figures().late_rows == 1
    run.cancel()

    run = start()  # the watermark is where it was: 4 is late, 12 is not
    clicks.write([("c", 4, 77), ("c", 12, 5)])
    run.process_all_available()
    assert clicks.rows("late") == [("b", at(4), 99), ("c", at(4), 77)]
    clicks.write([("z", 40, 0)])
    run.process_all_available()
    assert clicks.rows() == sorted(
        [*first, ("a", *window(10, 20), 2, 10), ("b", *window(10, 20), 1, 1), ("c", *window(10, 20), 1, 5)], key=repr
    )


class Idle(sl.KeyedProcessor):
    """Says when a user has been idle for a second of processing time."""

    def open(self, context: sl.ProcessContext) -> None:
        self.due = context.value_state("due", "ms long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for _row in rows:
            pass
        known = self.due.get()
        if known is not None:
            context.delete_timer(known)
        self.due.update(context.processing_time + 1000)
        context.register_timer(context.processing_time + 1000)

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        self.due.clear()
        yield (*key, timestamp <= context.processing_time)


@pytest.mark.parametrize("service", [pytest.param("heap", marks=pytest.mark.slow), "rocksdb"])
def test_an_idle_job_fires_its_timers_also_after_a_restart(clicks: Clicks, runs: list[sl.JobRun], service: str) -> None:
    def start() -> sl.JobRun:
        job = clicks.job(timer_service=service)
        stream = job.source(clicks.source()).key_by("user")
        stream.process(Idle(), "user string, after boolean", uid="idle", time_mode="processing").sink(clicks.sink())
        runs.append(job.start())
        return runs[-1]

    run = start()
    clicks.write([("a", 0, 0), ("b", 0, 0)])
    run.process_all_available()
    wait_until(lambda: clicks.rows() == [("a", True), ("b", True)], what="the timers")
    clicks.write([("c", 0, 0)])
    run.process_all_available()
    assert run.query("idle", "due", "c") > time.time() * 1000 - 60_000
    assert run.query("idle", "due", "a") is None
    run.cancel()
    batches = start()
    wait_until(lambda: clicks.rows() == [("a", True), ("b", True), ("c", True)], what="the timer of c")
    # A run begins with a batch that finds out what is due, also where the first run had fired it all.
    count = wait_until(lambda: batches.figures().batches, what="the first batch")
    # Where nothing is due nothing happens: until the next timer has fired, there is a batch for its row and one for it.
    clicks.write([("d", 0, 0)])
    wait_until(lambda: ("d", True) in clicks.rows(), what="the timer of d")
    assert batches.figures().batches == count + 2


class MaybeIdle(Sum):
    """Sums, and where it has a clock, a timer for every batch."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed

    def process(self, key: Any, rows: Any, context: sl.ProcessContext) -> Any:
        if self.timed:
            context.register_timer(context.processing_time)
        return super().process(key, rows, context)

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Any:
        yield (*key, -1, -1)


@pytest.mark.slow
def test_a_step_may_gain_and_lose_its_clock_between_two_runs(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    for number, timed in enumerate((False, True, False)):
        job = clicks.job()
        stream = job.source(clicks.source()).key_by("user")
        processor = MaybeIdle(timed)
        mode = "processing" if timed else "none"
        stream.process(processor, "user string, n long, s long", uid="sums", time_mode=mode).sink(clicks.sink())
        run = job.start()
        runs.append(run)
        clicks.write([("a", 0, 1)])
        run.process_all_available()
        assert run.query("sums", "total", "a") == (number + 1, number + 1)
        run.cancel()
    assert clicks.rows() == [("a", -1, -1), ("a", 1, 1), ("a", 2, 2), ("a", 3, 3)]


class Countdown(sl.KeyedProcessor):
    """A timer that sets the next one, a second later, for as many seconds as a row says."""

    def open(self, context: sl.ProcessContext) -> None:
        self.left = context.value_state("left", "n long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for row in rows:
            self.left.update(row.x)
            context.register_timer(round(row.ts.timestamp() * 1000) + 1000)

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        left = self.left.get()
        yield (*key, left)
        if left > 1:
            self.left.update(left - 1)
            context.register_timer(timestamp + 1000)


def test_all_that_rows_made_due_has_happened_also_timers_set_by_timers(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    job = clicks.job()
    source = job.source(clicks.source(), event_time="ts", watermark_delay="0s")
    source.key_by("user").process(Countdown(), "user string, n long", time_mode="event").sink(clicks.sink())
    runs.append(job.start())
    clicks.write([("a", 0, 3), ("b", 2, 1), ("z", 60, 1)])
    runs[-1].process_all_available()
    assert clicks.rows() == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]


def test_a_join_waits_for_partners_as_long_as_the_watermarks_of_both_sources_say(
    clicks: Clicks, runs: list[sl.JobRun]
) -> None:
    job = clicks.job()
    orders = job.source(clicks.source("orders"), event_time="ts", watermark_delay="0s")
    payments = job.source(
        clicks.source("payments").withColumnsRenamed({"ts": "paid", "x": "amount"}).withWatermark("paid", "0 seconds")
    )
    joined = orders.key_by("user").join(payments.key_by("user"), "left", within=("0s", "10s"))
    joined.sink(clicks.sink())
    run = job.start()
    runs.append(run)
    clicks.write([("a", 1, 1), ("b", 2, 2)], "orders")
    clicks.write([("a", 5, 100)], "payments")
    run.process_all_available()
    assert clicks.rows() == [("a", at(1), 1, at(5), 100)]
    clicks.write([("c", 60, 3)], "orders")
    run.process_all_available()
    assert len(clicks.rows()) == 1  # payments stand at 5 seconds, so one for b may still come
    clicks.write([("z", 60, 0)], "payments")
    run.process_all_available()
    assert clicks.rows() == [("a", at(1), 1, at(5), 100), ("b", at(2), 2, None, None)]


def test_a_function_that_ignores_its_rows_does_not_lose_them_beside_a_parquet_sink(
    clicks: Clicks, runs: list[sl.JobRun]
) -> None:
    job = clicks.job()
    source = job.source(clicks.source())
    source.key_by("user").aggregate(n=sl.count()).sink(clicks.sink())
    ignored = source.key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
    ignored.sink(sl.ForeachBatchSink(lambda _rows, _batch: None))
    run = job.start()
    runs.append(run)
    clicks.write([("a", 0, 1), ("b", 0, 2), ("a", 0, 3)])
    run.process_all_available()
    clicks.write([("a", 0, 10)])
    run.process_all_available()
    assert [run.query("sums", "total", user) for user in "abc"] == [(3, 14), (1, 2), None]
    assert clicks.rows() == [("a", 2), ("a", 3), ("b", 1)]
    with pytest.raises(StrandlineError, match="has no state 'totals'; it has: total"):
        run.query("sums", "totals", "a")
    with pytest.raises(StrandlineError, match="there is no step 'sum'"):
        run.query("sum", "total", "a")


def test_what_needs_event_time_says_so_when_the_job_is_built(clicks: Clicks) -> None:
    job = clicks.job()
    plain = job.source(clicks.source()).key_by("user")
    with pytest.raises(
        JobDefinitionError, match=r"no source of its rows has event time: give job.source\(df, event_time"
    ):
        plain.window(sl.tumbling("10s"), "ts").aggregate(n=sl.count())
    with pytest.raises(JobDefinitionError, match=r"no source of its rows has event time: give job\.source"):
        plain.deduplicate(within="10s")
    with pytest.raises(
        JobDefinitionError, match="the time column 'x' is of type bigint, not a timestamp; convert it first"
    ):
        job.source(clicks.source(), event_time="x", watermark_delay="1s")
    with pytest.raises(JobDefinitionError, match="did you mean 'ts'"):
        job.source(clicks.source(), event_time="tss", watermark_delay="1s")
    with pytest.raises(JobDefinitionError, match="has a watermark on 'ts' already"):
        job.source(clicks.source().withWatermark("ts", "1 second"), event_time="ts", watermark_delay="1s")
    with pytest.raises(JobDefinitionError, match="the source has no event time, so nobody waits for it"):
        job.source(clicks.source(), idle_after="30s")
    with pytest.raises(JobDefinitionError, match="idle_after='soon' is no duration"):
        job.source(clicks.source(), event_time="ts", watermark_delay="1s", idle_after="soon")
    with pytest.raises(JobDefinitionError, match="time_mode='wall'; it must be none, processing or event"):
        plain.process(Idle(), "user string, after boolean", time_mode="wall")
    timed = job.source(clicks.source(), event_time="ts", watermark_delay="1s")
    with pytest.raises(JobDefinitionError, match="no side output 'late' here; there are: none"):
        timed.key_by("user").window(sl.tumbling("10s")).aggregate(n=sl.count()).side("late")


def test_a_drained_source_closes_what_its_last_rows_made_due(clicks: Clicks) -> None:
    clicks.write([("a", 1, 1)])
    clicks.write([("a", 30, 2)])
    job = clicks.job()
    source = job.source(clicks.source(), event_time="ts", watermark_delay="5s")
    counts = source.key_by("user").window(sl.tumbling("10s")).aggregate(n=sl.count()).sink(clicks.sink())
    file_systems: list[str | None] = []
    counts.sink(
        sl.ForeachBatchSink(lambda rows, _batch: file_systems.append(rows.sparkSession.conf.get("fs.file.impl", None)))
    )
    run = job.start(available_now=True)
    assert run.await_termination(timeout=120)
    assert run.status == "finished"
    assert clicks.rows() == [("a", *window(0, 10), 1)]
    assert set(file_systems) == {None}  # also in the second query, which the watermark wanted
