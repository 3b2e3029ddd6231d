"""A sink that hands rows to a function in the driver as soon as they are computed, at least once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from strandline.sinks.base import Sink


@dataclass(frozen=True, slots=True)
class CallbackSink(Sink):
    """Calls `function(rows, batch_id)` in the driver with the rows of every batch, or of every epoch in real time.

    The call comes when the rows and the state behind them can be committed, and before they are: no checkpoint covers
    rows for which the function has not returned. So it sees every row at least once, without waiting for a checkpoint.
    After a failure rows come again, under a new batch id and perhaps grouped into other batches. A slow function slows
    the job down. Rows that do not come straight from a step pass through Spark on their way.

    The exceptions of the function mean what they mean for a `ForeachBatchSink`.
    """

    function: Callable[[pa.Table, int], None]
    """Called with the rows of a batch, timestamps in UTC, and the id of the batch. Not called without rows."""
