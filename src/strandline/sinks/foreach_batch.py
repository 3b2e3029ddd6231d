"""A sink that hands every batch to a function of the user's, at least once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strandline.sinks.base import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class ForeachBatchSink(Sink):
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
