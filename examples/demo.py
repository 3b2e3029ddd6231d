"""Runs an example on its sample data in a temporary folder, and prints what comes out."""

from __future__ import annotations

import argparse
import importlib
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from pyspark.sql import SparkSession

import data
import strandline as sl


def run(spark: SparkSession, name: str, root: Path) -> Path:
    """Process the sample data of an example to its end; returns the folder of its output."""
    folders = [root / source for source in data.INPUTS[name]]
    for folder, rows in zip(folders, data.INPUTS[name].values(), strict=True):
        data.write(folder, rows())
    config = sl.Config(checkpoint_dir=str(root / "checkpoints"), checkpoint_interval="500ms", parallelism=2)
    build = importlib.import_module(f"{name}.job").build
    running = build(spark, *map(str, folders), str(root / "output"), config).start()
    running.process_all_available()
    running.stop()
    return root / "output"


def show(spark: SparkSession, output: Path) -> None:
    """Print the Parquet folders and the databases in `output`."""
    for folder in sorted({file.parent for file in output.rglob("*.parquet")}):
        rows = spark.read.parquet(str(folder))
        print(f"{folder.relative_to(output.parent)}: {rows.count()} rows")
        rows.orderBy(*rows.columns).show(12, truncate=False)
    for database in sorted(output.glob("*.db")):
        with closing(sqlite3.connect(database)) as connection:
            table = connection.execute(f"SELECT * FROM {database.stem} ORDER BY 1")
            columns = [column for column, *_ in table.description]
            print(f"{database.relative_to(output.parent)}:")
            spark.createDataFrame(table.fetchall(), columns).show(truncate=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example", choices=data.INPUTS)
    name = parser.parse_args().example
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        show(spark, run(spark, name, Path(folder)))
    spark.stop()


if __name__ == "__main__":
    main()
