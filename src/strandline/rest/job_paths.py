"""Flink's paths about jobs and their vertices that only read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from strandline.observe.facts import JobFacts, Vertex
from strandline.rest import flink_cluster, flink_exceptions, flink_jobs, flink_metrics, flink_vertices
from strandline.rest.answers import RestError
from strandline.rest.service import JobId, Shown, VertexId, all_facts, json, schemas
from strandline.version import VERSION

router = APIRouter()


@router.get("/overview", **schemas.answers(flink_cluster.ClusterOverview))
def cluster(shown: Shown) -> Response:
    """The jobs of this server in numbers."""
    return json(flink_cluster.cluster_overview(all_facts(shown.jobs), VERSION))


@router.get("/config", **schemas.answers(flink_cluster.DashboardConfiguration))
def dashboard() -> Response:
    """What the page needs to know."""
    return json(flink_cluster.dashboard_configuration(VERSION))


@router.get("/jobs", **schemas.answers(flink_jobs.JobIds))
def jobs(shown: Shown) -> Response:
    """The ids and states of all jobs."""
    return json(flink_jobs.job_ids(all_facts(shown.jobs)))


@router.get("/jobs/overview", **schemas.answers(flink_jobs.JobsOverview))
def overview(shown: Shown) -> Response:
    """All jobs with their names and times."""
    return json(flink_jobs.jobs_overview(all_facts(shown.jobs)))


@router.get("/jobs/{jobid}", **schemas.answers(flink_jobs.JobDetailsInfo, 404))
def job(jobid: JobId, request: Request, shown: Shown) -> Response:
    """A job with its vertices."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.job_info(facts))


@router.get("/jobs/{jobid}/plan", **schemas.answers(flink_jobs.JobPlan, 404))
def plan(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The graph of a job."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.plan(facts))


@router.get("/jobs/{jobid}/config", **schemas.answers(flink_jobs.JobConfigInfo, 404))
def config(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The options of a job, without its secrets."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.job_config(facts))


@router.get("/jobs/{jobid}/exceptions", **schemas.answers(flink_exceptions.JobExceptions, 404))
def exceptions(
    jobid: JobId,
    request: Request,
    shown: Shown,
    maxExceptions: Annotated[int, Query(ge=1, le=flink_exceptions.MOST_EXCEPTIONS)] = 20,
) -> Response:
    """What went wrong, newest first."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_exceptions.job_exceptions(facts, maxExceptions))


@router.get("/jobs/{jobid}/metrics", **schemas.list_of(flink_metrics.Metric, 404))
def metrics(
    jobid: JobId,
    request: Request,
    shown: Shown,
    get: Annotated[str | None, Query(max_length=2000, description="Names, divided by commas.")] = None,
) -> Response:
    """The names of a job's metrics, or the values of those that `get` names."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_metrics.chosen(flink_metrics.job_metrics(facts), get))


@router.get("/jobs/{jobid}/vertices/{vertexid}", **schemas.answers(flink_vertices.JobVertexDetails, 404))
def vertex(jobid: JobId, vertexid: VertexId, request: Request, shown: Shown) -> Response:
    """A vertex with its subtasks."""
    facts = shown.facts(jobid)
    found = _vertex(facts, vertexid)
    return shown.answer(facts, request, lambda: flink_vertices.vertex_details(facts, found))


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasktimes", **schemas.answers(flink_vertices.SubtasksTimes, 404))
def subtask_times(jobid: JobId, vertexid: VertexId, request: Request, shown: Shown) -> Response:
    """When the subtasks of a vertex came to their state."""
    facts = shown.facts(jobid)
    found = _vertex(facts, vertexid)
    return shown.answer(facts, request, lambda: flink_vertices.subtasks_times(facts, found))


@router.get("/jobs/{jobid}/vertices/{vertexid}/backpressure", **schemas.answers(flink_vertices.BackPressure, 404))
def back_pressure(jobid: JobId, vertexid: VertexId, request: Request, shown: Shown) -> Response:
    """The back pressure of a vertex and of its subtasks."""
    facts = shown.facts(jobid)
    found = _vertex(facts, vertexid)
    return shown.answer(facts, request, lambda: flink_vertices.back_pressure(facts, found))


@router.get("/jobs/{jobid}/vertices/{vertexid}/metrics", **schemas.list_of(flink_metrics.Metric, 404))
def vertex_metrics(
    jobid: JobId,
    vertexid: VertexId,
    request: Request,
    shown: Shown,
    get: Annotated[str | None, Query(max_length=2000, description="Names, divided by commas.")] = None,
) -> Response:
    """The names of a vertex's metrics, each with the number of its subtask, or the values of those that `get` names."""
    facts = shown.facts(jobid)
    found = _vertex(facts, vertexid)
    return shown.answer(facts, request, lambda: flink_metrics.chosen(flink_metrics.vertex_metrics(facts, found), get))


@router.get(
    "/jobs/{jobid}/vertices/{vertexid}/subtasks/{subtaskindex}", **schemas.answers(flink_vertices.SubtaskAttempt, 404)
)
def subtask(
    jobid: JobId,
    vertexid: VertexId,
    subtaskindex: Annotated[int, Path(ge=0, le=100_000)],
    request: Request,
    shown: Shown,
) -> Response:
    """One subtask of a vertex."""
    facts = shown.facts(jobid)
    found = next(
        (one for one in flink_vertices.subtasks_of(facts, _vertex(facts, vertexid)) if one.index == subtaskindex), None
    )
    if found is None:
        raise RestError(404, f"Vertex {vertexid} has no subtask {subtaskindex}, or the job does not run.")
    return shown.answer(facts, request, lambda: flink_vertices.subtask_attempt(facts, found))


def _vertex(facts: JobFacts, id: str) -> Vertex:
    found = next((one for one in facts.graph if one.id == id), None)
    if found is None:
        raise RestError(404, f"Job {facts.name} has no vertex {id}: GET /jobs/{facts.id} lists them.")
    return found
