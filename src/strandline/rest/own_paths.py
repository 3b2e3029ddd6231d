"""Paths that Flink does not have: the facts of a job, its health and its logs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import PlainTextResponse

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import StrandlineError
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.views import LogText
from strandline.rest.answers import RestError
from strandline.rest.checkpoint_paths import checkpoint_of
from strandline.rest.facts_answer import MOST_CHECKPOINTS, Wanted, bounded
from strandline.rest.service import LARGEST, JobId, Shown, facts_of, json, schemas

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_LOG_BYTES = 1_000_000


class Health(msgspec.Struct, frozen=True):
    """The rules of health that a job breaks, worst first. `status` is `ok` if there is none but `info`."""

    status: str
    findings: tuple[Finding, ...]


class LogList(msgspec.Struct, frozen=True):
    """The processes whose logs can be read."""

    processes: list[str]


@router.get("/jobs/{jobid}/facts", **schemas.answers(JobFacts, 404))
def facts(
    jobid: JobId,
    request: Request,
    shown: Shown,
    checkpoints: Annotated[int, Query(ge=0, le=MOST_CHECKPOINTS, description="How many of the newest.")] = 100,
    after: Annotated[int, Query(ge=0, le=LARGEST, description="Only checkpoints of this id and newer ones.")] = 0,
    subtasks: Annotated[bool, Query(description="Whether checkpoints come with their subtasks.")] = False,
    samples_after: Annotated[int, Query(ge=0, le=LARGEST, description="Only samples after this time, in ms.")] = 0,
) -> Response:
    """All that is known about a job. `X-Strandline-Control` says whether it can be steered through this server."""
    view = shown.view(jobid)
    known = facts_of(view)
    wanted = Wanted(checkpoints, after, subtasks, samples_after)
    answer = shown.answer(known, request, lambda: bounded(known, wanted))
    answer.headers["x-strandline-control"] = "no" if view.control is None else "yes"
    return answer


@router.get("/jobs/{jobid}/facts/checkpoints/{checkpointid}", **schemas.answers(CheckpointStats, 404))
def checkpoint(
    jobid: JobId,
    checkpointid: Annotated[int, Path(ge=0, le=LARGEST)],
    request: Request,
    shown: Shown,
) -> Response:
    """One checkpoint with its subtasks."""
    known = shown.facts(jobid)
    found = checkpoint_of(known, checkpointid)
    return shown.answer(known, request, lambda: found)


@router.get("/metrics", response_class=PlainTextResponse, responses=schemas.errors())
def metrics(
    shown: Shown,
    subtasks: Annotated[bool, Query(description="All subtasks of jobs that have more than 200.")] = False,
) -> Response:
    """The metrics of all jobs for Prometheus."""
    return Response(shown.metrics(subtasks=subtasks), media_type=CONTENT_TYPE)


@router.get("/jobs/{jobid}/health", **schemas.answers(Health, 404))
def health(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The health of a job in words."""
    known = shown.facts(jobid)
    worst = next((one.severity for one in known.health if one.severity != "info"), "ok")
    return shown.answer(known, request, lambda: Health(worst, known.health))


@router.get("/jobs/{jobid}/processes", **schemas.answers(LogList, 404))
@router.get("/jobs/{jobid}/logs", **schemas.answers(LogList, 404))
def logs(jobid: JobId, shown: Shown) -> Response:
    """The processes whose logs can be read. Needs the token."""
    return json(LogList(list(shown.view(jobid).processes())))


@router.get("/jobs/{jobid}/logs/{process}", **schemas.answers(LogText, 404))
def log_text(
    jobid: JobId,
    process: Annotated[str, Path(min_length=1, max_length=200)],
    shown: Shown,
    max_bytes: Annotated[int, Query(ge=1, le=MOST_LOG_BYTES)] = 100_000,
) -> Response:
    """The end of the log of one process. Needs the token."""
    view = shown.view(jobid)
    if process not in view.processes():
        raise RestError(404, f"There is no log of {process}: GET /jobs/{jobid}/logs lists those that exist.")
    try:
        return json(view.log(process, max_bytes))
    except StrandlineError as error:
        raise RestError(404, str(error)) from error
