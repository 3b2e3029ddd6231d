"""A slot in miniature for operators with event time, whose batches have watermarks; and times as tests write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SideRows, SubtaskInfo
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.backends.base import StateBackend
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.floats import canonical_floats
from tests.operators.mini_slot import checked_rows, checked_times

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SUBTASK = SubtaskInfo("job", "w", 3, 4, 16)


def at(ms: float) -> datetime:
    """A moment, in milliseconds since the epoch."""
    return EPOCH + timedelta(milliseconds=ms)


def window(start: float, end: float) -> tuple[datetime, datetime, datetime]:
    """The columns of a window in an output row: its start, its end and its time."""
    return at(start), at(end), at(end) - timedelta(microseconds=1)


class WindowSlot:
    """Runs batches of a window operator and commits them; knows the watermark of the batch before."""

    def __init__(self, operator: WindowOperator, spill: Path, backend: StateBackend | None = None) -> None:
        self.operator = operator
        self.backend = backend or HeapBackend()
        self.batch_id = 70_000_000_000  # of generation 70: as large as they are in the life of a job
        self.watermark: int | None = None
        self.late: list[tuple[Any, ...]] = []
        self._spill = spill
        operator.open(SUBTASK)

    def reopen(self) -> None:
        """A new operator over the same state."""
        made, arguments = self.operator.__reduce__()
        self.operator = made(*arguments)
        self.operator.open(SUBTASK)

    def run(
        self, rows: Sequence[tuple[Any, ...]], watermark: int | None, cuts: Iterable[int] = (), commit: bool = True
    ) -> list[tuple[Any, ...]]:
        """Run the next batch; gives the output rows. Without commit, the next run is of the same batch again."""
        changes = ChangeSet(self.backend, 1 << 20, self._spill)
        info = BatchInfo(self.batch_id, 0, watermark, self.watermark)
        made: list[tuple[Any, ...]] = []
        self.late = []
        for out in self.operator.run(iter(self._batches(rows, cuts)), changes, info):
            if isinstance(out, SideRows):
                assert out.name == self.operator.late
                self.late += (tuple(row.values()) for row in out.rows.to_pylist())
                continue
            checked_times(self.operator, out, self.watermark)
            made += checked_rows(self.operator, out)
        if commit:
            for keys, values in changes.chunks():
                self.backend.apply(keys, values)
            self.batch_id += 1
            self.watermark = watermark
        changes.discard()
        return made

    def entries(self) -> int:
        """How many entries there are in state."""
        return sum(1 for _ in self.backend.scan(b""))

    def _batches(self, rows: Sequence[tuple[Any, ...]], cuts: Iterable[int]) -> list[pa.RecordBatch]:
        struct = self.operator.input_struct
        schema = arrow_schema(struct).append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        places = [struct.names.index(name) for name in self.operator.key_columns]
        full = [(*row, key_group(tuple(row[place] for place in places))) for row in rows]
        edges = sorted({0, len(rows), *(cut for cut in cuts if cut <= len(rows))})
        made = []
        for begin, end in pairwise(edges):
            part = full[begin:end]
            columns = [pa.array([row[place] for row in part], field.type) for place, field in enumerate(schema)]
            made.append(pa.RecordBatch.from_arrays(columns, names=schema.names))
        return made


def key_group(key: tuple[Any, ...]) -> int:
    """Any function of the key that does not tell apart what Spark does not, within the subtask's range."""
    return 12 + len(str(canonical_floats(key))) % 4
