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
    """What it took to bring the state back when the current generation started.

    Attributes:
        duration_ms: How long the slots took to open their state.
        local_bytes: Bytes that the slots read from local disks.
        durable_bytes: Bytes that the slots read from durable storage.
    """

    duration_ms: float = 0.0
    local_bytes: int = 0
    durable_bytes: int = 0


class StateMemory(Facts, frozen=True):
    """The memory budget of the state, and its use.

    Attributes:
        executor_budget_bytes: The budget of each executor: `Config.state_memory`.
        slot_budget_bytes: The budget of the slot that has the least.
        used_bytes: Cache and write buffers of all slots; with the heap backend, the state itself.
        most_used_bytes: Use of the slot that uses the most.
    """

    executor_budget_bytes: int = 0
    slot_budget_bytes: int = 0
    used_bytes: int = 0
    most_used_bytes: int = 0


class RunFigures(Facts, frozen=True):
    """Counts of a run. While no generation runs, the counts are those of the last one, and the sizes are 0.

    Attributes:
        status: Where the run stands.
        restarts: How often the run went back to its last completed checkpoint after a failure.
        rounds_repeated: How many rounds of batches were repeated.
        replaced_slots: How many lost slots were replaced without a restart.
        generation: The number of the current generation; every start, restart and rescale of the job begins one.
        parallelism: The number of subtasks of each stateful step.
        batches: Micro-batches that the current generation has committed.
        rows: Rows that the current slots have processed, summed over the stateful steps.
        late_rows: Rows among them that were too late for their step.
        state_bytes: The size of the state.
        state_memory_bytes: The part of the state that is in memory.
        restore: What it took to bring the state back when the current generation started.
        state_memory: The memory budget of the state, and its use.
        changelog: What the changelog holds and costs; None if the changelog is off.
    """

    status: RunStatus
    restarts: int = 0
    rounds_repeated: int = 0
    replaced_slots: int = 0
    generation: int = 0
    parallelism: int = 0
    batches: int = 0
    rows: int = 0
    late_rows: int = 0
    state_bytes: int = 0
    state_memory_bytes: int = 0
    restore: RestoreFigures = RestoreFigures()
    state_memory: StateMemory = StateMemory()
    changelog: ChangelogFigures | None = None


class SlotProcess(Facts, frozen=True):
    """The process of one slot.

    Attributes:
        index: The number of the slot. The slot runs the subtasks of this number of all stateful steps.
        pid: The process id.
        alive: Whether the process runs.
    """

    index: int
    pid: int
    alive: bool


class TaskManagerProcess(Facts, frozen=True):
    """The process of one task manager, and those of its slots.

    Attributes:
        id: The name of the task manager in logs and errors.
        pid: The process id.
        slots: The slots of the task manager, by their index.
    """

    id: str
    pid: int
    slots: tuple[SlotProcess, ...]


class RunProcesses(Facts, frozen=True):
    """The processes that a run has beside Spark's own.

    Attributes:
        task_managers: The task managers with their slots.
    """

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
