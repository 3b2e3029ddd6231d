"""What every benchmark of a whole job needs: a Spark session, and the checkpoints that a run completed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import strandline as sl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session(parallelism: int, batches: int, jars: Sequence[Path] = ()) -> SparkSession:
    """A local Spark session that keeps the progress reports of at least so many batches, with these jars."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local[{parallelism}]")
        .appName("strandline-bench")
        .config("spark.driver.memory", "3g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.sql.shuffle.partitions", parallelism)
        .config("spark.sql.streaming.numRecentProgressUpdates", batches + 1000)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def completed(run: sl.JobRun) -> list[sl.CheckpointStats]:
    """The completed checkpoints of a run, oldest first."""
    return [checkpoint for checkpoint in run.checkpoints() if checkpoint.status == "completed"]


def end_of(checkpoint: sl.CheckpointStats) -> float:
    """When a checkpoint was completed, in seconds since the epoch."""
    return checkpoint.trigger_time + checkpoint.end_to_end_ms / 1000
