"""What is known about one job at one moment, in one document."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from strandline.checkpoint.stats import CheckpointCounts, CheckpointStats, RestoredCheckpoint
from strandline.runtime.driver.figures import RunFigures, SourceFigures
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.run_records import FailureKind
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.figures import Facts

Severity = Literal["info", "warning", "critical"]
VertexKind = Literal["source", "step", "sink"]

KEPT_SAMPLES = 600
"""How many samples the facts of a job hold: those of the last ten minutes."""


def job_id(checkpoint_dir: str, name: str) -> str:
    """The id of a job: 32 hexadecimal digits, as Flink's. Every run of the job has the same one.

    `checkpoint_dir` is absolute, so that two jobs of one name in two directories differ.
    """
    return hashlib.md5(f"{checkpoint_dir.rstrip('/')}/{name}".encode(), usedforsecurity=False).hexdigest()


def vertex_id(kind: VertexKind, name: str) -> str:
    """The id of a vertex: 32 hexadecimal digits, as Flink's. It stays the same as long as the uid of the step does."""
    return hashlib.md5(f"{kind}/{name}".encode(), usedforsecurity=False).hexdigest()


class DriverFacts(Facts, frozen=True):
    """The process that runs the job.

    Attributes:
        host: The name of its host.
        pid: Its process id.
        user: The user that it belongs to.
        strandline: The version of Strandline.
        spark: The version of Spark.
        python: The version of Python.
        ui_url: Where its page is; empty if it serves none.
    """

    host: str = ""
    pid: int = 0
    user: str = ""
    strandline: str = ""
    spark: str = ""
    python: str = ""
    ui_url: str = ""


class Vertex(Facts, frozen=True):
    """A part of the job's graph.

    Attributes:
        id: See `vertex_id`.
        name: The uid of a step; a number such as `source-0` or `sink-0` for the others.
        kind: Source, step or sink.
        description: What it is, in a few words: `aggregate by user`, `FileStreamSource[…]`, `ParquetSink(out)`.
        parallelism: The number of subtasks; 1 for sources and sinks, whose tasks are Spark's.
        inputs: The ids of the vertices that it reads.
        state_expires: Whether its state goes away by itself: it has a time to live, or follows the watermark, as the
            state of windows does. None if that is not known, and for sources and sinks.
    """

    id: str
    name: str
    kind: VertexKind
    description: str = ""
    parallelism: int = 1
    inputs: tuple[str, ...] = ()
    state_expires: bool | None = None


class SubtaskFacts(Facts, frozen=True):
    """One subtask of a step, in the last second.

    Attributes:
        vertex: The id of the step's vertex.
        index: The number of the subtask, and of its slot.
        task_manager: The name of the task manager that runs the slot.
        host: Its host.
        pid: The process id of the slot.
        rows_in: Rows that the subtask took in since its slot started.
        rows_out: Rows that it gave.
        rows_in_per_second: Over the last seconds.
        rows_out_per_second: Over the last seconds.
        busy: The share of the last seconds in which the subtask worked: on rows, on a commit, on a barrier. 0 to 1.
        back_pressured: The share in which it had output or changes and waited for somebody to take them: for the relay,
            or for the changelog to become durable. What is left of 1 is idle.
        state_bytes: The size of its state.
        memory_bytes: The part of its state that is in memory.
        estimated_keys: About how many entries its state holds.
        cache_hit_ratio: The share of reads that RocksDB's block cache answered, 0 to 1; None if it is not known.
        watermark_ms: The watermark of its step.
        bytes_in: Bytes of the rows that it took in since its slot started, in Arrow; None if it is not known.
        bytes_out: Bytes of the rows that it gave, likewise.
    """

    vertex: str
    index: int
    task_manager: str = ""
    host: str = ""
    pid: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_in_per_second: float = 0.0
    rows_out_per_second: float = 0.0
    busy: float = 0.0
    back_pressured: float = 0.0
    state_bytes: int = 0
    memory_bytes: int = 0
    estimated_keys: int = 0
    cache_hit_ratio: float | None = None
    watermark_ms: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None

    @property
    def idle(self) -> float:
        """The share of the last seconds in which the subtask had nothing to do."""
        return max(0.0, 1.0 - self.busy - self.back_pressured)


class FailureFacts(Facts, frozen=True):
    """Something that went wrong.

    Attributes:
        time_ms: When, in milliseconds since the epoch.
        kind: What failed: the `run` for good, the generation (`restart`), `slots`, a `checkpoint`, a `rescale`.
        cause: The cause in words, in one line.
        text: The whole text of the error.
        subtasks: The numbers of the slots concerned.
        checkpoint: The id of the checkpoint that failed; None if it was something else.
    """

    time_ms: int
    kind: FailureKind
    cause: str
    text: str = ""
    subtasks: tuple[int, ...] = ()
    checkpoint: int | None = None


