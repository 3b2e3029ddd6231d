"""Flink's JSON about vertices, their subtasks and their back pressure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from strandline.observe.facts import JobFacts, SubtaskFacts, Vertex
from strandline.rest.flink_jobs import IOMetrics, duration, end_time, max_parallelism, subtask_metrics
from strandline.rest.flink_states import TaskState, task_state

MOST_SUBTASKS = 5_000
Level = Literal["ok", "low", "high"]


class SubtaskAttempt(Struct, frozen=True, rename={"start_time": "start-time", "end_time": "end-time"}):
    """One subtask. `start_time` with an underscore is Flink's own second spelling of `start-time`."""

    subtask: int
    status: TaskState
    attempt: int
    endpoint: str
    start_time: int
    end_time: int
    duration: int
    metrics: IOMetrics
    taskmanager_id: str = field(name="taskmanager-id")
    start_time_again: int = field(name="start_time")
    status_duration: dict[str, int] = field(name="status-duration", default={})
    other_concurrent_attempts: list[str] = field(name="other-concurrent-attempts", default=[])


class JobVertexDetails(Struct, frozen=True):
    """A vertex with its subtasks. Sources and sinks have none: Spark runs their tasks."""

    id: str
    name: str
    parallelism: int
    maxParallelism: int
    now: int
    subtasks: list[SubtaskAttempt]


class SubtaskTime(Struct, frozen=True):
    """When a subtask came to which state."""

    subtask: int
    endpoint: str
    duration: int
    timestamps: dict[str, int]


class SubtasksTimes(Struct, frozen=True):
    """The times of a vertex's subtasks."""

    id: str
    name: str
    now: int
    subtasks: list[SubtaskTime]


class SubtaskBackPressure(Struct, frozen=True, rename={"attempt_number": "attempt-number"}):
    """How a subtask spent the last seconds. The three shares sum up to 1."""

    subtask: int
    attempt_number: int
    backpressureLevel: Level
    ratio: float
    idleRatio: float
    busyRatio: float


class BackPressure(Struct, frozen=True, rename={"end_timestamp": "end-timestamp"}):
    """The back pressure of a vertex: `deprecated` if nobody measures it now, because the job does not run."""

    status: Literal["ok", "deprecated"]
    backpressureLevel: Level
    end_timestamp: int
    subtasks: list[SubtaskBackPressure]


def vertex_details(facts: JobFacts, vertex: Vertex) -> JobVertexDetails:
    """`GET /jobs/:jobid/vertices/:vertexid`."""
    return JobVertexDetails(
        id=vertex.id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        maxParallelism=max_parallelism(facts) if vertex.kind == "step" else vertex.parallelism,
        now=facts.taken_ms,
        subtasks=[subtask_attempt(facts, one) for one in subtasks_of(facts, vertex)],
    )


def subtask_attempt(facts: JobFacts, subtask: SubtaskFacts) -> SubtaskAttempt:
    """`GET /jobs/:jobid/vertices/:vertexid/subtasks/:index`."""
    state = task_state(facts)
    return SubtaskAttempt(
        subtask=subtask.index,
        status=state,
        attempt=attempt(facts),
        endpoint=f"{subtask.host}:{subtask.pid}",
        start_time=facts.start_ms,
        end_time=end_time(facts),
        duration=duration(facts),
        metrics=subtask_metrics(subtask),
        taskmanager_id=subtask.task_manager,
        start_time_again=facts.start_ms,
        status_duration={state: duration(facts)},
    )


def subtasks_times(facts: JobFacts, vertex: Vertex) -> SubtasksTimes:
    """`GET /jobs/:jobid/vertices/:vertexid/subtasktimes`."""
    state = task_state(facts)
    return SubtasksTimes(
        vertex.id,
        vertex.name,
        facts.taken_ms,
        [
            SubtaskTime(one.index, f"{one.host}:{one.pid}", duration(facts), {state: facts.start_ms})
            for one in subtasks_of(facts, vertex)
        ],
    )


def back_pressure(facts: JobFacts, vertex: Vertex) -> BackPressure:
    """`GET /jobs/:jobid/vertices/:vertexid/backpressure`."""
    subtasks = [
        SubtaskBackPressure(
            subtask=one.index,
            attempt_number=attempt(facts),
            backpressureLevel=level(one.back_pressured),
            ratio=round(one.back_pressured, 4),
            idleRatio=round(one.idle, 4),
            busyRatio=round(one.busy, 4),
        )
        for one in subtasks_of(facts, vertex)
    ]
    return BackPressure(
        status="ok" if subtasks else "deprecated",
        backpressureLevel=level(max((one.ratio for one in subtasks), default=0.0)),
        end_timestamp=facts.taken_ms,
        subtasks=subtasks,
    )


def level(share: float) -> Level:
    """Flink's words: ok up to 10 %, low up to 50 %, high above."""
    return "ok" if share <= 0.1 else "low" if share <= 0.5 else "high"


def attempt(facts: JobFacts) -> int:
    """The number of the attempt: how often the job was restarted."""
    return facts.figures.restarts if facts.figures is not None else 0


def subtasks_of(facts: JobFacts, vertex: Vertex) -> list[SubtaskFacts]:
    """The subtasks of a vertex, by their numbers."""
    return [one for one in facts.subtasks if one.vertex == vertex.id][:MOST_SUBTASKS]
