"""Sales per shop and minute, from orders in Kafka into a Delta table."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

import strandline as sl

ORDER = "order_id string, shop string, ts timestamp, cents long"


def build(spark: SparkSession, servers: str, topic: str, table: str, config: sl.Config) -> sl.Job:
    """Writes one row per shop and minute with orders to the table, which is partitioned by the shop."""
    job = sl.Job("sales", spark, config)
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    orders = records.select(from_json(col("value").cast("string"), ORDER).alias("order")).select("order.*")
    sales = (
        job.source(orders, event_time="ts", watermark_delay="5m")
        .key_by("shop")
        .window(sl.tumbling("1m"))
        .aggregate(orders=sl.count(), cents=sl.sum("cents"), uid="sales")
    )
    sales.sink(sl.DeltaSink(table, partition_by=["shop"]))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", help="Kafka's bootstrap servers, such as localhost:9092")
    parser.add_argument("topic", help=f"a topic with JSON values: {ORDER}")
    parser.add_argument("table", help="where the Delta table is, or is made: a folder or an object store")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    connector = sl.packages("kafka")  # Spark fetches it from Maven
    spark = SparkSession.builder.appName("sales").config("spark.jars.packages", connector).getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.servers, args.topic, args.table, config).start().await_termination()


if __name__ == "__main__":
    main()
