"""Charges from a topic of Kafka, and those that are unusual for their account to another topic, each once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import strandline as sl

CHARGE = "account string, charge string, ts timestamp, cents long"
UNUSUAL = "account string, charge string, ts timestamp, cents long, usual long"
ENOUGH, TIMES = 10, 5


class Unusual(sl.KeyedProcessor):
    """Emits a charge of five times what is usual for the account, which is the mean of its earlier charges."""

    def open(self, context: sl.ProcessContext) -> None:
        self.seen = context.value_state("seen", "charges long, cents long")

    def process(self, key: tuple[str], rows: Iterator[Row], context: sl.ProcessContext) -> Iterator[tuple[Any, ...]]:
        charges, cents = self.seen.get() or (0, 0)
        for row in sorted(rows, key=lambda row: row.charge):
            if charges >= ENOUGH and row.cents * charges >= TIMES * cents:
                yield (*key, row.charge, row.ts, row.cents, cents // charges)
            charges, cents = charges + 1, cents + row.cents
        self.seen.update((charges, cents))


def build(
    spark: SparkSession, brokers: str, charges_topic: str, unusual_topic: str, config: sl.Config, **options: str
) -> sl.Job:
    """Both topics must exist. `options` are further options of the source."""
    job = sl.Job("unusual-charges", spark, config)
    messages = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", brokers)
        .option("subscribe", charges_topic)
        .option("startingOffsets", "earliest")
        .options(**options)
        .load()
    )
    charges = job.source(messages.select(F.from_json(F.col("value").cast("string"), CHARGE).alias("c")).select("c.*"))
    unusual = charges.key_by("account").process(Unusual(), UNUSUAL, uid="unusual")
    unusual.sink(sl.KafkaSink(brokers, unusual_topic, timestamp="ts", options={"compression.type": "lz4"}))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("brokers", help="some brokers: host:port,host:port")
    parser.add_argument("charges", help=f"a topic with JSON objects: {CHARGE}")
    parser.add_argument("unusual", help="the topic for unusual charges")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    session = SparkSession.builder.appName("unusual-charges").config("spark.jars.packages", sl.packages("kafka"))
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="1s")
    build(session.getOrCreate(), args.brokers, args.charges, args.unusual, config).start().await_termination()


if __name__ == "__main__":
    main()
