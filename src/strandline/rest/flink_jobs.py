"""Flink's JSON about jobs: lists, details, plan and configuration, as pure functions of the facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from strandline.observe.facts import JobFacts, SubtaskFacts, Vertex
from strandline.rest.flink_states import TASK_STATES, JobState, TaskState, job_state, state_of, task_state
from strandline.runtime.driver.figures import StepFigures
from strandline.runtime.driver.status import RunStatus

DEFAULT_MAX_PARALLELISM = 128


class JobIdWithStatus(Struct, frozen=True):
    """A job of `/jobs`."""

    id: str
    status: JobState


class JobIds(Struct, frozen=True):
    """The jobs with their states."""

    jobs: list[JobIdWithStatus]


class JobDetails(Struct, frozen=True, rename={"start_time": "start-time", "end_time": "end-time"}):
    """A job of `/jobs/overview`. Times are milliseconds since the epoch; -1 where there is none."""

    jid: str
    name: str
    start_time: int
    end_time: int
    duration: int
    state: JobState
    last_modification: int = field(name="last-modification")
    tasks: dict[str, int] = {}
    pending_operators: int = field(name="pending-operators", default=0)


class JobsOverview(Struct, frozen=True):
    """The jobs with names, times and numbers of subtasks."""

    jobs: list[JobDetails]


class IOMetrics(Struct, frozen=True, rename="kebab"):
    """What a vertex read and wrote. Bytes are those of the rows in Arrow; they are missing where nobody counts them."""

    read_bytes: int | UnsetType = UNSET
    read_bytes_complete: bool = False
    write_bytes: int | UnsetType = UNSET
    write_bytes_complete: bool = False
    read_records: int = 0
    read_records_complete: bool = True
    write_records: int = 0
    write_records_complete: bool = True
    accumulated_backpressured_time: int = 0
    accumulated_idle_time: int = 0
    accumulated_busy_time: float = 0.0


class JobVertex(Struct, frozen=True, rename={"start_time": "start-time", "end_time": "end-time"}):
    """A vertex of a job: a source, a step or a sink."""

    id: str
    slotSharingGroupId: str
    name: str
    maxParallelism: int
    parallelism: int
    status: TaskState
    start_time: int
    end_time: int
    duration: int
    tasks: dict[str, int]
    metrics: IOMetrics


class PlanInput(Struct, frozen=True):
    """An edge of the plan."""

    num: int
    id: str
    ship_strategy: str
    exchange: str


class PlanNode(Struct, frozen=True):
    """A vertex of the plan."""

    id: str
    parallelism: int
    operator: str
    operator_strategy: str
    description: str
    inputs: list[PlanInput]
    optimizer_properties: dict[str, Any] = {}


class Plan(Struct, frozen=True):
    """The graph of a job."""

    jid: str
    name: str
    type: str
    nodes: list[PlanNode]


class JobPlan(Struct, frozen=True):
    """The graph of a job, as `/jobs/:jobid/plan` gives it."""

    plan: Plan


class JobDetailsInfo(Struct, frozen=True, rename="kebab"):
    """A job with its vertices and its plan."""

    jid: str
    name: str
    isStoppable: bool = field(name="isStoppable")
    state: JobState = field()
    start_time: int = field()
    end_time: int = field()
    duration: int = field()
    maxParallelism: int = field(name="maxParallelism")
    now: int = field()
    timestamps: dict[str, int] = field()
    vertices: list[JobVertex] = field()
    status_counts: dict[str, int] = field()
    plan: Plan = field()
    job_type: str = "STREAMING"
    pending_operators: int = 0


class ExecutionConfig(Struct, frozen=True, rename="kebab"):
    """How a job runs. `user-config` holds all options of the job but its secrets."""

    restart_strategy: str
    job_parallelism: int
    object_reuse_mode: bool
    user_config: dict[str, str]


class JobConfigInfo(Struct, frozen=True, rename="kebab"):
    """The options of a job."""

    jid: str
    name: str
    execution_config: ExecutionConfig


def job_ids(jobs: Iterable[JobFacts]) -> JobIds:
    """`GET /jobs`."""
    return JobIds([JobIdWithStatus(one.id, job_state(one)) for one in jobs])


def jobs_overview(jobs: Iterable[JobFacts]) -> JobsOverview:
    """`GET /jobs/overview`."""
    return JobsOverview([_details(one) for one in jobs])


def job_info(facts: JobFacts) -> JobDetailsInfo:
    """`GET /jobs/:jobid`."""
    vertices = [job_vertex(facts, vertex) for vertex in facts.graph]
    counts = _counts({})
    for vertex in vertices:
        counts[vertex.status.lower()] += 1
    return JobDetailsInfo(
        jid=facts.id,
        name=facts.name,
        isStoppable=facts.runs,
        state=job_state(facts),
        start_time=facts.start_ms,
        end_time=end_time(facts),
        duration=duration(facts),
        maxParallelism=max_parallelism(facts),
        now=facts.taken_ms,
        timestamps=_timestamps(facts),
        vertices=vertices,
        status_counts={name.upper(): number for name, number in counts.items()},
        plan=plan(facts).plan,
    )


def job_vertex(facts: JobFacts, vertex: Vertex) -> JobVertex:
    """One vertex of `GET /jobs/:jobid`."""
    state = task_state(facts)
    return JobVertex(
        id=vertex.id,
        slotSharingGroupId=facts.id,
        name=vertex.name,
        maxParallelism=max_parallelism(facts) if vertex.kind == "step" else vertex.parallelism,
        parallelism=vertex.parallelism,
        status=state,
        start_time=facts.start_ms,
        end_time=end_time(facts),
        duration=duration(facts),
        tasks={name.upper(): number for name, number in _counts({state: vertex.parallelism}).items()},
        metrics=io_metrics(facts, vertex),
    )


def plan(facts: JobFacts) -> JobPlan:
    """`GET /jobs/:jobid/plan`."""
    kinds = {vertex.id: vertex.kind for vertex in facts.graph}
    nodes = [
        PlanNode(
            id=vertex.id,
            parallelism=vertex.parallelism,
            operator=vertex.kind,
            operator_strategy="",
            description=f"{vertex.name}: {vertex.description}" if vertex.description else vertex.name,
            inputs=[
                PlanInput(number, id, "HASH" if kinds[vertex.id] == "step" else "FORWARD", "pipelined_bounded")
                for number, id in enumerate(vertex.inputs)
            ],
        )
        for vertex in facts.graph
    ]
    return JobPlan(Plan(facts.id, facts.name, "STREAMING", nodes))


def job_config(facts: JobFacts) -> JobConfigInfo:
    """`GET /jobs/:jobid/config`."""
    options = {name: value if isinstance(value, str) else _text(value) for name, value in facts.config.items()}
    return JobConfigInfo(
        facts.id,
        facts.name,
        ExecutionConfig(
            restart_strategy=options.get("restart_strategy", ""),
            job_parallelism=parallelism(facts),
            object_reuse_mode=False,
            user_config=options,
        ),
    )


def end_time(facts: JobFacts) -> int:
    """When the job ended; -1 while it runs, as Flink says it."""
    return -1 if facts.end_ms is None else facts.end_ms


def duration(facts: JobFacts) -> int:
    """How long the job has run, in milliseconds."""
    return max(0, (facts.taken_ms if facts.end_ms is None else facts.end_ms) - facts.start_ms)


def parallelism(facts: JobFacts) -> int:
    """The number of subtasks of each step."""
    if facts.figures is not None and facts.figures.parallelism:
        return facts.figures.parallelism
    return max((vertex.parallelism for vertex in facts.steps), default=1)


def max_parallelism(facts: JobFacts) -> int:
    """The number of key groups."""
    set_by_user = facts.config.get("max_parallelism")
    if isinstance(set_by_user, int) and set_by_user > 0:
        return set_by_user
    return max((len(rows) for rows in facts.key_group_rows.values()), default=DEFAULT_MAX_PARALLELISM)


def io_metrics(facts: JobFacts, vertex: Vertex) -> IOMetrics:
    """What a vertex has read and written. Flink's accumulated times are those of a second here, on average."""
    figures = facts.figures
    if figures is None:
        return IOMetrics(read_records_complete=False, write_records_complete=False)
    if vertex.kind == "step":
        step = figures.steps.get(vertex.name)
        subtasks = [one for one in facts.subtasks if one.vertex == vertex.id]
        if step is None:
            return msgspec.structs.replace(_shares(subtasks), read_records_complete=False, write_records_complete=False)
        return _moved(_shares(subtasks), step)
    if vertex.kind == "sink":
        return IOMetrics(read_records=figures.rows_out)
    source = facts.source_figures(vertex)
    return IOMetrics(write_records=0 if source is None else source.rows, write_records_complete=source is not None)


