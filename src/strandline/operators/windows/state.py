"""The two sides of a window operator: one reads rows and writes results, the other keeps the windows' state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.operators.aggregate.aggregates import AggregatePlan
from strandline.operators.base import BatchInfo
from strandline.state.batch.changes import ChangeSet
from strandline.state.descriptors import StateDescriptor

Int64s = npt.NDArray[np.int64]
Emit = Literal["close", "update"]

TIME_COLUMN: Final = "__sl_time"
"""The event time of a row in microseconds."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """What a window operator was made of, checked."""

    where: str
    plan: AggregatePlan
    struct: StructType
    key_columns: Sequence[str]
    lateness_ms: int
    emit: Emit


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Windows to be emitted: their keys, their times in microseconds, and their accumulators."""

    keys: list[Any]
    starts: Int64s
    ends: Int64s
    states: pa.RecordBatch


class WindowBatch(ABC):
    """The windows of one subtask during one batch: rows are added, then what is to be emitted is asked for."""

    @abstractmethod
    def add(self, rows: pa.Table) -> None:
        """Take rows that are not late: the input columns, the key group and `TIME_COLUMN`."""

    @abstractmethod
    def finish(self) -> Iterator[WindowRows]:
        """Put all rows into state, emit what is due or changed, and drop what is over."""


class WindowState(ABC):
    """The windows of one subtask."""

    next_timer_ms: int | None = None

    @abstractmethod
    def open(self, where: str, key_groups: range) -> None:
        """Called once in the slot."""

    @abstractmethod
    def states(self) -> list[StateDescriptor]:
        """The states that it keeps."""

    @abstractmethod
    def late(self, times: Int64s, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """Whether all windows of a row with one of these times (microseconds) were over at `watermark_ms`."""

    @abstractmethod
    def begin(self, changes: ChangeSet, batch: BatchInfo) -> WindowBatch:
        """Get ready for a batch."""
