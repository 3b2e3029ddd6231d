"""Orders with their payments; an order that is not paid within an hour comes out without one."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import strandline as sl

ORDERS = "order_id string, shop string, ts timestamp, cents long"
PAYMENTS = "order_id string, paid_at timestamp, paid_cents long"


def build(
    spark: SparkSession, orders_folder: str, payments_folder: str, output_folder: str, config: sl.Config
) -> sl.Job:
    """Writes one row per payment of an order, or one with nulls for an order without any."""
    job = sl.Job("payments", spark, config)
    reader = spark.readStream.option("maxFilesPerTrigger", 1)
    orders = job.source(reader.schema(ORDERS).parquet(orders_folder), event_time="ts", watermark_delay="5m")
    payments = job.source(reader.schema(PAYMENTS).parquet(payments_folder), event_time="paid_at", watermark_delay="5m")
    paid = orders.key_by("order_id").join(payments.key_by("order_id"), "left", within=("0s", "1h"), uid="paid")
    paid.sink(sl.ParquetSink(output_folder))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", help=f"a folder of Parquet files: {ORDERS}")
    parser.add_argument("payments", help=f"a folder of Parquet files: {PAYMENTS}")
    parser.add_argument("output", help="where the orders with their payments go")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("payments").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.orders, args.payments, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
