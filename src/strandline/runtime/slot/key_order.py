"""Puts the rows of equal keys next to each other, as per-key user code needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from strandline.errors import SchemaError
from strandline.operators.base import KEY_GROUP_COLUMN, Operator
from strandline.operators.columns.schemas import arrow_schema, fitted
from strandline.runtime.slot.kept_rows import KeptRows
from strandline.state.coding.keys import KeyEncoder

OUTPUT_ROWS = 32_768
"""Rows of the batches that come out."""
_MOST_BYTES = (1 << 31) - (1 << 20)
"""An Arrow column of texts holds less than 2 GiB."""


def in_key_order(
    kept: Sequence[KeptRows], operator: Operator, groups: range, memory_limit: int
) -> Iterator[pa.RecordBatch]:
    """The rows in the order of stored keys, which is also the order in which the state is read fastest.

    Rows of one key keep their order. If there are more than `memory_limit` bytes, or more than a column can hold, a few
    key groups are taken at a time, and the rows are read as often. Raises `SchemaError` if the rows of one key group do
    not fit into a column.
    """
    size = sum(rows.size for rows in kept)
    limit = min(memory_limit, _MOST_BYTES // 2)  # half: the sizes of parts are estimated
    if size <= limit:
        yield from _sorted([batch for rows in kept for batch in rows.batches()], operator)
        return
    for some in _parts(kept, groups, size, limit):
        found = []
        for batch in (batch for rows in kept for batch in rows.batches()):
            of_row = batch.column(KEY_GROUP_COLUMN).to_numpy(zero_copy_only=False)
            found.append(batch.filter(pa.array((of_row >= some.start) & (of_row < some.stop))))
        yield from _sorted(found, operator)


def _parts(kept: Sequence[KeptRows], groups: range, size: int, limit: int) -> Iterator[range]:
    """Ranges of key groups whose rows take about `limit` bytes at most."""
    counts = np.zeros(groups.stop, np.int64)
    for batch in (batch for rows in kept for batch in rows.batches()):
        counts += np.bincount(batch.column(KEY_GROUP_COLUMN).to_numpy(zero_copy_only=False), minlength=groups.stop)
    each = size / max(1, int(counts.sum()))
    first, held = groups.start, 0.0
    for group in groups:
        more = float(counts[group]) * each
        if held and held + more > limit:
            yield range(first, group)
            first, held = group, 0.0
        held += more
    yield range(first, groups.stop)


def _sorted(batches: list[pa.RecordBatch], operator: Operator) -> Iterator[pa.RecordBatch]:
    size = sum(batch.nbytes for batch in batches)
    if size > _MOST_BYTES:
        raise SchemaError(
            f"operator {operator.uid}: one batch has {size:,} bytes of rows with the same key group, and a slot sorts "
            "at most 2 GiB of them at once; bound the batches of the source (maxFilesPerTrigger, maxOffsetsPerTrigger) "
            "or let Spark sort them with Config(shuffle='spark')"
        )
    if not batches:
        return
    rows = pa.concat_batches(_of_one_schema(batches, operator))
    order = KeyEncoder(rows.schema, operator.key_columns, KEY_GROUP_COLUMN).encode(rows).order()
    for first in range(0, rows.num_rows, OUTPUT_ROWS):
        yield rows.take(pa.array(order[first : first + OUTPUT_ROWS]))


def _of_one_schema(batches: list[pa.RecordBatch], operator: Operator) -> list[pa.RecordBatch]:
    """The same rows. Those of another step and those of Spark may differ in time zones, and in what may be null."""
    first = batches[0].schema
    if all(batch.schema.equals(first) for batch in batches):
        return batches
    declared = arrow_schema(operator.input_struct)
    types = {field.name: field.type for field in (*first, *declared)}
    common = pa.schema([(name, types[name]) for name in first.names])
    return [fitted(batch, common, f"operator {operator.uid}") for batch in batches]
