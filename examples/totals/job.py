"""Running totals per shop: every change as a row of history, and the newest values in a database table."""

from __future__ import annotations

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import strandline as sl

ORDERS = "order_id string, shop string, ts timestamp, cents long"
TABLE = "CREATE TABLE IF NOT EXISTS totals (shop PRIMARY KEY, orders, cents, smallest, largest, mean)"


def build(spark: SparkSession, orders_folder: str, output_folder: str, config: sl.Config) -> sl.Job:
    """Writes every change to `<output>/changes`, and keeps the table `totals` in `<output>/totals.db` up to date."""
    job = sl.Job("totals", spark, config)
    orders = job.source(spark.readStream.schema(ORDERS).option("maxFilesPerTrigger", 1).parquet(orders_folder))
    totals = orders.key_by("shop").aggregate(
        orders=sl.count(),
        cents=sl.sum("cents"),
        smallest=sl.min("cents"),
        largest=sl.max("cents"),
        mean=sl.avg("cents"),
        uid="totals",
    )
    database = Path(output_folder) / "totals.db"

    def upsert(rows: DataFrame, batch_id: int) -> None:
        # A batch may come again after a failure. Replacing rows by their key makes that harmless.
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(TABLE)
            connection.executemany("REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?)", map(tuple, rows.collect()))

    totals.sink(sl.ParquetSink(f"{output_folder}/changes"))
    totals.sink(sl.ForeachBatchSink(upsert))
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", help=f"a folder of Parquet files: {ORDERS}")
    parser.add_argument("output", help="a local folder for the changes and the database")
    parser.add_argument("checkpoints", help="where the job's checkpoints go: a shared folder or an object store")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("totals").getOrCreate()
    config = sl.Config(checkpoint_dir=args.checkpoints, checkpoint_interval="10s")
    build(spark, args.orders, args.output, config).start().await_termination()


if __name__ == "__main__":
    main()
