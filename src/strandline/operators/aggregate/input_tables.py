"""The input of an aggregation as large tables, with the order of arrival if an aggregate needs it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from strandline.operators.aggregate.collecting import ARRIVAL_COLUMNS
from strandline.operators.aggregate.limits import GroupingLimits
from strandline.operators.columns.gather import gathered


def input_tables(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema, where: str, numbered_in: int | None, limits: GroupingLimits
) -> Iterator[pa.Table]:
    """Yield record batches as larger tables with the columns of `schema`.

    If `numbered_in` is a batch id, two more columns, `ARRIVAL_COLUMNS`, number the rows in the order of arrival.
    """
    row = 0
    for part in gathered(rows, schema, limits.gather_rows, where, limits.gather_bytes):
        table = pa.Table.from_batches([part])
        if numbered_in is not None:
            numbers = np.full(len(table), numbered_in), np.arange(row, row + len(table))
            for name, column in zip(ARRIVAL_COLUMNS, numbers, strict=True):
                table = table.append_column(name, pa.array(column))
            row += len(table)
        yield table
