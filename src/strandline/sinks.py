"""Sinks: where a job writes the rows of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


VERSION_COLUMNS = ("_batch", "_position")
"""The columns that `ParquetSink.version_columns` adds to every row."""


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """Writes rows exactly once into a folder of Parquet files that any reader can read.

    Rows become visible when the checkpoint that covers them completes: never earlier, and never twice.
    """

    path: str
    """A local folder, or a URL: `s3://`, `gs://`, `az://` or `hdfs://`. The folder must be empty or hold earlier output
    of this job, and no other job may write there; else `Job.start` raises `DirectoryNotOursError`."""
    compression: Literal["snappy", "zstd", "lz4", "gzip", "none"] = "snappy"
    """The compression inside the Parquet files."""
    version_columns: bool = False
    """Adds the columns `_batch` and `_position` (both `long`) to every row, so that a reader can tell which row of a
    key is the newest: the one with the greatest `_batch`, and among those the greatest `_position`. The rows of one key
    come from one subtask, and their positions have the order in which the step emitted them."""

    @property
    def added_columns(self) -> tuple[str, ...]:
        """The columns that the files have and the stream has not."""
        return VERSION_COLUMNS if self.version_columns else ()


@dataclass(frozen=True, slots=True)
class ForeachBatchSink:
    """Calls `function(rows, batch_id)` for every batch, so that any DataFrame writer can write the rows at least once.

    A batch may come again. If its first attempt failed, it has the same id, and the same rows as far as the job gives
    the same output for the same rows in any order. After a restore it has a new id, and the rows may be grouped into
    other batches. The function may evaluate `rows` once, several times, in part or not at all: every evaluation inside
    one call gives the same rows, and the state advances once.

    If the function raises an exception, the restart strategy of the job decides, and the error is a `SinkError`. Some
    exceptions would come again and end the run at once: `PermissionError` as a `StorageRefusedError`; as a
    `UserCodeError` those that say that the code is wrong (`AssertionError`, `AttributeError`, `ImportError`,
    `LookupError`, `NameError`, `NotImplementedError`, `SyntaxError`, `TypeError`, Spark's `AnalysisException`), and
    what is no `Exception`, such as `SystemExit`.
    """

    function: Callable[[DataFrame, int], None]
    """Called in the driver with the rows of a batch as a DataFrame and the id of the batch."""


Sink = ParquetSink | ForeachBatchSink
"""Any sink that `Stream.sink` takes."""
