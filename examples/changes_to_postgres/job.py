"""Current totals per shop in a table of PostgreSQL: a change stream, of which the table keeps the last row of a key."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import strandline as sl

ORDERS = "order_id string, shop string, ts timestamp, cents long"


def build(spark: SparkSession, orders_folder: str, schema: str, config: sl.Config) -> sl.Job:
    """Keeps the table `<schema>.totals` up to date, and every change as a row of `<schema>.total_changes`.

    The environment variable `ORDERS_DB` holds the URI of the database.
    """
    job = sl.Job("changes_to_postgres", spark, config)
    orders = job.source(spark.readStream.schema(ORDERS).option("maxFilesPerTrigger", 1).parquet(orders_folder))
    totals = orders.key_by("shop").aggregate(
        orders=sl.count(), cents=sl.sum("cents"), latest=sl.max("ts"), uid="totals"
    )
    totals.sink(sl.PostgresSink("env:ORDERS_DB", "totals", mode="upsert", schema=schema))
    totals.sink(sl.PostgresSink("env:ORDERS_DB", "total_changes", schema=schema))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", help=f"a folder of Parquet files: {ORDERS}")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    parser.add_argument("--schema", default="public", help="the schema of the two tables")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("changes_to_postgres").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.orders, args.schema, config).start().await_termination()


if __name__ == "__main__":
    main()
