"""Late rows: splits them off before user code sees the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc


def without_late(
    batches: Iterator[pa.RecordBatch], column: str, watermark_ms: int, take: Callable[[pa.RecordBatch], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows after the watermark, and pass the rows at or before it to `take`.

    A row whose time is null is never late.
    """
    for rows in batches:
        times = rows.column(column).cast(pa.timestamp("us", rows.column(column).type.tz), safe=False).view(pa.int64())
        late = pc.fill_null(pc.less_equal(times, watermark_ms * 1000), False)
        if pc.any(late).as_py():
            take(rows.filter(late))
            rows = rows.filter(pc.invert(late))
        yield rows
