"""Where the rows of a stream go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """Exactly once, into a folder of Parquet files that any reader can read.

    Rows appear when the checkpoint that covers them completes, never before and never twice. `path` is a local folder
    or a URL of an object store (`s3://`, `gs://`, `az://`); it must be empty, or hold this job's earlier output.
    """

    path: str
    compression: Literal["snappy", "zstd", "lz4", "gzip", "none"] = "snappy"


@dataclass(frozen=True, slots=True)
class ForeachBatchSink:
    """At least once, through any DataFrame writer: `function(rows, batch_id)` is called for every batch.

    A batch may come again, with the same id and the same rows after a retry, or with a new id and the rows regrouped
    after a restore. The function may evaluate `rows` not at all, in part or many times: every evaluation sees the same
    rows, and state advances once.
    """

    function: Callable[[DataFrame, int], None]


Sink = ParquetSink | ForeachBatchSink
"""Any sink that `Stream.sink` takes."""
