"""Gathers small Arrow pieces into large ones: a vectorised call costs about the same for ten rows as for a thousand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from strandline.operators.columns.schemas import fitted

GATHER_BYTES: Final = 64 << 20
"""Pieces are not gathered beyond this size, however few rows they have."""


def gathered(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema, limit: int, where: str, bytes_limit: int = GATHER_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of `schema` in record batches of about `limit` rows or about `bytes_limit` bytes."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for incoming in rows:
        part = fitted(incoming, schema, where)
        if part.num_rows == 0:
            continue
        held.append(part)
        count += part.num_rows
        size += part.nbytes
        if count >= limit or size >= bytes_limit:
            yield pa.concat_batches(held)
            held, count, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def contiguous(column: Any) -> Any:
    """The column as one Arrow array; a column of several chunks is copied."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
