"""Combining: rows of a key become one row before they travel to the slot.

A combined row holds the partial results of many rows of its key, and how many rows it stands for. A batch may have both
kinds of rows. Design note 032 says what may be combined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

ROWS_COLUMN: Final = "__sl_rows"
"""How many rows a combined row stands for. Record batches with this column hold combined rows, others raw rows."""
LATE_COLUMN: Final = "__sl_late"
"""How many of these rows were late. Late rows have a row without key and results, one for each key group."""
JUDGED_ROWS: Final = 1 << 12
"""A table with fewer rows says nothing about the tables that follow."""


@dataclass(frozen=True, slots=True)
class Combined:
    """What a combiner made of a table."""

    combined: pa.Table | None
    """Rows of the combiner's `schema`, followed by the additional columns; None if there are none."""
    raw: pa.Table | None
    """Rows that are left as they came, with all their columns; None if there are none."""

    @property
    def num_rows(self) -> int:
        """How many rows there are to send."""
        return sum(table.num_rows for table in (self.combined, self.raw) if table is not None)


class Combiner(ABC):
    """Combines rows of one step, in any process: it is pickled with Spark's task and keeps nothing between tables."""

    schema: pa.Schema
    """The columns of combined rows, among them the key columns, the key group and `ROWS_COLUMN`."""
    worthwhile: float = 1 / 3
    """Combining pays if at most this share of the rows is left. Design note 032 has the measurement."""

    @abstractmethod
    def combine(self, rows: pa.Table, late_watermark_ms: int | None) -> Combined:
        """Combine raw rows of the batch with this late watermark.

        `rows` has the columns that the step reads, and the key group without nulls. Any other column that is not
        one of the step's input columns is additional, such as the subtask. Its value must follow from the key group.
        It is kept. The same table gives the same rows in the same order.

        Rows that cannot be combined exactly are left raw, and so are rows for which the step will raise an error.
        """


class Combining:
    """Combines the tables of one task as long as it pays."""

    def __init__(self, combiner: Combiner | None, late_watermark_ms: int | None) -> None:
        """Once a table is left with more rows than the combiner finds worthwhile, no further table is combined."""
        self._combiner = combiner
        self._late_watermark_ms = late_watermark_ms

    @property
    def pays(self) -> bool:
        """Whether the next table will be combined. If not, there is no use in gathering rows for it."""
        return self._combiner is not None

    def __call__(self, rows: pa.Table) -> Combined:
        """The table, combined if that has paid so far."""
        if self._combiner is None:
            return Combined(None, rows)
        made = self._combiner.combine(rows, self._late_watermark_ms)
        if rows.num_rows >= JUDGED_ROWS and made.num_rows > self._combiner.worthwhile * rows.num_rows:
            self._combiner = None
        return made
