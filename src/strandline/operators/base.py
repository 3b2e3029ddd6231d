"""The operator interface: one stateful step as it runs inside a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa

from strandline.errors import StrandlineError
from strandline.state.handles.look_up import declared, declared_content
from strandline.state.handles.query import nothing_in

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from strandline.checkpoint.steps import StepDescription
    from strandline.operators.combining import Combiner
    from strandline.operators.rewrite import Rewrite
    from strandline.operators.step_change import StepChange
    from strandline.state.batch.changes import ChangeSet
    from strandline.state.descriptors import StateDescriptor
    from strandline.state.handles.look_up import LookUp
    from strandline.state.handles.query import Found

KEY_GROUP_COLUMN = "__sl_key_group"
SUBTASK_COLUMN = "__sl_subtask"


@dataclass(frozen=True, slots=True)
class SubtaskInfo:
    """Which subtask of which operator this is."""

    job: str
    uid: str
    subtask: int
    parallelism: int
    max_parallelism: int

    @property
    def where(self) -> str:
        """How errors name the subtask."""
        return f"operator {self.uid!r}, subtask {self.subtask}"


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The batch that an operator works on, and its times."""

    batch_id: int
    processing_time_ms: int
    watermark_ms: int | None = None
    """Event-time timers and windows up to this time are due in this batch, after its rows; None without event time.

    It depends on the rows of earlier batches only, so it is the same for every subtask and every retry.
    """
    late_watermark_ms: int | None = None
    """The watermark of the batch before. A row at or before it is late: that batch closed the row's windows."""


@dataclass(frozen=True, slots=True)
class SideRows:
    """Rows for one of an operator's side outputs, in the schema that `Operator.side_outputs` gives."""

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
"""The accepted spellings of a time mode, in lower case: Strandline's and Spark's."""


class Operator(ABC):
    """A stateful step: pickled in the driver, opened once per subtask, run once per batch.

    A batch may be run again, in another round. The change set of the earlier run is discarded then. So an operator
    keeps nothing between batches that it cannot read back from state.
    """

    uid: str
    key_columns: tuple[str, ...]
    input_struct: StructType
    """The step's input columns. The operator may read only some of them."""
    output_schema: pa.Schema
    sorted_input: bool
    """Whether the rows of a key must be next to each other, as per-key user code needs."""
    time_mode: TimeMode = "none"
    """Which clock the operator needs. With a clock, a batch without rows runs when `next_timer_ms` is due."""
    emits_on_time: bool = True
    """Whether rows may come out when a time is due. Otherwise the operator only forgets then what it does not need."""
    side_outputs: Mapping[str, StructType] = MappingProxyType({})
    """The names of the side outputs, and their schemas."""
    time_columns: Mapping[str, int] = MappingProxyType({})
    """The output columns that carry event time, with their lags in milliseconds.

    The lag says how far rows of later batches may be behind the step's own watermark in that column.
    """
    default_time: str | None = None
    """The time column that the next step reads if the user names none; None if there is no clear choice."""
    unfit_times: Mapping[str, str] = MappingProxyType({})
    """The output columns with times that must not be used as event time, and the reasons."""
    next_timer_ms: int | None = None
    """Set by `run`: the earliest time, by the operator's clock, at which it has something to do without rows."""
    late_rows: int = 0
    """Set by `run`: how many of its rows were late."""
    declared_states: tuple[StateDescriptor, ...] = ()
    """What `check` found when the user declared the step; empty for steps without user code."""
    deleted_states: frozenset[str] = frozenset()
    """Set by `check`: states of earlier versions that user code itself deletes."""

    @abstractmethod
    def open(self, info: SubtaskInfo) -> None:
        """Called once in the slot, before the first batch."""

    @abstractmethod
    def states(self) -> list[StateDescriptor]:
        """The states that the operator declares; complete after `open`."""

    def check(self) -> list[StateDescriptor]:
        """Called in the driver before anything runs: the states that `open` will declare; raises if one is wrong."""
        return self.states()

    @abstractmethod
    def describe(self) -> StepDescription:
        """What a checkpoint stores about the step: what its state depends on, beside the states themselves."""

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """Accept the differences to a step of the same kind in a checkpoint that the step's state allows.

        Called in the driver before the job is taken over, and again in the slots. Returns what must be rewritten of the
        state. Whatever is not accepted is refused. Here that is every difference.
        """
        return ()

    @abstractmethod
    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Process one batch: read and write state through `changes`, yield rows of `output_schema` or `SideRows`.

        `rows` have the step's input columns and `KEY_GROUP_COLUMN` (int32). Some of the record batches may hold rows
        that the step's `combiner` made; the output, the state and the counts are the same. Raises `UserCodeError` if
        user code fails, and `SchemaError` if rows do not fit their schema.
        """

    def combiner(self) -> Combiner | None:
        """What combines rows of the step before they travel to the slot; None if that could change what comes out."""
        return None

    def run_initial(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Build state from the rows that the user gave as initial state; called once, before the first batch."""
        raise NotImplementedError(f"operator {self.uid!r} does not accept an initial state")

    def look_up(self, look: LookUp, state: str | None) -> Found:
        """What the step keeps for one key, in a form for people; None if it keeps nothing.

        A step without user code shows what it is about, and `state` is None. Raises `StrandlineError` for a wrong one.
        """
        return declared_content(look, declared(f"operator {self.uid!r}", self.states(), state))

    def nothing(self, state: str | None) -> Any:
        """What a query gives for a key of which the step keeps nothing."""
        return nothing_in(declared(f"operator {self.uid!r}", self.states(), state))

    def _refuse_state(self, state: str | None) -> None:
        if state is not None:
            raise StrandlineError(
                f"operator {self.uid!r} has no state {state!r}: its states have no names; leave the argument out"
            )

    def close(self) -> None:  # noqa: B027  # most operators have nothing to release
        """Called when the slot ends in an orderly way."""
