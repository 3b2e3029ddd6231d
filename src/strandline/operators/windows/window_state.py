"""The interface between the window operator, which reads rows and writes results, and the state of its windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.base import BatchInfo
from strandline.operators.windows.limits import WindowLimits
from strandline.state.batch.changes import ChangeSet
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp

Int64s = npt.NDArray[np.int64]
Emit = Literal["close", "update"]

TIME_COLUMN: Final = "__sl_time"
"""The event time of a row in microseconds."""
PANE: Final = "__sl_pane"
"""The start of a pane in milliseconds."""
START: Final = "__sl_start"
LAST: Final = "__sl_last"
"""The times of the first and the last row of a session in microseconds."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """The checked arguments of a window operator."""

    where: str
    plan: AggregatePlan
    struct: StructType
    key_columns: Sequence[str]
    lateness_ms: int
    emit: Emit
    limits: WindowLimits


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Windows to emit: their keys, their times in microseconds, and their accumulators."""

    keys: list[Any]
    starts: Int64s
    ends: Int64s
    states: pa.RecordBatch


class WindowBatch(ABC):
    """The windows of one subtask during one batch: `add` is called with rows, then `finish` once."""

    @abstractmethod
    def add(self, rows: pa.Table) -> None:
        """Add rows that are not late, with the input columns, the key group and `TIME_COLUMN`."""

    @abstractmethod
    def add_combined(self, rows: pa.Table) -> None:
        """Add rows that are not late and that the step's combiner has combined."""

    @abstractmethod
    def finish(self) -> Iterator[WindowRows]:
        """Merge all rows into state, yield the windows that are due or changed, and delete those that are over."""


class WindowState(ABC):
    """The windows of one subtask."""

    next_timer_ms: int | None = None
    place: ClassVar[str]
    """The column of combined rows that places them in time; null where the rows belong to no window."""
    place_us: ClassVar[int]
    """The unit of this column in microseconds."""

    @abstractmethod
    def open(self, where: str, key_groups: range) -> None:
        """Called once in the slot."""

    @abstractmethod
    def states(self) -> list[StateDescriptor]:
        """The states that hold the windows."""

    @abstractmethod
    def look_up(self, look: LookUp) -> WindowRows | None:
        """The windows that are kept for one key, without key columns; None if there is none."""

    @abstractmethod
    def late(self, times: Int64s, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """For each row time (microseconds), whether all windows of the row were over at `watermark_ms`."""

    @abstractmethod
    def begin(self, changes: ChangeSet, batch: BatchInfo) -> WindowBatch:
        """Start a batch."""
