"""Readings of devices without the repetitions that they send when an answer does not come."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import strandline as sl

READINGS = "device string, number long, ts timestamp, celsius double"


def build(spark: SparkSession, readings_folder: str, output_folder: str, config: sl.Config) -> sl.Job:
    """Writes every reading once: a device numbers its readings, and never uses a number again."""
    job = sl.Job("dedup", spark, config)
    files = spark.readStream.schema(READINGS).option("maxFilesPerTrigger", 1).parquet(readings_folder)
    readings = job.source(files, event_time="ts", watermark_delay="30m")
    once = readings.key_by("device", "number").deduplicate(within="1h", uid="once")
    once.sink(sl.ParquetSink(output_folder))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readings", help=f"a folder of Parquet files: {READINGS}")
    parser.add_argument("output", help="where the readings go")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("dedup").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.readings, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
