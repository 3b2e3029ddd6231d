"""A job with much state that is restored repeatedly; the benchmarks of restoring share it.

The state is a value state per key, loaded once, each key in one row. Then rows of some of the keys come, and every
count must go on from what was restored; so a benchmark proves that nothing was lost or doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

import strandline as sl
from strandline_bench.growth import Keep
from strandline_bench.timing import Say, watched
from strandline_bench.workload import SCHEMA, InputFile, Workload, WrongResultError, offer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOAD_ROWS = 250_000
CHANGED_ROWS = 20_000


class LoadedJob:
    """The job, its input and its output."""

    def __init__(self, spark: SparkSession, home: Path, keys: int, value_bytes: int, config: sl.Config) -> None:
        self.spark = spark
        self.config = config
        self.keys = keys
        self._home = home
        self._workload = Workload(home / "files", keys, value_bytes)
        self._rows_of_key = np.zeros(keys, np.int64)
        self._total = 0

    def job(self, **options: Any) -> sl.Job:
        """The job, with some options changed."""
        job = sl.Job("restoring", self.spark, self.config.replace(**options))
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        (self._home / "in").mkdir(exist_ok=True)
        needed = job.source(reader.parquet(str(self._home / "in"))).transform(
            lambda frame: frame.select("key", "value")
        )
        result = needed.key_by("key").process(Keep(), "new long, total long", rows="arrow")
        result.sink(sl.ParquetSink(str(self._home / "out")))
        return job

    def files(self) -> list[InputFile]:
        """Input with one row of every key."""
        order = np.random.default_rng(11).permutation(self.keys)
        step = min(LOAD_ROWS, -(-self.keys // 2))
        return [self._of(order[at : at + step]) for at in range(0, self.keys, step)]

    def load(self, run: sl.JobRun, files: Sequence[InputFile], say: Say) -> None:
        """Let the run process one row of every key."""
        offer(files, self._home / "in")
        with watched(self.spark.streams.active[0], f"loading {self.keys:,} keys", files, say):
            run.process_all_available()

    def change(self, run: sl.JobRun) -> None:
        """Let the run count some keys once more, and check all its counts."""
        chosen = np.random.default_rng(self._total).choice(self.keys, min(CHANGED_ROWS, self.keys), replace=False)
        offer([self._of(chosen)], self._home / "in")
        run.process_all_available()
        self.check()

    def check(self) -> None:
        """Check that every key was new once and every count continued the one in state. Raises `WrongResultError`."""
        found = ds.dataset(self._home / "out", format="parquet").to_table()
        new, total = (pc.sum(found.column(name)).as_py() for name in ("new", "total"))
        if (new, total) != (self.keys, self._total):
            raise WrongResultError(
                f"{new} of {self.keys} keys were new to the state, and the counts add up to {total}, not to "
                f"{self._total}"
            )

    def _of(self, keys: np.ndarray[Any, np.dtype[np.int64]]) -> InputFile:
        self._rows_of_key[keys] += 1
        self._total += int(self._rows_of_key[keys].sum())
        return self._workload.of_keys(keys)


def restore_figures(run: sl.JobRun) -> dict[str, float]:
    """The time that a run needed to restore its state."""
    return {name: round(value, 1) for name, value in run.figures().restore.as_dict().items()}
