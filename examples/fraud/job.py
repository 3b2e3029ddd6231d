"""A fraud rule: a very small charge, and within a minute a very large one on the same account."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession

import strandline as sl

CHARGES = "account string, charge string, ts timestamp, cents long"
ALERTS = "account string, small string, large string, cents long, seconds double"
SMALL, LARGE, MINUTE = 100, 50_000, 60_000  # cents, cents, milliseconds


class SmallThenLarge(sl.KeyedProcessor):
    """Remembers the small and the large charges of an account for a minute of event time.

    Charges may come in any order, as far as the watermark allows, so both kinds are remembered: whichever of a pair
    comes second raises the alert.
    """

    def open(self, context: sl.ProcessContext) -> None:
        self.recent = context.map_state("recent", "charge string", "ms long, cents long")

    def process(self, key: tuple[str], rows: Iterator[Row], context: sl.ProcessContext) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            if SMALL < row.cents < LARGE:
                continue
            charge = (row.charge, row.ms, row.cents)
            for other, (ms, cents) in self.recent.items():
                small, large = sorted([charge, (other, ms, cents)], key=lambda charge: charge[2])
                if small[2] <= SMALL and large[2] >= LARGE and 0 <= large[1] - small[1] <= MINUTE:
                    yield (*key, small[0], large[0], large[2], (large[1] - small[1]) / 1000)
            self.recent.put(row.charge, (row.ms, row.cents))
            context.register_timer(row.ms + MINUTE)

    def on_timer(self, key: tuple[str], timestamp: int, context: sl.ProcessContext) -> None:
        """The watermark is here, so no partner can come any more for a charge that is a minute older."""
        for charge, (ms, _cents) in self.recent.items():
            if ms + MINUTE <= timestamp:
                self.recent.remove(charge)


def build(spark: SparkSession, charges_folder: str, output_folder: str, config: sl.Config) -> sl.Job:
    """Writes one row to the output per pair of charges that the rule finds."""
    job = sl.Job("fraud", spark, config)
    files = spark.readStream.schema(CHARGES).option("maxFilesPerTrigger", 1).parquet(charges_folder)
    charges = job.source(files.selectExpr("*", "unix_millis(ts) AS ms"), event_time="ts", watermark_delay="30s")
    alerts = charges.key_by("account").process(SmallThenLarge(), ALERTS, time_mode="event", uid="small-then-large")
    alerts.sink(sl.ParquetSink(output_folder))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("charges", help=f"a folder of Parquet files: {CHARGES}")
    parser.add_argument("output", help="where the alerts go")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("fraud").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="1s")
    build(spark, args.charges, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
