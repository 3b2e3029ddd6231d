"""A drain: all windows close and all event-time timers fire before the job stops, and a later run can go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from strandline.checkpoint.batch import batch_id
from strandline.errors import JobFailedError, StrandlineError
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

START = datetime(2026, 1, 1, tzinfo=UTC)
Event = tuple[str, datetime]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


EVENTS = [(user, at(seconds)) for seconds in range(0, 130, 7) for user in ("ann", "bob")[: 1 + seconds % 2]]


class Clicks:
    """The folders of one job, and its parts."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark
        (root / "in").mkdir()
        self._files = 0

    def write(self, events: Iterable[Event]) -> None:
        rows = list(events)
        table = pa.table(
            {"user": [user for user, _ in rows], "ts": pa.array([ts for _, ts in rows], pa.timestamp("us", "UTC"))}
        )
        name = f"{self._files:03d}.parquet"
        self._files += 1
        pq.write_table(table, self.root / f".{name}")
        os.utime(self.root / f".{name}", (self._files, self._files))
        (self.root / f".{name}").rename(self.root / "in" / name)

    def job(self, **options: Any) -> tuple[sl.Job, sl.KeyedStream]:
        config = sl.Config(
            checkpoint_dir=str(self.root / "ckpt"),
            local_dir=str(self.root / "local"),
            **{
                "checkpoint_interval": "500ms",
                "parallelism": 2,
                "rest_port": "off",
                "restart_delay": "100ms",
                **options,
            },
        )
        job = sl.Job("clicks", self.spark, config)
        files = self.spark.readStream.schema("user string, ts timestamp").option("maxFilesPerTrigger", 1)
        rows = job.source(files.parquet(str(self.root / "in")), event_time="ts", watermark_delay="1h")
        return job, rows.key_by("user")

    def sink(self, stream: sl.Stream, name: str) -> None:
        stream.sink(sl.ParquetSink(str(self.root / name)))

    def read(self, name: str) -> list[tuple[Any, ...]]:
        files = (self.root / name).glob("[!._]*.parquet")
        return sorted(tuple(row.values()) for file in files for row in pq.read_table(file).to_pylist())


@pytest.fixture
def clicks(tmp_path: Path, spark: SparkSession) -> Clicks:
    return Clicks(tmp_path, spark)


