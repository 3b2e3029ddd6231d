"""A slot in miniature: an operator over a backend, batch by batch, with or without commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.backends.base import StateBackend
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.floats import canonical_floats


def checked_rows(operator: Operator, out: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The rows of an operator's output, which must be valid and have its schema."""
    assert out.schema.equals(operator.output_schema)
    out.validate(full=True)
    return [tuple(row.values()) for row in out.to_pylist()]


def checked_times(operator: Operator, out: pa.RecordBatch, late_ms: int | None) -> None:
    """Checks that no row of the output is late for a next step, whatever time column that step reads."""
    for column, lag in operator.time_columns.items():
        times = out.column(column).cast(pa.int64()).drop_null().to_pylist()
        assert late_ms is None or all(time > 1000 * (late_ms - lag) for time in times)


class MiniSlot:
    """Runs batches of one operator and commits them."""

    def __init__(self, operator: Operator, spill: Path) -> None:
        self.operator = operator
        self.backend: StateBackend = HeapBackend()
        self.batch_id = 0
        self._spill = spill
        operator.open(SubtaskInfo("job", operator.uid, 3, 4, 128))

    def batches(self, rows: Sequence[tuple[Any, ...]], cuts: Sequence[int] = ()) -> Iterator[pa.RecordBatch]:
        """`rows` as record batches, cut at `cuts`; the key group is a function of the key."""
        struct = self.operator.input_struct
        schema = arrow_schema(struct).append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        places = [struct.fieldNames().index(name) for name in self.operator.key_columns]
        full = [(*row, key_group(tuple(row[at] for at in places))) for row in rows]
        edges = sorted({0, len(rows), *(cut for cut in cuts if cut <= len(rows))})
        for begin, end in pairwise(edges):
            part = full[begin:end]
            columns = [pa.array([row[at] for row in part], field.type) for at, field in enumerate(schema)]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names)

    def run(
        self, rows: Sequence[tuple[Any, ...]] | Iterator[pa.RecordBatch], cuts: Sequence[int] = (), commit: bool = True
    ) -> list[tuple[Any, ...]]:
        """Run one batch; gives the output rows."""
        incoming = self.batches(rows, cuts) if isinstance(rows, Sequence) else rows
        changes = ChangeSet(self.backend, 1 << 20, self._spill)
        self.batch_id += 1
        made: list[tuple[Any, ...]] = []
        for out in self.operator.run(incoming, changes, BatchInfo(self.batch_id, 1234, 99)):
            made += checked_rows(self.operator, out)
        if commit:
            for keys, values in changes.chunks():
                self.backend.apply(keys, values)
        changes.discard()
        return made


def key_group(key: tuple[Any, ...]) -> int:
    """Any function of the key that does not tell apart what Spark does not."""
    return len(str(canonical_floats(key))) % 128
