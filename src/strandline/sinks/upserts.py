"""Upserts: a target keeps the last row of every key, instead of all rows.

That needs the order in which the rows of a key were written. The rows of one key come from one subtask of the step
before the sink, in order, if all columns by which that step is keyed are among the key columns of the upsert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import JobDefinitionError
from strandline.sinks.base import SinkContext

Mode = Literal["append", "upsert"]
"""`append` keeps every row; `upsert` keeps the last row of every key."""


def upsert_keys(what: str, mode: str, given: Sequence[str], context: SinkContext) -> tuple[str, ...]:
    """The key columns of a sink; none if it appends. `what` names the sink in messages.

    Raises `JobDefinitionError` if the columns do not exist, or if the rows of a key would not come in order.
    """
    where = f"job {context.job!r}: {what}"
    if mode not in ("append", "upsert"):
        raise JobDefinitionError(f"{where}: mode={mode!r}: use 'append' or 'upsert'")
    if isinstance(given, str):
        raise JobDefinitionError(f"{where}: keys={given!r}: give a list of columns, such as keys=[{given!r}]")
    if mode == "append":
        if given:
            raise JobDefinitionError(f"{where}: keys= is for mode='upsert'; an append keeps every row")
        return ()
    keys = tuple(given) or context.keys
    if not keys:
        raise JobDefinitionError(
            f"{where}: mode='upsert' needs the columns that tell rows apart: these rows do not come straight from a "
            "step, so name the columns with keys=[...]"
        )
    unknown = [key for key in keys if key not in context.schema.names]
    if unknown:
        raise JobDefinitionError(
            f"{where}: keys={list(keys)}: there is no column {unknown[0]!r}; the rows have {context.schema.names}"
        )
    left_out = [key for key in context.keys if key not in keys]
    if left_out:
        raise JobDefinitionError(
            f"{where}: keys={list(keys)} leaves out {left_out[0]!r}, by which the step before is keyed: rows of one "
            f"key would come from several subtasks, in no order. Add it to keys=, or key the step by {list(keys)}."
        )
    return keys


def check_plain_keys(what: str, keys: Sequence[str], context: SinkContext) -> None:
    """Raise `JobDefinitionError` if a key column has a type that `last_rows` cannot compare."""
    for key in keys:
        kind = context.schema.field(key).type
        if pa.types.is_nested(kind):
            raise JobDefinitionError(
                f"job {context.job!r}: {what}: the key column {key!r} is of type {kind}, which cannot be the key of an "
                "upsert; key the step by the values inside"
            )


def last_rows(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of every key, in the order of the table."""
    columns = {key: comparable(table[key]) for key in keys}
    numbered = pa.table({**columns, "__sl_row": pa.array(range(table.num_rows), pa.int64())})
    last = numbered.group_by(list(keys), use_threads=False).aggregate([("__sl_row", "max")])["__sl_row_max"]
    return table.take(last.take(pc.sort_indices(last)))


def comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A key column in which values have the same bits if Spark takes them for the same key: 0.0 and -0.0, all NaN."""
    if not pa.types.is_floating(column.type):
        return column
    zero, nan = (pa.scalar(value, column.type) for value in (0.0, float("nan")))
    return pc.if_else(pc.is_nan(column), nan, pc.add(column, zero))
