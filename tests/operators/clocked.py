"""A slot in miniature that has clocks, repeats batches under the same number, and reopens its operator."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strandline.operators.base import BatchInfo, Operator, SideRows, SubtaskInfo
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.batch.changes import ChangeSet
from tests.operators.mini_slot import MiniSlot, checked_rows, checked_times

INFO = SubtaskInfo("job", "step", 0, 1, 128)


class ClockedSlot(MiniSlot):
    """Runs batches with a watermark and a processing time; a batch that is not committed is run again by the next."""

    def __init__(self, operator: Operator, spill: Path) -> None:
        self._sent = pickle.dumps(operator)
        super().__init__(operator, spill)
        self.late: int | None = None
        self.sides: dict[str, list[tuple[Any, ...]]] = {}
        """The rows that the last batch sent to each side output."""
        self.memory = 1 << 20
        self.reopen()

    def reopen(self) -> None:
        """A restart: a new operator object over the same stored state."""
        self.operator = pickle.loads(self._sent)
        self.operator.open(INFO)

    def at(
        self,
        rows: Sequence[tuple[Any, ...]] = (),
        watermark: int | None = None,
        now: int = 0,
        commit: bool = True,
        cuts: Sequence[int] = (),
    ) -> list[tuple[Any, ...]]:
        """Run one batch at the given times; gives the output rows."""
        changes = ChangeSet(self.backend, self.memory, self._spill)
        batch = BatchInfo(self.batch_id, now, watermark, self.late)
        made: list[tuple[Any, ...]] = []
        self.sides = {name: [] for name in self.operator.side_outputs}
        for out in self.operator.run(self.batches(rows, cuts), changes, batch):
            if isinstance(out, SideRows):
                assert out.rows.schema.equals(arrow_schema(self.operator.side_outputs[out.name]))
                self.sides[out.name] += (tuple(row.values()) for row in out.rows.to_pylist())
                continue
            checked_times(self.operator, out, self.late)
            made += checked_rows(self.operator, out)
        if commit:
            for keys, values in changes.chunks():
                self.backend.apply(keys, values)
            self.late = watermark
            self.batch_id += 1
        changes.discard()
        return made

    def entries(self) -> int:
        """How many entries the state has."""
        return sum(1 for _ in self.backend.scan(b""))
