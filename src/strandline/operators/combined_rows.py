"""Raw and combined rows of one batch: how an operator tells them apart, and how a combiner reads raw ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.schemas import fitted
from strandline.operators.combining import ROWS_COLUMN

Int64s = npt.NDArray[np.int64]


def rows_per_row(batch: pa.RecordBatch) -> Int64s | None:
    """How many rows each row of a record batch stands for; None if each one stands for itself."""
    at = batch.schema.get_field_index(ROWS_COLUMN)
    if at < 0:
        return None
    numbers: Int64s = batch.column(at).to_numpy()
    return numbers


def raw_rows(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema | None, where: str, take: Callable[[pa.Table], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of raw rows, and pass those of combined rows to `take`, with the columns of `schema`.

    Raises `SchemaError` if they do not fit `schema`, and `StrandlineError` if the step's rows cannot be combined.
    """
    for batch in rows:
        if batch.schema.get_field_index(ROWS_COLUMN) < 0:
            yield batch
        elif schema is None:
            raise StrandlineError(
                f"{where}: combined rows came for a step whose rows cannot be combined; this is a bug, please report it"
            )
        elif batch.num_rows:
            columns = fitted(batch, schema, where).columns
            take(pa.table(dict(zip(schema.names, columns, strict=True))))


def input_of(rows: pa.Table, schema: pa.Schema) -> pa.Table | None:
    """The columns of `schema` in its types; None if they do not fit, for then the slot is to raise the error."""
    if any(name not in rows.schema.names for name in schema.names):
        return None
    columns = [contiguous(rows.column(name)) for name in schema.names]
    if columns[-1].null_count:
        return None
    try:
        return pa.Table.from_batches([fitted(pa.RecordBatch.from_arrays(columns, names=schema.names), schema, "")])
    except SchemaError:
        return None


def with_additional(made: pa.Table, rows: pa.Table, known: frozenset[str]) -> pa.Table:
    """`made`, followed by those columns of `rows` that are not among `known`; their values go by the key group."""
    additional = [name for name in rows.schema.names if name not in known]
    if not additional:
        return made
    groups = numbers_of(rows, KEY_GROUP_COLUMN)
    a_row = np.zeros(int(groups.max()) + 1, np.int64)
    a_row[groups] = np.arange(len(groups))
    places = pa.array(a_row[numbers_of(made, KEY_GROUP_COLUMN)])
    for name in additional:
        made = made.append_column(rows.schema.field(name), rows.column(name).take(places))
    return made


def numbers_of(table: Any, name: str) -> npt.NDArray[Any]:
    """A column of numbers without nulls, for numpy."""
    numbers: npt.NDArray[Any] = contiguous(table.column(name)).to_numpy()
    return numbers
