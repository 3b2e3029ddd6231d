"""Steps in event time behind other stateful steps: none loses a row that the batch counts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import strandline as sl

pytestmark = pytest.mark.spark

START = datetime(2026, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
HEARTBEAT = "~"
Event = tuple[str, datetime, int]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def write(folder: Path, batches: list[list[Event]], time: str = "ts", number: str = "x") -> None:
    """One file for each batch, in the order in which Spark reads them."""
    folder.mkdir()
    for place, rows in enumerate(batches):
        table = pa.table(
            {
                "user": [user for user, _, _ in rows],
                time: pa.array([moment for _, moment, _ in rows], pa.timestamp("us", "UTC")),
                number: [value for *_, value in rows],
            }
        )
        file = folder / f"{place:03d}.parquet"
        pq.write_table(table, file)
        os.utime(file, (place, place))


def read(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in pq.ParquetDataset(str(folder)).read().to_pylist()]


def events(seed: int) -> list[list[Event]]:
    """Batches of rows that are up to five seconds out of order. The last ones only move the watermark."""
    chance = Random(seed)
    batches = [
        [(chance.choice("abc"), at(15 * batch + chance.uniform(0, 20)), chance.randrange(100)) for _ in range(12)]
        for batch in range(5)
    ]
    return [*batches, [(HEARTBEAT, at(3600), 0)], [(HEARTBEAT, at(7200), 0)]]


class InOrder(sl.KeyedProcessor):
    """Yields its rows in the order of event time: each one when the watermark has reached its time."""

    OUTPUT = "user string, at timestamp, what string"

    def __init__(self, time: str) -> None:
        self._time = time

    def open(self, context: sl.ProcessContext) -> None:
        self.waiting = context.list_state("waiting", "at timestamp, what string")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for row in rows:
            moment = row[self._time]
            values = row.asDict()
            self.waiting.append_value((moment, str([values[name] for name in sorted(values)])))
            context.register_timer(-(-((moment - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND) // 1000))

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        limit = datetime.fromtimestamp(timestamp / 1000, UTC)
        waiting = list(self.waiting.get())
        yield from ((*key, *row) for row in sorted(waiting) if row[0] <= limit)
        self.waiting.put(row for row in waiting if row[0] > limit)


class Earlier(sl.KeyedProcessor):
    """Yields its rows with a time that is three seconds earlier."""

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> Iterator[Any]:
        for row in rows:
            yield row.user, row.ts - timedelta(seconds=3), row.x


def test_event_time_processors_follow_a_window_a_join_and_a_processor(
    tmp_path: Path, spark: SparkSession, runs: list[sl.JobRun]
) -> None:
    clicks, payments = events(1), events(2)
    write(tmp_path / "clicks", clicks)
    write(tmp_path / "payments", payments, "paid", "y")
    job = sl.Job(
        "chained",
        spark,
        sl.Config(checkpoint_dir=str(tmp_path / "ckpt"), checkpoint_interval="500ms", parallelism=2),
    )

    def source(folder: str, time: str, number: str) -> sl.KeyedStream:
        frame = spark.readStream.schema(f"user string, {time} timestamp, {number} long")
        files = frame.option("maxFilesPerTrigger", 1).parquet(str(tmp_path / folder))
        return job.source(files, event_time=time, watermark_delay="20s").key_by("user")

    def in_order(stream: sl.Stream, name: str, time: str) -> sl.Stream:
        ordered = stream.key_by("user").process(
            InOrder(time), InOrder.OUTPUT, time_mode="event", output_time="at", uid=name
        )
        return ordered.sink(sl.ParquetSink(str(tmp_path / name)))

    left, right = source("clicks", "ts", "x"), source("payments", "paid", "y")
    windows = left.window(sl.tumbling("10s")).aggregate(n=sl.count(), uid="windows")
    in_order(windows, "after-window", "window_time")
    joined = left.join(right, "left", within=("-5s", "40s"), uid="joined")
    ordered = in_order(joined, "after-join", "ts")
    per_minute = ordered.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count(), uid="per-minute")
    per_minute.sink(sl.ParquetSink(str(tmp_path / "per-minute")))
    earlier = left.process(
        Earlier(),
        "user string, ts timestamp, x long",
        time_mode="event",
        output_time="ts",
        output_delay="3s",
        uid="earlier",
    )
    in_order(earlier, "after-processor", "ts")
    run = job.start()
    runs.append(run)
    run.process_all_available()
    assert run.figures().late_rows == 0
    run.stop()

    def ours(folder: str) -> Counter[tuple[Any, ...]]:
        return Counter(row for row in read(tmp_path / folder) if row[0] != HEARTBEAT)

    lefts, rights = ([row for batch in batches[:-2] for row in batch] for batches in (clicks, payments))
    counts = Counter((user, at((moment - START) // timedelta(seconds=10) * 10 + 10)) for user, moment, _ in lefts)
    assert ours("after-window") == Counter(
        (user, end - MICROSECOND, str([n, user, end, end - timedelta(seconds=10), end - MICROSECOND]))
        for (user, end), n in counts.items()
    )
    pairs: list[tuple[str, datetime, str]] = []
    for user, ts, x in lefts:
        met: list[tuple[datetime | None, int | None]] = [
            (paid, y)
            for other, paid, y in rights
            if other == user and ts - timedelta(seconds=5) <= paid <= ts + timedelta(seconds=40)
        ]
        pairs += ((user, ts, str([paid, ts, user, x, y])) for paid, y in met or [(None, None)])
    assert ours("after-join") == Counter(pairs)
    assert {(user, begin): n for user, begin, _end, _time, n in ours("per-minute")} == Counter(
        (user, at((moment - START) // timedelta(minutes=1) * 60)) for user, moment, _ in pairs
    )
    before = [(user, ts - timedelta(seconds=3), x) for user, ts, x in lefts]
    assert ours("after-processor") == Counter((user, ts, str([ts, user, x])) for user, ts, x in before)
