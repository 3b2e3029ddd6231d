"""A window after Spark's `transformWithState` with `eventTimeColumnName`: the same rows in both engines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

import strandline as sl

pytestmark = pytest.mark.spark

START = datetime(2026, 1, 1, tzinfo=UTC)
HEARTBEAT = "~"
Event = tuple[str, datetime]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


Flavour = Literal["row", "pandas"]
FLAVOURS: tuple[Flavour, ...] = ("row", "pandas")
OUTPUT = "user string, seen timestamp"
BATCHES: list[list[Event]] = [
    [("a", at(10)), ("b", at(15))],
    [("a", at(11)), ("c", at(25))],
    [("a", at(5)), ("b", at(13)), ("d", at(60))],  # the watermark of the batch before is at 10, so a is late
    [(HEARTBEAT, at(3600))],
    [(HEARTBEAT, at(7200))],
]


def write(folder: Path) -> None:
    """One file for each batch, in the order in which both engines read them."""
    folder.mkdir()
    for place, rows in enumerate(BATCHES):
        times = pa.array([time for _, time in rows], pa.timestamp("us", "UTC"))
        file = folder / f"{place:03d}.parquet"
        pq.write_table(pa.table({"user": [user for user, _ in rows], "ts": times}), file)
        os.utime(file, (place, place))


def read(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in pq.ParquetDataset(str(folder)).read().to_pylist()]


def passing(flavour: Flavour, old: bool = False) -> StatefulProcessor:
    """A processor that yields the times of its rows, or with `old` always the same time, which becomes too old."""
    shown = datetime(1970, 1, 1, 0, 0, 1)

    class Passing(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for piece in rows:
                if flavour == "row":
                    yield Row(user=key[0], seen=shown if old else piece.ts)
                else:
                    yield pd.DataFrame({"user": key[0], "seen": shown if old else piece["ts"]})

        def close(self) -> None:
            pass

    return Passing()


def spark_result(spark: SparkSession, home: Path, flavour: Flavour, old: bool = False) -> Counter[tuple[Any, ...]]:
    session = spark.newSession()
    for name, value in {
        "shuffle.partitions": "1",
        "session.timeZone": "UTC",
        "streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }.items():
        session.conf.set(f"spark.sql.{name}", value)
    source = session.readStream.schema("user string, ts timestamp").option("maxFilesPerTrigger", 1)
    grouped = source.parquet(str(home / "in")).withWatermark("ts", "5 seconds").groupBy("user")
    transform = grouped.transformWithState if flavour == "row" else grouped.transformWithStateInPandas
    passed = transform(passing(flavour, old), OUTPUT, "Append", "EventTime", eventTimeColumnName="seen")
    found: Counter[tuple[Any, ...]] = Counter()

    def collect(frame: DataFrame, batch_id: int) -> None:
        found.update((user, window.start.astimezone(UTC), n) for user, window, n in frame.collect())

    query = (
        passed.groupBy("user", F.window("seen", "5 seconds"))
        .count()
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(home / f"spark-{flavour}-{old}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def our_results(spark: SparkSession, home: Path, runs: list[sl.JobRun]) -> dict[Flavour, Counter[tuple[Any, ...]]]:
    config = sl.Config(checkpoint_dir=str(home / "ckpt"), checkpoint_interval="500ms", parallelism=1)
    job = sl.Job("parity", spark, config)
    frame = spark.readStream.schema("user string, ts timestamp").option("maxFilesPerTrigger", 1)
    keyed = job.source(frame.parquet(str(home / "in")), event_time="ts", watermark_delay="5s").key_by("user")
    for flavour in FLAVOURS:
        passed = keyed.transform_with_state(
            passing(flavour), OUTPUT, "Append", "EventTime", eventTimeColumnName="seen", rows=flavour, uid=flavour
        )
        counts = passed.key_by("user").window(sl.tumbling("5s")).aggregate(n=sl.count(), uid=f"{flavour}-counts")
        counts.sink(sl.ParquetSink(str(home / flavour)))
    runs.append(job.start())
    runs[-1].process_all_available()
    assert runs[-1].figures().late_rows == 2  # one for each flavour
    runs[-1].stop()
    return {
        flavour: Counter((user, begin, n) for user, begin, _end, _time, n in read(home / flavour))
        for flavour in FLAVOURS
    }


def test_a_window_after_a_processor_of_sparks_counts_as_in_spark(
    spark: SparkSession, tmp_path: Path, runs: list[sl.JobRun]
) -> None:
    write(tmp_path / "in")
    ours = our_results(spark, tmp_path, runs)
    for flavour in FLAVOURS:
        assert ours[flavour] == spark_result(spark, tmp_path, flavour)
        assert sum(n for *_, n in ours[flavour].elements()) == 6 + 1  # all rows but the late one, and one heartbeat


@pytest.mark.slow
def test_a_row_behind_the_watermark_is_an_error_in_spark_too(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "in")
    with pytest.raises(StreamingQueryException, match="EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED"):
        spark_result(spark, tmp_path, "row", old=True)
