"""How fast the state of a stopped job is read, beside Spark's own reader of as many keys.

A Strandline job and a query of Spark, with its RocksDB state store, count the rows of every key and keep the greatest
value. Then each state is read as a whole: by `spark.read.format("strandline")`, by `sl.read_state` in one thread, and
by `spark.read.format("statestore")`. Every read adds up all rows, so that it must decode them, and the sums are
checked. The first read of each reader, which starts Python workers and warms up the JVM, is reported by itself.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.report import machine
from strandline_bench.running import session
from strandline_bench.spark_peer import peer_session
from strandline_bench.timing import Say
from strandline_bench.workload import SCHEMA, Workload, WrongResultError, offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOAD_ROWS = 250_000
"""Rows of an input file."""
_UID = "kept"

Sums = tuple[int, int, int]
"""How many keys there are, how many rows they had, and how long their values are together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The size of the state."""

    keys: int = 5_000_000
    value_bytes: int = 100
    repeats: int = 3
    parallelism: int = 2

    def __post_init__(self) -> None:
        if min(self.keys, self.value_bytes, self.repeats, self.parallelism) < 1:
            raise ConfigError("--keys, --value-bytes, --repeats and --parallelism must be at least 1")


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure every reader, check what it read, and return all figures as plain values.

    Raises `WrongResultError` where a reader did not find all keys.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.keys // LOAD_ROWS)
    try:
        workload = Workload(home / "files", parameters.keys, parameters.value_bytes)
        order = np.random.default_rng(11).permutation(parameters.keys)
        files = [workload.of_keys(order[at : at + LOAD_ROWS]) for at in range(0, parameters.keys, LOAD_ROWS)]
        offer(files, home / "in")
        expected = (parameters.keys, parameters.keys, parameters.keys * parameters.value_bytes)
        steps = 2 + 3 * (parameters.repeats + 1)
        say("state", 0, steps)
        path = _strandline_state(spark, home, parameters)
        say("state", 1, steps)
        peer = peer_session(spark)
        _spark_state(peer, home)
        done = 2
        readers: dict[str, Callable[[], Sums]] = {
            "strandline_in_spark": lambda: _added(spark.read.format("strandline").load(path), "n", "greatest"),
            "strandline_read_state": lambda: _added_here(path),
            "spark_statestore": lambda: _spark_added(peer, home),
        }
        figures: dict[str, dict[str, Any]] = {}
        for name, read in readers.items():
            seconds = []
            for _ in range(parameters.repeats + 1):
                say("state", done, steps)
                began = time.monotonic()
                found = read()
                seconds.append(time.monotonic() - began)
                done += 1
                if found != expected:
                    raise WrongResultError(f"{name} found {found}, expected {expected}: keys, rows, bytes of values")
            figures[name] = {
                "first_s": round(seconds[0], 3),
                "seconds": [round(one, 3) for one in seconds[1:]],
                "rows_per_s": round(parameters.keys / median(seconds[1:]), 1),
            }
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    ours, theirs = (figures[name]["rows_per_s"] for name in ("strandline_in_spark", "spark_statestore"))
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "readers": figures,
        "ratio": round(ours / theirs, 3),
        "verified": True,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    table = Table("reader", "rows/s", "seconds", "first read", title=f"reading {result['parameters']['keys']:,} keys")
    for name, figures in result["readers"].items():
        table.add_row(
            name, f"{figures['rows_per_s']:,.0f}", ", ".join(map(str, figures["seconds"])), str(figures["first_s"])
        )
    console.print(table)
    console.print(f"Strandline in Spark ÷ Spark's statestore: {result['ratio']}")


def _strandline_state(spark: SparkSession, home: Path, parameters: Parameters) -> str:
    """The folder of a job that has processed the input and stopped."""
    config = sl.Config(
        checkpoint_dir=str(home / "checkpoints"), checkpoint_interval="1h", parallelism=parameters.parallelism
    )
    job = sl.Job("reader", spark, config)
    source = job.source(spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(home / "in")))
    kept = source.key_by("key").aggregate(n=sl.count(), greatest=sl.max("value"), uid=_UID)
    kept.sink(sl.ParquetSink(str(home / "out")))
    run = job.start(available_now=True)
    run.await_termination()
    return str(home / "checkpoints" / "reader")


def _spark_state(spark: SparkSession, home: Path) -> None:
    """Leave the state of a query of Spark that has processed the same input."""
    from pyspark.sql import functions as F

    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(home / "in"))
    kept = source.groupBy("key").agg(F.count("*").alias("n"), F.max("value").alias("greatest"))
    query = (
        kept.writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(home / "spark"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _added(frame: DataFrame, n: str, value: str) -> Sums:
    from pyspark.sql import functions as F

    row = frame.agg(F.count("*"), F.sum(n), F.sum(F.length(value))).collect()[0]
    return int(row[0]), int(row[1] or 0), int(row[2] or 0)


def _added_here(path: str) -> Sums:
    keys = rows = length = 0
    for batch in sl.read_state(path, _UID):
        keys += batch.num_rows
        rows += pc.sum(batch.column("n")).as_py()
        length += pc.sum(pc.utf8_length(batch.column("greatest"))).as_py()
    return keys, rows, length


def _spark_added(spark: SparkSession, home: Path) -> Sums:
    frame = spark.read.format("statestore").load(str(home / "spark")).selectExpr("value.*").toDF("n", "greatest")
    return _added(frame, "n", "greatest")