def subtask_metrics(subtask: SubtaskFacts) -> IOMetrics:
    """What a subtask has read and written since its slot started."""
    return _moved(_shares([subtask]), subtask)


def _moved(shares: IOMetrics, counts: StepFigures | SubtaskFacts) -> IOMetrics:
    return msgspec.structs.replace(
        shares,
        read_records=counts.rows_in,
        write_records=counts.rows_out,
        read_bytes=UNSET if counts.bytes_in is None else counts.bytes_in,
        read_bytes_complete=counts.bytes_in is not None,
        write_bytes=UNSET if counts.bytes_out is None else counts.bytes_out,
        write_bytes_complete=counts.bytes_out is not None,
    )


def _shares(subtasks: list[SubtaskFacts]) -> IOMetrics:
    return IOMetrics(
        accumulated_backpressured_time=round(sum(1000 * one.back_pressured for one in subtasks)),
        accumulated_idle_time=round(sum(1000 * one.idle for one in subtasks)),
        accumulated_busy_time=round(sum(1000 * one.busy for one in subtasks), 1),
    )


def _details(facts: JobFacts) -> JobDetails:
    total = sum(vertex.parallelism for vertex in facts.graph)
    changed = facts.statuses[-1].time_ms if facts.statuses else facts.start_ms
    return JobDetails(
        jid=facts.id,
        name=facts.name,
        start_time=facts.start_ms,
        end_time=end_time(facts),
        duration=duration(facts),
        state=job_state(facts),
        last_modification=changed,
        tasks={"total": total, **_counts({task_state(facts): total})},
    )


def _counts(known: dict[str, int]) -> dict[str, int]:
    counts = dict.fromkeys(TASK_STATES, 0)
    counts.update({name.lower(): number for name, number in known.items()})
    return counts


def _timestamps(facts: JobFacts) -> dict[str, int]:
    """When the job last came to each state; 0 if it never did."""
    times = dict.fromkeys(
        (
            "INITIALIZING",
            "CREATED",
            "RUNNING",
            "FAILING",
            "FAILED",
            "CANCELLING",
            "CANCELED",
            "FINISHED",
            "RESTARTING",
            "SUSPENDED",
            "RECONCILING",
        ),
        0,
    )
    times[state_of(RunStatus.STARTING)] = facts.start_ms
    for change in facts.statuses:
        times[state_of(change.status)] = change.time_ms
    if job_state(facts) == "SUSPENDED":
        times["SUSPENDED"] = facts.taken_ms
    return times


def _text(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
