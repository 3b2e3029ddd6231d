"""The operator: one stateful step as it runs inside a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from strandline.state.batch.changes import ChangeSet
    from strandline.state.descriptors import StateDescriptor

KEY_GROUP_COLUMN = "__sl_key_group"
SUBTASK_COLUMN = "__sl_subtask"


@dataclass(frozen=True, slots=True)
class SubtaskInfo:
    """Where an operator runs."""

    job: str
    uid: str
    subtask: int
    parallelism: int
    max_parallelism: int


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What an operator may know of the batch it works on."""

    batch_id: int
    processing_time_ms: int
    watermark_ms: int | None = None
    """Event-time timers and windows up to here are due in this batch, after its rows; None without event time.

    It follows from the rows of earlier batches alone, so it is the same for every subtask and every retry.
    """
    late_watermark_ms: int | None = None
    """The watermark of the batch before: what it covers was dealt with there, so a row that belongs there is late."""


@dataclass(frozen=True, slots=True)
class SideRows:
    """Rows for one of an operator's side outputs, in the schema that `side_outputs` names."""

    name: str
    rows: pa.RecordBatch


Output: TypeAlias = pa.RecordBatch | SideRows
TimeMode = Literal["none", "processing", "event"]
TIME_MODES: Mapping[str, TimeMode] = {
    "none": "none",
    "processing": "processing",
    "processingtime": "processing",
    "event": "event",
    "eventtime": "event",
}
"""How users write a time mode, in small letters: our names and Spark's."""


class Operator(ABC):
    """Pickled in the driver, opened once per subtask, run once per batch.

    The same batch may be run again (another round); whatever `run` wrote before is then discarded with its change set,
    so an operator keeps nothing between batches but what it can read back from state.
    """

    uid: str
    key_columns: tuple[str, ...]
    input_struct: StructType
    """The step's input columns; of these it may read only some."""
    output_schema: pa.Schema
    sorted_input: bool
    """Whether the rows of a key must be contiguous (per-key user code), or in any order (vectorised operators)."""
    time_mode: TimeMode = "none"
    """Which clock the operator needs: the job then has batches without rows when `next_timer_ms` is due."""
    side_outputs: Mapping[str, StructType] = MappingProxyType({})
    """The schemas of rows that do not belong to the main output, by name."""
    next_timer_ms: int | None = None
    """After `run`: the earliest time, on the operator's clock, at which it has something to do without rows."""
    late_rows: int = 0
    """How many rows the last `run` found late."""
    deleted_states: frozenset[str] = frozenset()
    """States of earlier versions that user code itself wants gone; known after `check`."""

    @abstractmethod
    def open(self, info: SubtaskInfo) -> None:
        """Called once in the slot, before the first batch."""

    @abstractmethod
    def states(self) -> list[StateDescriptor]:
        """The states that the operator declared; known after `open`."""

    def check(self) -> list[StateDescriptor]:
        """The states that it will declare, found in the driver before anything runs; raises what is wrong with them."""
        return self.states()

    @abstractmethod
    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Work through one batch: read and write state through `changes`, yield `output_schema` rows or `SideRows`.

        `rows` carry the step's input columns and `KEY_GROUP_COLUMN` (int32). Errors of user code are raised as
        `UserCodeError`, rows that do not fit as `SchemaError`.
        """

    def run_initial(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Make state of rows that the user gave for the beginning of the job; once, before the first batch."""
        raise NotImplementedError(f"operator {self.uid!r} takes no initial state")

    def close(self) -> None:  # noqa: B027  # most operators have nothing to release
        """Called when the slot ends in an orderly way."""
