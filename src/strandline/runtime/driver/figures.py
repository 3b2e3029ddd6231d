"""What a run tells about itself: its figures and its processes, as immutable structs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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


class Restoring(Facts, frozen=True):
    """How far the slots are that open the state of a generation.

    Attributes:
        done_bytes: Bytes that they have brought to their disks, or found there.
        total_bytes: The size of the files that they need.
    """

    done_bytes: int
    total_bytes: int


class RunningBatch(Facts, frozen=True):
    """The batch that is being worked on.

    Attributes:
        number: Its number within the generation.
        id: Its id, as checkpoints and sinks know it. No other generation has a batch of this id.
        since_ms: When it began, in milliseconds since the epoch.
        running_ms: For how long it has been running.
        first: Whether the generation has not committed a batch yet.
    """

    number: int
    id: int
    since_ms: int
    running_ms: float
    first: bool = False


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


class SourceFigures(Facts, frozen=True):
    """One stream that the job reads.

    Attributes:
        description: Spark's description of the source.
        rows: Rows that the run has read from it. A source with two readers counts once.
        offset: Where the source stands after the last batch, as Spark writes it; None before the first batch.
        offsets_behind: How far the source is behind its newest offset, if Spark's report says so, as it does for Kafka:
            the sum over its partitions. Else None.
    """

    description: str
    rows: int = 0
    offset: Any = None
    offsets_behind: int | None = None


class SinkFigures(Facts, frozen=True):
    """One exactly-once sink.

    Attributes:
        place: Its target: a folder, a table, a topic.
        rows: Rows that it has published since the run began.
        last_checkpoint: The last checkpoint whose rows it has published; 0 before the first.
        last_commit_ms: How long that took.
        staged_bytes: Rows that wait for it, and that no completed checkpoint covers yet.
        failures_in_row: How often the commit that is under way has failed; 0 if none has.
        error: The last failure of that commit, in one line.
    """

    place: str
    rows: int = 0
    last_checkpoint: int = 0
    last_commit_ms: float = 0.0
    staged_bytes: int = 0
    failures_in_row: int = 0
    error: str = ""


class StepFigures(Facts, frozen=True):
    """One stateful step, summed over its subtasks.

    Attributes:
        rows_in: Rows that the step took in.
        rows_out: Rows that it gave, to all its outputs.
        late_rows: Rows among those it took in that came too late.
        watermark_ms: The watermark of the step in the last batch, in milliseconds since the epoch; None without one.
        state_bytes: The size of its state.
        state_memory_bytes: The part of its state that is in memory.
        estimated_keys: About how many keys its state store holds: one for every value, list element, map entry and
            timer. An estimate of RocksDB's, in which keys that were overwritten may count again. Exact with the heap
            backend.
        bytes_in: Bytes of the rows that it took in, in Arrow; None if it is not known.
        bytes_out: Bytes of the rows that it gave, in Arrow; None if it is not known.
    """

    rows_in: int = 0
    rows_out: int = 0
    late_rows: int = 0
    watermark_ms: int | None = None
    state_bytes: int = 0
    state_memory_bytes: int = 0
    estimated_keys: int = 0
    bytes_in: int | None = None
    bytes_out: int | None = None


class RunFigures(Facts, frozen=True):
    """Figures of a run. After its end, and while it restarts, they are the last ones that were known.

    Rows are those of committed batches. Rows that the run computes again after it went back to a checkpoint count once.

    Attributes:
        status: Where the run stands.
        restarts: How often the run went back to its last completed checkpoint after a failure.
        rounds_repeated: How many rounds of batches were repeated.
        replaced_slots: How many lost slots were replaced without a restart.
        generation: The number of the current generation; every start, restart and rescale of the job begins one.
        parallelism: The number of subtasks of each stateful step.
        batches: Micro-batches that the current generation has committed.
        rows: Rows that the run has read from its sources. Each row counts once, however many steps read it. Spark
            counts them, and reports them just after the batch is committed.
        rows_out: Rows that the run has given to its sinks: those staged for exactly-once sinks, once for each sink that
            gets them, and those of the steps whose output goes to a `ForeachBatchSink` or `CallbackSink`.
        rows_per_second: `rows` per second, over the batches that ended in the last minute.
        rows_out_per_second: `rows_out` per second, likewise.
        batch_duration_ms: How long the last batch took, from its start to its commit.
        watermark_ms: The earliest watermark of a step in the last batch, in milliseconds since the epoch; None without
            event time.
        watermark_lag_ms: How far the watermark is behind the time of day: of a run that is over, behind its last batch.
        late_rows: Rows that were too late for their step, summed over the steps.
        state_bytes: The size of the state.
        state_memory_bytes: The part of the state that is in memory.
        sources: The streams that the job reads, in the order of `job.source(...)`.
        steps: The stateful steps, by their uid.
        restore: What it took to bring the state back when the current generation started.
        state_memory: The memory budget of the state, and its use.
        changelog: What the changelog holds and costs; None if the changelog is off.
        sinks: The exactly-once sinks, by their places.
        held_up_s: For how many seconds batches have been waiting for a sink that is behind; 0 if they do not wait.
        silent_source: The description of a source that does not answer when Spark asks it for new rows; else empty.
        silent_s: For how many seconds it has not answered; 0 if all sources answer within ten seconds.
        restoring: How far a start, restart or rescale is that opens the state; None if none does.
        running_batch: The batch that is being worked on; None if there is none, in real time, and
            while a start sends initial state.
    """

    status: RunStatus
    restarts: int = 0
    rounds_repeated: int = 0
    replaced_slots: int = 0
    generation: int = 0
    parallelism: int = 0
    batches: int = 0
    rows: int = 0
    rows_out: int = 0
    rows_per_second: float = 0.0
    rows_out_per_second: float = 0.0
    batch_duration_ms: float = 0.0
    watermark_ms: int | None = None
    watermark_lag_ms: int | None = None
    late_rows: int = 0
    state_bytes: int = 0
    state_memory_bytes: int = 0
    sources: tuple[SourceFigures, ...] = ()
    steps: dict[str, StepFigures] = {}
    restore: RestoreFigures = RestoreFigures()
    state_memory: StateMemory = StateMemory()
    changelog: ChangelogFigures | None = None
    sinks: tuple[SinkFigures, ...] = ()
    held_up_s: float = 0.0
    silent_source: str = ""
    silent_s: float = 0.0
    restoring: Restoring | None = None
    running_batch: RunningBatch | None = None

    def __repr__(self) -> str:
        facts = [
            f"batches {self.batches:,}",
            f"rows in {self.rows:,} ({self.rows_per_second:,.0f}/s)",
            f"out {self.rows_out:,} ({self.rows_out_per_second:,.0f}/s)",
            f"late {self.late_rows:,}",
            f"{self.state_bytes:,} bytes of state",
        ]
        if self.watermark_lag_ms is not None:
            facts.append(f"watermark {self.watermark_lag_ms / 1000:,.0f} s behind")
        return f"<RunFigures {self.status}: {', '.join(facts)}, restarts {self.restarts}>"


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