class Sample(Facts, frozen=True):
    """Figures of one moment, for plots.

    Attributes:
        time_ms: The moment, in milliseconds since the epoch.
        rows_per_second: Rows read, over the last seconds.
        rows_out_per_second: Rows given to sinks, over the last seconds.
        batch_ms: How long the last batch took.
        state_bytes: The size of the state.
        watermark_lag_ms: How far the watermark was behind.
        offsets_behind: How far the sources were behind their newest offsets, where that is known.
        busy: The busy share of the busiest subtask.
        back_pressured: The back-pressured share of the subtask that waited longest.
        cache_hit_ratio: The share of reads that RocksDB's block cache answered, over all subtasks; None if not known.
        source_rows: Rows that the run had read from each source, in the order of `RunFigures.sources`.
    """

    time_ms: int
    rows_per_second: float = 0.0
    rows_out_per_second: float = 0.0
    batch_ms: float = 0.0
    state_bytes: int = 0
    watermark_lag_ms: int | None = None
    offsets_behind: int | None = None
    busy: float = 0.0
    back_pressured: float = 0.0
    cache_hit_ratio: float | None = None
    source_rows: tuple[int, ...] = ()


class StatusChange(Facts, frozen=True):
    """A run came to a status.

    Attributes:
        time_ms: When, in milliseconds since the epoch.
        status: The status.
    """

    time_ms: int
    status: RunStatus


class CheckpointsFacts(Facts, frozen=True):
    """The checkpoints and savepoints of a job.

    Attributes:
        counts: How many there were, also before the oldest one of `history`.
        history: The newest ones with their figures, oldest first.
        last_completed: The newest completed checkpoint that is no savepoint.
        last_failed: The newest one that failed.
        last_savepoint: The newest completed savepoint.
        restored: What the current generation started from.
    """

    counts: CheckpointCounts = CheckpointCounts()
    history: tuple[CheckpointStats, ...] = ()
    last_completed: CheckpointStats | None = None
    last_failed: CheckpointStats | None = None
    last_savepoint: CheckpointStats | None = None
    restored: RestoredCheckpoint | None = None


class Finding(Facts, frozen=True):
    """A rule of health that the figures break.

    Attributes:
        rule: The name of the rule, as the operations guide lists it: `back-pressure`.
        severity: How bad it is. `critical`: rows are not processed or not made durable. `warning`: they will not be, if
            it goes on, or a failure will cost much. `info`: worth knowing.
        title: What is seen, in a few words.
        text: What was measured, with figures.
        remedy: What to do.
        subject: The step, subtask or source that it is about; empty for the whole job.
    """

    rule: str
    severity: Severity
    title: str
    text: str
    remedy: str
    subject: str = ""


class JobFacts(Facts, frozen=True):
    """What is known about one job at one moment. Times are milliseconds since the epoch.

    Attributes:
        id: See `job_id`.
        name: The name of the job.
        run: The id of the run; every `job.start()` has its own.
        status: Where the run stands.
        driver_lost: Whether the driver of a run that had not ended is gone. `status` is then the last one known.
        error: The error that ended the run, in one line; empty if there is none.
        taken_ms: When these facts were taken.
        start_ms: When the run began.
        end_ms: When it ended; None while it runs.
        checkpoint_dir: The storage of its checkpoints.
        driver: The process that runs it.
        config: The options of the job, as `Config.shown` gives them: plain values without secrets.
        graph: Sources, steps and sinks; each after those that it reads.
        figures: Rows, rates, watermarks, state.
        subtasks: The subtasks of all steps, by step and number. Empty if the job does not run.
        key_group_rows: For each step, by the id of its vertex: rows per key group since its slots started.
        checkpoints: The checkpoints.
        recoveries: What the run recovered from, oldest first.
        rescalings: The changes of parallelism, oldest first.
        failures: What went wrong, oldest first.
        statuses: The statuses that the run came to, oldest first.
        samples: Figures of the last minutes for plots, oldest first; at most `KEPT_SAMPLES`.
        health: The rules of health that are broken, worst first.
    """

    id: str
    name: str
    run: str
    status: RunStatus
    taken_ms: int
    start_ms: int
    end_ms: int | None = None
    driver_lost: bool = False
    error: str = ""
    checkpoint_dir: str = ""
    driver: DriverFacts = DriverFacts()
    config: dict[str, Any] = {}
    graph: tuple[Vertex, ...] = ()
    figures: RunFigures | None = None
    subtasks: tuple[SubtaskFacts, ...] = ()
    key_group_rows: dict[str, tuple[int, ...]] = {}
    checkpoints: CheckpointsFacts = CheckpointsFacts()
    recoveries: tuple[Recovery, ...] = ()
    rescalings: tuple[Rescaling, ...] = ()
    failures: tuple[FailureFacts, ...] = ()
    statuses: tuple[StatusChange, ...] = ()
    samples: tuple[Sample, ...] = ()
    health: tuple[Finding, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the job runs, as far as anybody knows."""
        return not self.status.ended and not self.driver_lost

    def source_figures(self, vertex: Vertex) -> SourceFigures | None:
        """The figures of a source; None if they are not known.

        Figures are those of Spark's streams. So they are known if every source of the graph reads one stream.
        """
        sources = [one.id for one in self.graph if one.kind == "source"]
        known = () if self.figures is None else self.figures.sources
        return known[sources.index(vertex.id)] if vertex.id in sources and len(known) == len(sources) else None

    @property
    def steps(self) -> tuple[Vertex, ...]:
        """The stateful steps of the graph."""
        return tuple(vertex for vertex in self.graph if vertex.kind == "step")
