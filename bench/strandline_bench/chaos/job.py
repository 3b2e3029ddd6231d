"""The small job of all trials: counts and sums per key, one input file a batch; and the result that it must have."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import strandline as sl
from strandline_bench.chaos.plan import HEARTBEAT, Variant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOB: Final = "trial"
SCHEMA: Final = "key string, x long"
OUTPUT: Final = "key string, n long, s long"
KEYS: Final = 12
ROWS: Final = 30
FIRST_FILE_NS: Final = 1_700_000_000_000_000_000

Row = tuple[Any, ...]


class Sum(sl.KeyedProcessor):
    """Counts and sums per key, in a value state; the last rows in a list state."""

    def open(self, context: Any) -> None:
        """Declares the states."""
        self.total = context.value_state("total", "n long, s long")
        self.last = context.map_state("last", "x long", "times long")

    def process(self, key: Any, rows: Any, context: Any) -> Iterator[Row]:
        """Yields the new count and sum."""
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
            self.last.put(row.x % 5, n)
        self.total.update((n, s))
        yield (*key, n, s)


class Place:
    """The folders of one trial, its input, its job and its output."""

    def __init__(self, folder: Path, seed: int, variant: Variant) -> None:
        self.folder = folder
        self.variant = variant
        self.seed = seed
        self.input, self.output, self.local = folder / "in", folder / "out", folder / "local"
        self.checkpoints, self.savepoints, self.spark = folder / "ckpt", folder / "save", folder / "spark"
        for one in (self.input, self.output, self.spark, self.savepoints):
            one.mkdir(parents=True, exist_ok=True)

    # --- input and output ------------------------------------------------------------------------

    def rows_of(self, number: int) -> list[tuple[str, int]]:
        """The rows of input file `number`; the seed decides."""
        chance = random.Random(f"{self.seed}-{number}")
        return [(f"k{chance.randrange(KEYS)}", chance.randrange(1000)) for _ in range(ROWS)]

    def files(self) -> int:
        """How many input files there are."""
        return len(list(self.input.glob("[!.]*.parquet")))

    def write(self, count: int) -> None:
        """Write the next `count` input files. Spark reads one after the other, by their times."""
        for number in range(self.files(), self.files() + count):
            rows = self.rows_of(number)
            table = pa.table({"key": [key for key, _ in rows], "x": pa.array([x for _, x in rows], pa.int64())})
            hidden = self.input / f".{number:05d}.parquet"
            pq.write_table(table, hidden)
            at = FIRST_FILE_NS + number * 1_000_000_000
            os.utime(hidden, ns=(at, at))
            hidden.rename(self.input / f"{number:05d}.parquet")

    def flush(self) -> None:
        """Wait until everybody sees the input."""

    def expected(self) -> Counter[Row]:
        """What a batch computation gives, in plain Python: one row per key and input file."""
        state: dict[str, tuple[int, int]] = {}
        found: Counter[Row] = Counter()
        for number in range(self.files()):
            rows = self.rows_of(number)
            for key, x in rows:
                n, s = state.get(key, (0, 0))
                state[key] = (n + 1, s + x)
            found.update((key, *state[key]) for key in {key for key, _ in rows})
        return found

    def found(self) -> Counter[Row]:
        """What a plain reader sees."""
        if self.variant.sink == "foreach":
            return Counter(self._appended())
        tables = [pq.read_table(file, partitioning=None) for file in self.output.glob("[!._]*.parquet")]
        return Counter(tuple(row.values()) for table in tables for row in table.to_pylist())

    def _appended(self) -> Iterator[Row]:
        for file in self.output.glob("*.jsonl"):
            yield from (tuple(row) for row in json.loads(file.read_text()))

    def age_local_files(self) -> None:
        """Let an hour pass for local files: the next task manager may delete those of runs that died."""
        for lock in self.local.glob(f"*/{JOB}/*/alive.lock"):
            with suppress(FileNotFoundError):  # its run has just ended
                os.utime(lock, (time.time() - 3600.0,) * 2)

    # --- the job ---------------------------------------------------------------------------------

    def config(self, faults: dict[str, str], **options: Any) -> sl.Config:
        """Options that make much happen in little time, with faults of the storage."""
        loose = self.variant.story in ("plain", "rescale", "back")
        defaults: dict[str, Any] = {
            "checkpoint_interval": "300ms",
            "parallelism": 2,
            "max_parallelism": 8,
            "restart_delay": "50ms",
            "heartbeat_timeout": HEARTBEAT,
            "num_retained": 2,
            "state_memory": "64mb",
            "changelog": self.variant.changelog,
            "materialization_interval": "1s",
            # Tiny state fits into `_metadata` and into packed files: in half of the stories it must not.
            "inline_threshold": 0 if loose else "20kb",
            "small_file_threshold": 0 if loose else "1mb",
            "local_recovery": self.variant.story in ("savepoint", "each-batch"),
            "checkpoint_every_batch": self.variant.story == "each-batch",
            "local_dir": str(self.local),
            "spark_checkpoint_dir": str(self.spark),
            "storage_options": faults,
        }
        return sl.Config(checkpoint_dir=f"faulty+file://{self.checkpoints}", **{**defaults, **options})

    def job(self, spark: SparkSession, config: sl.Config) -> sl.Job:
        """The job, not started."""
        job = sl.Job(JOB, spark, config)
        frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.input))
        result = job.source(frame).key_by("key").process(Sum(), OUTPUT, uid="sums")
        if self.variant.sink == "parquet":
            result.sink(sl.ParquetSink(f"faulty+file://{self.output}"))
        else:
            result.sink(sl.ForeachBatchSink(self._append))
        return job

    def _append(self, rows: DataFrame, _batch: int) -> None:
        """Write the rows of a batch into a new file, which appears at once."""
        found = [list(row) for row in rows.collect()]
        name = os.urandom(8).hex()
        (self.output / f".{name}").write_text(json.dumps(found))
        (self.output / f".{name}").rename(self.output / f"{name}.jsonl")
