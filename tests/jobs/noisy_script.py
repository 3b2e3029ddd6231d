"""A script of a user's that stops a run, cancels another in the middle of a batch, and leaves a third one alone.

Run as a program, with the folder to work in. `BEGIN` on standard error comes after Spark's own start.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import strandline as sl

SCHEMA = "user string, ms long, ts timestamp"


def clicks(spark: SparkSession, root: Path, name: str) -> tuple[sl.Job, sl.Stream]:
    config = sl.Config(checkpoint_dir=str(root / "ckpt"), checkpoint_interval="1s", local_dir=str(root / "local"))
    job = sl.Job(name, spark, config)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 20).load()
    rows = rate.selectExpr("cast(value % 7 as string) AS user", "value AS ms", "timestamp AS ts")
    return job, job.source(rows, event_time="ts", watermark_delay="1s")


def windows(spark: SparkSession, root: Path, name: str) -> sl.Job:
    job, stream = clicks(spark, root, name)
    counted = stream.key_by("user").window(sl.tumbling("1s")).aggregate(n=sl.count(), uid="windows")
    counted.sink(sl.ParquetSink(str(root / name)))
    return job


class Witness(sl.RunListener):
    """Takes a moment to note how the run has ended."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def on_terminated(self, run: sl.JobRun) -> None:
        time.sleep(0.5)
        self._note.write_text(str(run.status))


def wait_for_rows(spark: SparkSession, folder: Path) -> None:
    while spark.read.parquet(str(folder)).isEmpty():
        time.sleep(0.1)


def main(root: Path) -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    print("BEGIN", file=sys.stderr, flush=True)

    run = windows(spark, root, "stopped").start()
    wait_for_rows(spark, root / "stopped")
    run.stop()

    began = root / "began"

    def send(rows: Any) -> None:
        began.touch()
        time.sleep(600)

    def slow(rows: DataFrame, _batch: int) -> None:
        rows.foreachPartition(send)

    job, stream = clicks(spark, root, "cancelled")
    stream.key_by("user").aggregate(n=sl.count(), uid="counts").sink(sl.ForeachBatchSink(slow))
    run = job.start()
    while not began.exists():
        time.sleep(0.1)
    run.cancel()

    job = windows(spark, root, "left")
    job.add_listener(Witness(root / "witnessed"))
    run = job.start()
    wait_for_rows(spark, root / "left")
    print("WAITING", flush=True)
    run.await_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
