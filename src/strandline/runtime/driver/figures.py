"""What a run tells about itself: its figures and its processes, as immutable structs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import StrandlineError
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.figures import ChangelogFigures, Facts
from strandline.runtime.protocol.taskmanager_calls import TaskManagerInfo


class RestoreFigures(Facts, frozen=True):
    """What it took to bring the state back when the current generation started."""

    duration_ms: float = 0.0
    local_bytes: int = 0
    """Bytes that the slots read from local disks."""
    durable_bytes: int = 0
    """Bytes that the slots read from durable storage."""


class StateMemory(Facts, frozen=True):
    """The memory budget of the state, and its use."""

    executor_budget_bytes: int = 0
    """The budget of each executor: `Config.state_memory`."""
    slot_budget_bytes: int = 0
    """The budget of the slot that has the least."""
    used_bytes: int = 0
    """Cache and write buffers of all slots; with the heap backend, the state itself."""
    most_used_bytes: int = 0
    """Use of the slot that uses the most."""


class RunFigures(Facts, frozen=True):
    """Counts of a run. While no generation runs, the counts are those of the last one, and the sizes are 0."""

    status: RunStatus
    restarts: int = 0
    """How often the run went back to its last completed checkpoint after a failure."""
    rounds_repeated: int = 0
    """How many rounds of batches were repeated."""
    replaced_slots: int = 0
    """How many lost slots were replaced without a restart."""
    generation: int = 0
    """The number of the current generation; every start, restart and rescale of the job begins one."""
    parallelism: int = 0
    """The number of subtasks of each stateful step."""
    batches: int = 0
    """Micro-batches that the current generation has committed."""
    rows: int = 0
    """Rows that the current slots have processed, summed over the stateful steps."""
    late_rows: int = 0
    """Rows among them that were too late for their step."""
    state_bytes: int = 0
    """The size of the state."""
    state_memory_bytes: int = 0
    """The part of the state that is in memory."""
    restore: RestoreFigures = RestoreFigures()
    state_memory: StateMemory = StateMemory()
    changelog: ChangelogFigures | None = None
    """None if the changelog is off."""


class SlotProcess(Facts, frozen=True):
    """The process of one slot."""

    index: int
    """The number of the slot. The slot runs the subtasks of this number of all stateful steps."""
    pid: int
    alive: bool


class TaskManagerProcess(Facts, frozen=True):
    """The process of one task manager, and those of its slots."""

    id: str
    pid: int
    slots: tuple[SlotProcess, ...]


class RunProcesses(Facts, frozen=True):
    """The processes that a run has beside Spark's own."""

    task_managers: tuple[TaskManagerProcess, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of all task managers and slots."""
        return (*(manager.pid for manager in self.task_managers), *(slot.pid for slot in self.slots))

    @property
    def slots(self) -> tuple[SlotProcess, ...]:
        """The slots of all task managers, by their index."""
        slots = (slot for manager in self.task_managers for slot in manager.slots)
        return tuple(sorted(slots, key=lambda slot: slot.index))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the driver knows of a run without asking any other process."""

    name: str
    status: RunStatus
    generation: int
    batches: int
    rows: int
    last_checkpoint: CheckpointStats | None
    error: StrandlineError | None


def run_processes(managers: Iterable[TaskManagerInfo]) -> RunProcesses:
    """The processes that task managers describe, in the order of their identities and of the slots' numbers."""
    return RunProcesses(
        tuple(
            TaskManagerProcess(
                manager.identity,
                manager.pid,
                tuple(SlotProcess(index, slot.pid, slot.alive) for index, slot in sorted(manager.slots.items())),
            )
            for manager in sorted(managers, key=lambda manager: manager.identity)
        )
    )
