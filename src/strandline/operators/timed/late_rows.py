"""Late rows: the words of `late=`, and how late rows are split off before user code sees a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import JobDefinitionError

DROP: Final = "drop"
KEEP: Final = "keep"


def late_side(late: str) -> str | None:
    """The name of the side output that takes late rows; None if they are dropped or kept."""
    return None if late in (DROP, KEEP) else late


def check_late(late: object, where: str, why_not_keep: str | None = None) -> None:
    """Raise `JobDefinitionError` if `late` is no word for late rows.

    A step that cannot use late rows says in `why_not_keep` why it cannot, and what to do instead.
    """
    if not isinstance(late, str) or not late:
        words = "'drop'" if why_not_keep else "'drop', 'keep'"
        raise JobDefinitionError(f"{where}: late={late!r} is not valid; use {words} or the name of a side output")
    if late == KEEP and why_not_keep is not None:
        raise JobDefinitionError(f"{where}: late='keep' is not possible here: {why_not_keep}")


def without_late(
    batches: Iterator[pa.RecordBatch], column: str, watermark_ms: int, take: Callable[[pa.RecordBatch], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows after the watermark, and pass the rows at or before it to `take`.

    A row whose time is null is never late.
    """
    for rows in batches:
        late = up_to(rows.column(column), watermark_ms)
        if pc.any(late).as_py():
            take(rows.filter(late))
            rows = rows.filter(pc.invert(late))
        yield rows


def up_to(times: pa.Array, watermark_ms: int) -> pa.BooleanArray:
    """Which of the timestamps are at or before the watermark; a null is not."""
    micros = times.cast(pa.timestamp("us", times.type.tz), safe=False).view(pa.int64())
    return pc.fill_null(pc.less_equal(micros, watermark_ms * 1000), False)
