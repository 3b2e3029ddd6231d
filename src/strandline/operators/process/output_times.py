"""The event time of output rows: a row that the next step would find late is an error of the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import UserCodeError
from strandline.operators.timed.late_rows import up_to


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """Compares a column of output rows with the watermark of the batch before, as Spark does.

    The next step drops a row as late if its time is not after that watermark less `delay_ms`. So it would lose the row.
    """

    column: str
    watermark_ms: int
    delay_ms: int
    where: str
    error_class: str = ""

    def check(self, rows: pa.RecordBatch, key_at: Callable[[int], object]) -> None:
        """Raises `UserCodeError`, with the key, for the first row that is too old. A row without a time is accepted."""
        times = rows.column(self.column)
        old = pc.indices_nonzero(up_to(times, self.watermark_ms - self.delay_ms))
        if not len(old):
            return
        at = old[0].as_py()
        watermark = pa.scalar(self.watermark_ms * 1000, pa.timestamp("us", times.type.tz)).as_py()
        behind = f" less {self.delay_ms} ms, its output delay" if self.delay_ms else ""
        raise UserCodeError(
            f"{self.error_class}{self.where}, key {key_at(at)}: the processor yielded a row with {self.column} = "
            f"{times[at].as_py()}. The watermark is at {watermark}, and an output row must be after the watermark"
            f"{behind}: the next step would drop the row as late. Yield rows with later times, or declare with "
            "output_delay= how far behind the watermark they may be."
        )
