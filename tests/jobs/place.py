"""The job that most tests run, its folders, and the result that it must have."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
CONNECTOR = REPOSITORY / ".tools" / "spark-kafka"
"""Where scripts/get_kafka.sh puts the jars of Spark's connector to Kafka."""

SCHEMA = "user string, x long"
MILLISECOND = 1_000_000

Batch = Sequence[tuple[str | None, int]]
"""The rows of one input file: user and x."""


def start_spark() -> SparkSession:
    """A session, with the connector to Kafka where that is installed: it costs the tests without Kafka nothing."""
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.jars", ",".join(str(jar) for jar in CONNECTOR.glob("*.jar")))
        .config("spark.executorEnv.PYTHONPATH", str(REPOSITORY))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


class Sum(sl.KeyedProcessor):
    """Counts and sums per user."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
        self.total.update((n, s))
        yield (*key, n, s)


class Place:
    """The folders of one job in one test, and what lies in them."""

    processor = Sum
    OUTPUT = "user string, n long, s long"

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark
        self.input = root / "in"
        self.output = root / "out"
        self.checkpoints = root / "ckpt"
        self.input.mkdir(exist_ok=True)
        self._written = 0
        self._last = 0

    def write(self, rows: Batch) -> None:
        """One more input file, which appears at once, and which Spark reads after the earlier ones.

        It reads files by the time of their last change, and those of one millisecond in any order.
        """
        self._last = max(time.time_ns(), self._last + MILLISECOND)
        write_input(self.input, f"{self._written:05d}", rows, self._last)
        self._written += 1

    def source(self, per_batch: int = 1) -> DataFrame:
        return self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", per_batch).parquet(str(self.input))

    def config(self, **options: Any) -> sl.Config:
        defaults: dict[str, Any] = {
            "checkpoint_interval": "500ms",
            "parallelism": 2,
            "restart_delay": "100ms",
            # not the default, where jobs of one name, such as those of two tests, clear away each other's dead runs
            "local_dir": str(self.root / "local"),
            "rest_port": "off",
        }
        return sl.Config(checkpoint_dir=str(self.checkpoints), **{**defaults, **options})

    def job(self, **options: Any) -> sl.Job:
        return sl.Job("visits", self.spark, self.config(**options))

    def sums(
        self,
        processor: sl.KeyedProcessor | None = None,
        config: sl.Config | None = None,
        sink: str | None = None,
        **options: Any,
    ) -> sl.Job:
        """The job that most tests run: counts and sums per user."""
        job = sl.Job("visits", self.spark, config or self.config(**options))
        stream = job.source(self.source()).key_by("user").process(processor or Sum(), self.OUTPUT, uid="sums")
        stream.sink(sl.ParquetSink(sink or str(self.output)))
        return job

    def rows(self, folder: Path | None = None) -> list[tuple[Any, ...]]:
        """What a plain reader sees in the output."""
        files = (folder or self.output).glob("[!._]*.parquet")
        tables = [pq.read_table(file, partitioning=None) for file in files]
        return sorted((tuple(row.values()) for table in tables for row in table.to_pylist()), key=repr)


def write_input(folder: Path, name: str, rows: Batch, time_ns: int) -> None:
    table = pa.table(
        {"user": pa.array([user for user, _ in rows], pa.string()), "x": pa.array([x for _, x in rows], pa.int64())}
    )
    pq.write_table(table, folder / f".{name}.parquet")
    os.utime(folder / f".{name}.parquet", ns=(time_ns, time_ns))
    (folder / f".{name}.parquet").rename(folder / f"{name}.parquet")


def running_sums(batches: Iterable[Batch]) -> list[tuple[Any, ...]]:
    """What `Sum` must have yielded after these batches, one file each: worked out in plain Python."""
    state: dict[str | None, tuple[int, int]] = {}
    expected = []
    for batch in batches:
        touched = {user for user, _ in batch}
        for user, x in batch:
            n, s = state.get(user, (0, 0))
            state[user] = (n + 1, s + x)
        expected += [(user, *state[user]) for user in touched]
    return sorted(expected, key=repr)


def batches(count: int, users: int = 40, rows: int = 300, seed: int = 7) -> list[list[tuple[str | None, int]]]:
    chance = random.Random(seed)
    return [[(f"u{chance.randrange(users)}", chance.randrange(1000)) for _ in range(rows)] for _ in range(count)]


def wait_for_batches(run: sl.JobRun, count: int) -> None:
    wait_until(lambda: run.figures().batches == count, what=f"batch {count}")