def start_of(ts: datetime, size: int) -> datetime:
    return at(int((ts - START).total_seconds()) // size * size)


def counted(events: Iterable[Event], size: int) -> list[tuple[Any, ...]]:
    """The tumbling windows of these rows: user, start, end, and the number of rows."""
    found = Counter((user, start_of(ts, size)) for user, ts in events)
    return sorted((user, start, start + timedelta(seconds=size), n) for (user, start), n in found.items())


FIRST_HOP, HOUR = 1_800_003, 3_600_000
"""Milliseconds. First hops of some windows never meet second hops of others, because windows last whole seconds."""


class Remembered(sl.KeyedProcessor):
    """Yields each row again when event time has reached an hour after it, in two hops of a timer."""

    OUTPUT = "user string, at timestamp, hops long"

    def open(self, context: sl.ProcessContext) -> None:
        self.hops = context.map_state("hops", "due long", "hops long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for row in rows:
            due = millis(row.window_end) + FIRST_HOP
            self.hops.put(due, 1)
            context.register_timer(due)

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        hops = self.hops.get(timestamp)
        self.hops.remove(timestamp)
        if hops == 1:
            self.hops.put(timestamp - FIRST_HOP + HOUR, 2)
            context.register_timer(timestamp - FIRST_HOP + HOUR)
        else:
            yield *key, datetime.fromtimestamp(timestamp / 1000, UTC), hops


def pipeline(clicks: Clicks, **options: Any) -> sl.Job:
    """Windows, windows of these windows, and a processor whose timers set timers."""
    job, rows = clicks.job(**options)
    short = rows.window(sl.tumbling("10s")).aggregate(n=sl.count(), uid="short")
    clicks.sink(short, "short")
    long = short.key_by("user").window(sl.tumbling("60s")).aggregate(windows=sl.count(), rows=sl.sum("n"), uid="long")
    clicks.sink(long.transform(lambda frame: frame.drop("window_time")), "long")
    later = short.key_by("user").process(Remembered(), Remembered.OUTPUT, time_mode="event", uid="later")
    clicks.sink(later, "later")
    return job


def check(clicks: Clicks, events: Iterable[Event]) -> None:
    """Compare the three outputs with what follows from the rows."""
    events = list(events)
    short = counted(events, 10)
    assert [(*row[:3], row[-1]) for row in clicks.read("short")] == short  # without window_time
    long: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for user, start, _end, n in short:
        long[user, start_of(start, 60)].append(n)
    assert clicks.read("long") == sorted(
        (user, start, start + timedelta(seconds=60), len(counts), sum(counts)) for (user, start), counts in long.items()
    )
    assert clicks.read("later") == sorted((user, end + timedelta(hours=1), 2) for user, _start, end, _n in short)


@pytest.mark.parametrize("changelog", [False, True])
def test_a_drain_fires_every_window_and_timer_of_a_chain_once(
    clicks: Clicks, runs: list[sl.JobRun], changelog: bool
) -> None:
    clicks.write(EVENTS[:8])
    clicks.write(EVENTS[8:])
    run = pipeline(clicks, changelog=changelog).start()
    runs.append(run)
    run.process_all_available()
    assert clicks.read("short") == []  # the watermark is an hour behind
    path = run.stop(savepoint_dir=str(clicks.root / "sp"), drain=True)
    assert run.status == "stopped"
    check(clicks, EVENTS)
    assert path is not None
    for step in ("short", "long"):
        assert sum(batch.num_rows for batch in sl.read_state(path, step)) == 0


def test_a_later_run_goes_on_behind_a_drain_with_the_true_watermark(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    clicks.write(EVENTS)
    run = pipeline(clicks).start()
    runs.append(run)
    run.process_all_available()
    run.stop(drain=True)
    later = [(user, ts + timedelta(minutes=10)) for user, ts in EVENTS]
    clicks.write(later)  # after the drained rows, and far from the end of time
    again = pipeline(clicks).start()
    runs.append(again)
    again.process_all_available()
    check(clicks, EVENTS)
    again.stop(drain=True)
    check(clicks, [*EVENTS, *later])


def test_rows_that_were_not_read_are_left_to_the_next_run(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    # every file has windows of its own
    files = [[(user, ts + timedelta(minutes=5 * number)) for user, ts in EVENTS] for number in range(6)]
    for events in files:
        clicks.write(events)
    run = pipeline(clicks).start()
    runs.append(run)
    wait_until(lambda: run.figures().rows >= len(EVENTS), 60)
    run.stop(drain=True)
    read = run.figures().rows // len(EVENTS)
    assert 0 < read < len(files)
    check(clicks, chain(*files[:read]))
    again = pipeline(clicks).start()
    runs.append(again)
    again.process_all_available()
    again.stop(drain=True)
    check(clicks, chain(*files))


class KillsItself(sl.KeyedProcessor):
    """Counts rows; the first timer that fires kills its slot."""

    OUTPUT = "user string, n long"

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def open(self, context: sl.ProcessContext) -> None:
        self.count = context.value_state("n", "n long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        self.count.update((self.count.get() or 0) + sum(1 for _ in rows))
        context.register_timer(millis(at(500)))

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            yield *key, self.count.get()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.faults
def test_a_slot_that_is_lost_in_a_drain_is_replaced(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    clicks.write(EVENTS)
    job, rows = clicks.job()
    mark = clicks.root / "killed"
    clicks.sink(rows.process(KillsItself(mark), KillsItself.OUTPUT, time_mode="event", uid="counts"), "counts")
    run = job.start()
    runs.append(run)
    run.process_all_available()
    run.stop(drain=True)
    assert mark.exists()
    assert clicks.read("counts") == sorted(Counter(user for user, _ in EVENTS).items())


class EveryMinute(sl.KeyedProcessor):
    """Sets the next timer whenever one fires."""

    OUTPUT = "user string, at long"

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        context.register_timer(millis(max(row.ts for row in rows)))

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        context.register_timer(timestamp + 60_000)
        yield *key, timestamp


def test_timers_without_end_cannot_be_drained_and_nothing_of_the_drain_is_visible(
    clicks: Clicks, runs: list[sl.JobRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strandline.runtime.driver.draining.MOST_BATCHES", 3)

    def job() -> sl.Job:
        job, rows = clicks.job(checkpoint_interval="50ms")
        clicks.sink(rows.process(EveryMinute(), EveryMinute.OUTPUT, time_mode="event", uid="minutes"), "minutes")
        return job

    clicks.write(EVENTS)
    run = job().start()
    runs.append(run)
    run.process_all_available()
    with pytest.raises(StrandlineError, match="'minutes': the drain was given up after 3 batches"):
        run.stop(drain=True)
    assert run.status == "failed"
    assert clicks.read("minutes") == []
    again = job().start()
    runs.append(again)
    again.process_all_available()
    again.stop()
    assert clicks.read("minutes") == []  # event time is where it was


class Slow(sl.KeyedProcessor):
    """A timer that waits until a file is there."""

    def __init__(self, reached: Path, go_on: Path) -> None:
        self._reached, self._go_on = reached, go_on

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        context.register_timer(millis(max(row.ts for row in rows)))

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        self._reached.touch()
        while not self._go_on.exists():
            time.sleep(0.01)
        yield *key, timestamp


def test_a_run_can_be_cancelled_in_the_middle_of_a_drain(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    clicks.write(EVENTS)
    reached, go_on = clicks.root / "reached", clicks.root / "go-on"
    job, rows = clicks.job()
    clicks.sink(rows.process(Slow(reached, go_on), EveryMinute.OUTPUT, time_mode="event", uid="slow"), "slow")
    run = job.start()
    runs.append(run)
    run.process_all_available()
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            run.stop(drain=True)
        except JobFailedError as error:
            errors.append(error)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    wait_until(reached.exists, 60)
    running = run.figures().running_batch
    assert running is not None
    assert running.id == batch_id(run.figures().generation, running.number)
    run.cancel()
    go_on.touch()
    stopping.join(60)
    assert run.status == "cancelled"
    assert "asked to end" in str(errors[0])
    assert clicks.read("slow") == []


def test_an_outer_join_and_a_function_as_sink_are_drained_too(clicks: Clicks, runs: list[sl.JobRun]) -> None:
    clicks.write(EVENTS)
    (clicks.root / "none").mkdir()
    job, rows = clicks.job()
    windows = rows.window(sl.tumbling("10s")).aggregate(n=sl.count(), uid="windows")
    lonely = windows.key_by("user").join(
        job.source(
            clicks.spark.readStream.schema("user string, ts timestamp").parquet(str(clicks.root / "none")),
            event_time="ts",
            watermark_delay="1h",
        ).key_by("user"),
        how="left",
        within=("0s", "10s"),
        left_time="window_time",
        right_time="ts",
        uid="join",
    )
    seen: list[tuple[Any, ...]] = []

    def collect(frame: DataFrame, batch: int) -> None:
        seen.extend((row[0], row["n"]) for row in frame.collect())

    lonely.sink(sl.ForeachBatchSink(collect))
    run = job.start()
    runs.append(run)
    run.process_all_available()
    assert seen == []
    run.stop(drain=True)
    assert sorted(seen) == sorted((user, n) for user, _start, _end, n in counted(EVENTS, 10))
