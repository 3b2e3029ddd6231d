"""What the slots of a generation run, and the checkpoint from which they start."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.restore import overlapping
from strandline.checkpoint.steps import StepDescription
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.protocol.messages import BackendSettings, OperatorSpec, RunInfo, SlotSpec, StorageSettings
from strandline.state.coding.keys import key_group_range

LEAST_SLOT_MEMORY = 16 << 20
"""A slot gets at least this much of its executor's state memory, in bytes."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint from which a slot without local files starts."""

    batch: int = -1
    states: tuple[SubtaskState, ...] = ()
    storage: StorageSettings | None = None
    """Where its files are, if not in the run's own storage."""
    owned: bool = True
    """Whether it is the job's own, so that the next checkpoint may refer to its files."""
    checkpoint: int = 0
    """Its id."""
    steps: tuple[StepDescription, ...] = ()
    """The steps as it describes them; empty if an earlier release wrote it."""


NO_RESTORE_POINT = RestorePoint()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the slots of a generation run, and what they start from."""

    generation: int
    parallelism: int
    max_parallelism: int
    backend: BackendSettings
    operators: tuple[OperatorSpec, ...]
    levels: tuple[tuple[str, ...], ...]
    """The uids of the steps: first those that read no step, then those that read only these, and so on."""
    restore: RestorePoint = NO_RESTORE_POINT
    rescale: bool = False
    """Whether the run goes on with another number of slots: they are spread over all executors that there are now, and
    take what is on their host's disk."""
    allow_non_restored: bool = False
    """Whether restored states that their operator does not declare any more may be dropped."""

    def slot_spec(
        self,
        run: RunInfo,
        index: int,
        incarnation: int,
        restore: RestorePoint,
        segments: DurableSegments,
        decided_batch: int,
        slots_beside: int,
    ) -> SlotSpec:
        """Everything that slot `index` needs to start at `decided_batch`, on an executor with `slots_beside` slots."""
        memory = max(LEAST_SLOT_MEMORY, self.backend.memory_bytes // slots_beside)
        return SlotSpec(
            run=run,
            generation=self.generation,
            index=index,
            incarnation=incarnation,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            backend=msgspec.structs.replace(self.backend, memory_bytes=memory),
            operators=list(self.operators),
            restore=overlapping(restore.states, key_group_range(index, self.parallelism, self.max_parallelism)),
            restore_batch=restore.batch,
            decided_batch=decided_batch,
            restore_storage=restore.storage,
            restore_owned=restore.owned,
            restore_checkpoint=restore.checkpoint,
            steps=list(restore.steps),
            segments=segments.of(index),
            segments_complete=segments.complete,
            allow_non_restored=self.allow_non_restored,
        )
