"""A slot in miniature whose batches hold raw rows and combined rows; the rows are cut, combined and mixed at will."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from strandline.errors import StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, BatchInfo, Operator, SideRows, SubtaskInfo
from strandline.operators.columns.schemas import arrow_schema
from strandline.runtime.slot.row_counts import CountedRows
from strandline.runtime.slot.work_clock import WorkClock
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from tests.operators.windows.window_slot import key_group

SUBTASK = SubtaskInfo("job", "w", 3, 4, 16)
KEY_GROUPS = range(12, 16)


@dataclass(frozen=True, slots=True)
class Seen:
    """All that can be seen of a batch. Values are texts, so that NaN equals NaN."""

    output: list[str] = field(default_factory=list)
    late: Counter[str] = field(default_factory=Counter)
    late_rows: int = 0
    rows: int = 0
    of_groups: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """How some rows come to the slot: which ones, in what place, and whether they are combined."""

    rows: slice
    place: float
    combined: bool


def pieces(count: int, cuts: Sequence[int], places: Sequence[float], combined: Sequence[bool]) -> list[Piece]:
    """Rows cut at `cuts`; the n-th piece goes to `places[n]`."""
    edges = sorted({0, count, *(cut for cut in cuts if cut <= count)})
    spans = [slice(begin, end) for begin, end in pairwise(edges)]
    return [Piece(*parts) for parts in zip(spans, places, combined, strict=False)]


class MixedSlot:
    """Runs batches of one operator and commits them."""

    def __init__(self, operator: Operator, spill: Path) -> None:
        self.operator: Operator = pickle.loads(pickle.dumps(operator))
        self.operator.open(SUBTASK)
        combiner = self.operator.combiner()
        assert combiner is not None
        self.combiner = pickle.loads(pickle.dumps(combiner))
        self.backend = HeapBackend()
        self.watermark: int | None = None
        self._batch = 5
        self._spill = spill

    def run(self, rows: Sequence[tuple[Any, ...]], watermark: int | None, cut: Sequence[Piece] | None = None) -> Seen:
        """Run the next batch, in which rows come as `cut` says, or all of them raw."""
        table = raw_table(self.operator, rows)
        batches = [table] if cut is None else self._mixed(table, cut)
        incoming = (batch for part in batches for batch in part.drop_columns([SUBTASK_COLUMN]).to_batches())
        work = WorkClock()
        changes = ChangeSet(self.backend, 1 << 20, self._spill)
        output: list[str] = []
        late: Counter[str] = Counter()
        with work.running():
            counted = CountedRows(incoming, KEY_GROUPS, work)
            try:
                for out in self.operator.run(counted, changes, BatchInfo(self._batch, 0, watermark, self.watermark)):
                    if isinstance(out, SideRows):
                        late.update(map(repr, out.rows.to_pylist()))
                    else:
                        out.validate(full=True)
                        output += map(repr, out.to_pylist())
            except StrandlineError as error:
                changes.discard()
                return Seen(error=f"{type(error).__name__}: {error}")
        for keys, values in changes.chunks():
            self.backend.apply(keys, values)
        changes.discard()
        self._batch += 1
        self.watermark = watermark
        return Seen(output, late, self.operator.late_rows, counted.rows, tuple(counted.of_groups.tolist()))

    def state(self) -> list[tuple[bytes, bytes]]:
        """All entries."""
        return list(self.backend.scan(b""))

    def _mixed(self, table: pa.Table, cut: Sequence[Piece]) -> list[pa.Table]:
        made: list[pa.Table] = []
        for piece in sorted(cut, key=lambda piece: piece.place):
            part = table.slice(piece.rows.start, piece.rows.stop - piece.rows.start)
            if piece.combined:
                some = self.combiner.combine(part, self.watermark)
                made += [rows for rows in (some.raw, some.combined) if rows is not None]
            else:
                made.append(part)
        return made


def raw_table(operator: Operator, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Rows as a relay has them, with key group and subtask."""
    struct = operator.input_struct
    schema = arrow_schema(struct)
    places = [struct.fieldNames().index(name) for name in operator.key_columns]
    groups = [key_group(tuple(row[at] for at in places)) for row in rows]
    columns = [pa.array([row[at] for row in rows], column.type) for at, column in enumerate(schema)]
    named = dict(zip(schema.names, columns, strict=True))
    subtasks = pa.array([group % 2 for group in groups], pa.int32())
    return pa.table(named | {KEY_GROUP_COLUMN: pa.array(groups, pa.int32()), SUBTASK_COLUMN: subtasks})
