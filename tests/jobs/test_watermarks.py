"""Watermarks in whole jobs: nothing is dropped that a batch query counts, and nobody waits for an idle source."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import strandline as sl
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

START = datetime(2026, 1, 1, tzinfo=UTC)
Row = tuple[str, float, str]
FILES = 12


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


class Place:
    """Rows of users, (user, minute, kind), in folders of Parquet files."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark

    def write(self, folder: str, *files: list[Row]) -> None:
        path = self.root / folder
        path.mkdir(exist_ok=True)
        for rows in files:
            table = pa.table(
                {
                    "user": pa.array([user for user, _, _ in rows], pa.string()),
                    "ts": pa.array([at(minute) for _, minute, _ in rows], pa.timestamp("us", "UTC")),
                    "kind": pa.array([kind for _, _, kind in rows], pa.string()),
                }
            )
            number = len(list(path.iterdir()))
            pq.write_table(table, path / f".{number:05d}")
            os.utime(path / f".{number:05d}", (number, number))  # Spark reads files in the order of their times
            (path / f".{number:05d}").rename(path / f"{number:05d}.parquet")

    def stream(self, folder: str) -> DataFrame:
        (self.root / folder).mkdir(exist_ok=True)
        reader = self.spark.readStream.schema("user string, ts timestamp, kind string").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.root / folder))

    def job(self) -> sl.Job:
        config = sl.Config(checkpoint_dir=str(self.root / "ckpt"), checkpoint_interval="1s", parallelism=2)
        return sl.Job("watermarks", self.spark, config)

    def sink(self, folder: str) -> sl.ParquetSink:
        return sl.ParquetSink(str(self.root / folder))

    def rows(self, folder: str) -> list[tuple[Any, ...]]:
        path = self.root / folder
        if not any(path.glob("*.parquet")):
            return []
        return sorted(tuple(row.values()) for row in pq.ParquetDataset(str(path)).read().to_pylist())


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


def counted(rows: DataFrame, size: str) -> list[tuple[Any, ...]]:
    """What Spark SQL counts per user and window of the column `t`."""
    window = F.window("t", size)
    counts = rows.groupBy("user", window.alias("w")).count()
    return sorted(
        (row.user, row.start.astimezone(UTC), row["count"])
        for row in counts.select("user", F.col("w.start").alias("start"), "count").collect()
    )


def test_chained_steps_and_branches_count_what_a_batch_counts_in_batches_of_one_file(place: Place) -> None:
    chance = random.Random(7)

    def some(number: int, kinds: list[str]) -> list[Row]:
        return [
            (chance.choice("abc"), 15 * number + chance.uniform(-4, 15), chance.choice(kinds))
            for _ in range(chance.randrange(4, 12))
        ]

    orders = [some(number, ["rare", "often", "often"]) for number in range(FILES)]
    payments = [some(number, ["card"]) for number in range(FILES)]
    flush = [[("zz", 10_000.0, "flush")]]
    place.write("orders", *orders, *flush)
    place.write("payments", *payments, *flush)

    job = place.job()
    order = job.source(place.stream("orders"), event_time="ts", watermark_delay="5m")
    # A watermark of Spark's with a filter above it, which Spark moves below it, and a new name for its column.
    paid = place.stream("payments").withWatermark("ts", "5 minutes").filter("kind <> 'flush'")
    payment = job.source(paid.select("user", F.col("ts").alias("paid"), F.lit(1).alias("one")))
    silent = job.source(place.stream("silent"), event_time="ts", watermark_delay="0s")

    joined = order.key_by("user").join(payment.key_by("user"), "left", within="30m", uid="join")
    joined.key_by("user").window(sl.tumbling("10m"), "ts").aggregate(n=sl.count(), uid="after-join").sink(
        place.sink("after-join")
    )
    sessions = order.key_by("user").window(sl.session("6m")).aggregate(n=sl.count(), uid="sessions")
    sessions.key_by("user").window(sl.tumbling("20m")).aggregate(n=sl.count(), uid="of-sessions").sink(
        place.sink("of-sessions")
    )
    # A view with few rows: the rows that it leaves out move its watermark.
    order.transform(lambda rows: rows.filter("kind = 'rare'")).key_by("user").window(sl.tumbling("10m")).aggregate(
        n=sl.count(), uid="rare"
    ).sink(place.sink("rare"))
    # A branch whose source has no rows holds back nobody else.
    silent.key_by("user").window(sl.tumbling("10m")).aggregate(n=sl.count(), uid="silent").sink(place.sink("silent"))

    run = job.start(available_now=True)
    assert run.await_termination(timeout=240)
    figures = run.figures()
    assert figures.late_rows == 0
    assert figures.batches > FILES, "available_now must respect maxFilesPerTrigger"

    def batch(folder: str) -> DataFrame:
        return place.spark.read.parquet(str(place.root / folder)).filter("kind <> 'flush'")

    left, right = batch("orders"), batch("payments").withColumnRenamed("ts", "paid").drop("kind")
    near = (left.user == right.user) & F.abs(F.unix_micros("ts") - F.unix_micros("paid")).between(0, 1_800_000_000)
    expected = {
        "after-join": counted(left.join(right, near, "left").select(left.user, left.ts.alias("t")), "10 minutes"),
        "rare": counted(left.filter("kind = 'rare'").withColumn("t", F.col("ts")), "10 minutes"),
        "of-sessions": counted(
            left.groupBy("user", F.session_window("ts", "6 minutes").alias("s"))
            .count()
            .select("user", (F.col("s.end") - F.expr("interval 1 microsecond")).alias("t")),
            "20 minutes",
        ),
        "silent": [],
    }
    for folder, rows in expected.items():
        found = sorted((user, start, n) for user, start, _end, *_, n in place.rows(folder) if user != "zz")
        assert found == rows, folder


def test_an_idle_source_does_not_hold_back_others_and_watermarks_survive_restarts(
    place: Place, runs: list[sl.JobRun]
) -> None:
    def start(parallelism: int) -> sl.JobRun:
        job = place.job()
        fast = job.source(place.stream("fast"), event_time="ts", watermark_delay="0s")
        slow = job.source(place.stream("slow"), event_time="ts", watermark_delay="0s", idle_after="1s")
        united = fast.union(slow).key_by("user").window(sl.tumbling("10m"), late="late")
        windows = united.aggregate(n=sl.count(), uid="windows")
        windows.sink(place.sink("out"))
        windows.side("late").sink(place.sink("late"))
        runs.append(job.start(parallelism=parallelism))
        return runs[-1]

    run = start(2)
    place.write("slow", [("s", 1, "")])
    place.write("fast", [("f", 2, ""), ("f", 31, "")])
    run.process_all_available()
    # Nobody writes any more. The slow source falls idle, and the window closes by the time of the fast one.
    first = [
        ("f", at(0), at(10), at(10) - timedelta(microseconds=1), 1),
        ("s", at(0), at(10), at(10) - timedelta(microseconds=1), 1),
    ]
    wait_until(lambda: place.rows("out") == first, what="the window")
    assert run.figures().watermark_ms == int(at(31).timestamp() * 1000)
    run.rescale(1)
    place.write("slow", [("s", 3, ""), ("s", 32, "")])
    run.process_all_available()
    assert len(place.rows("late")) == 1
    run.cancel()

    run = start(2)
    place.write("slow", [("s", 4, ""), ("s", 33, "")])
    run.process_all_available()
    assert [row[:2] for row in place.rows("late")] == [("s", at(3)), ("s", at(4))]
    assert place.rows("out") == first
