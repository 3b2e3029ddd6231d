"""Sessions from a click log: a user's clicks with no pause of five minutes between them."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import strandline as sl

CLICKS = "user string, ts timestamp, page string, cents long"


def build(spark: SparkSession, clicks_folder: str, output_folder: str, config: sl.Config) -> sl.Job:
    """Writes one row per session to `<output>/sessions`, and clicks that come too late to `<output>/late`."""
    job = sl.Job("sessions", spark, config)
    files = spark.readStream.schema(CLICKS).option("maxFilesPerTrigger", 1).parquet(clicks_folder)
    clicks = job.source(files, event_time="ts", watermark_delay="1m")
    sessions = (
        clicks.key_by("user")
        .window(sl.session("5m"), late="late")
        .aggregate(clicks=sl.count(), pages=sl.approx_count_distinct("page"), spent=sl.sum("cents"), uid="sessions")
    )
    sessions.sink(sl.ParquetSink(f"{output_folder}/sessions"))
    sessions.side("late").sink(sl.ParquetSink(f"{output_folder}/late"))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clicks", help=f"a folder of Parquet files: {CLICKS}")
    parser.add_argument("output", help="where the sessions go")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("sessions").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.clicks, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
