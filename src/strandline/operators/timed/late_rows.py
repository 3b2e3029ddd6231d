"""Rows that come after the watermark, taken out before user code sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from strandline.errors import JobDefinitionError


def check_event_time(schema: StructType, column: str, where: str) -> None:
    """Raises `JobDefinitionError` unless `column` is a timestamp of `schema`."""
    if column not in schema.fieldNames():
        raise JobDefinitionError(f"{where}: no column {column!r} for event_time among {', '.join(schema.fieldNames())}")
    kind = schema[column].dataType
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise JobDefinitionError(f"{where}: event_time column {column!r} is {kind.simpleString()}, not a timestamp")


def without_late(
    batches: Iterator[pa.RecordBatch], column: str, watermark_ms: int, take: Callable[[pa.RecordBatch], None]
) -> Iterator[pa.RecordBatch]:
    """The rows after the watermark; those at or before it go to `take`. A row without a time is never late."""
    for rows in batches:
        times = rows.column(column).cast(pa.timestamp("us", rows.column(column).type.tz), safe=False).view(pa.int64())
        late = pc.fill_null(pc.less_equal(times, watermark_ms * 1000), False)
        if pc.any(late).as_py():
            take(rows.filter(late))
            rows = rows.filter(pc.invert(late))
        yield rows
