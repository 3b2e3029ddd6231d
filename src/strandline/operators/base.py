"""The operator: one stateful step as it runs inside a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from strandline.state.changes import ChangeSet
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


class Operator(ABC):
    """Pickled in the driver, opened once per subtask, run once per batch.

    The same batch may be run again (another round); whatever `run` wrote before is then discarded with its change set,
    so an operator keeps nothing between batches but what it can read back from state.
    """

    uid: str
    key_columns: tuple[str, ...]
    output_schema: pa.Schema
    sorted_input: bool
    """Whether the rows of a key must be contiguous (per-key user code), or in any order (vectorised operators)."""

    @abstractmethod
    def open(self, info: SubtaskInfo) -> None:
        """Called once in the slot, before the first batch."""

    @abstractmethod
    def states(self) -> list[StateDescriptor]:
        """The states that the operator declared; known after `open`."""

    @abstractmethod
    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[pa.RecordBatch]:
        """Work through one batch: read and write state through `changes`, yield output in `output_schema`.

        `rows` carry the step's input columns and `KEY_GROUP_COLUMN` (int32). Errors of user code are raised as
        `UserCodeError`, rows that do not fit as `SchemaError`.
        """

    def close(self) -> None:  # noqa: B027  # most operators have nothing to release
        """Called when the slot ends in an orderly way."""
