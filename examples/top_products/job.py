"""The three most viewed products of the last ten minutes, every minute."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pyspark.sql import Row, SparkSession

import strandline as sl

VIEWS = "product string, ts timestamp"
TOP = "window_end timestamp, rank int, product string, views long"


class TopThree(sl.KeyedProcessor):
    """The first three products of a window.

    A window closes for all products at once, when the watermark reaches its end. So one batch brings all of its rows,
    and there is nothing to remember.
    """

    def process(
        self, key: tuple[datetime], rows: Iterator[Row], context: sl.ProcessContext
    ) -> Iterator[tuple[Any, ...]]:
        best = sorted(rows, key=lambda row: (-row.views, row.product))[:3]
        for rank, row in enumerate(best, start=1):
            yield (*key, rank, row.product, row.views)


def build(spark: SparkSession, views_folder: str, output_folder: str, config: sl.Config) -> sl.Job:
    """Writes up to three rows per window to the output."""
    job = sl.Job("top-products", spark, config)
    files = spark.readStream.schema(VIEWS).option("maxFilesPerTrigger", 1).parquet(views_folder)
    views = job.source(files, event_time="ts", watermark_delay="30s")
    counts = views.key_by("product").window(sl.sliding("10m", "1m")).aggregate(views=sl.count(), uid="counts")
    top = counts.key_by("window_end").process(TopThree(), TOP, uid="top")
    top.sink(sl.ParquetSink(output_folder))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("views", help=f"a folder of Parquet files: {VIEWS}")
    parser.add_argument("output", help="where the top products go")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("top-products").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.views, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
