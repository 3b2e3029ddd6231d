"""Flink's paths about checkpoints and rescales that only read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import JobFacts
from strandline.rest import flink_checkpoints as flink
from strandline.rest import flink_rescales as rescales
from strandline.rest.answers import RestError
from strandline.rest.flink_checkpoint_config import CheckpointConfigInfo, checkpoint_config
from strandline.rest.service import LARGEST, JobId, Shown, VertexId, schemas

router = APIRouter()

CheckpointId = Annotated[int, Path(ge=0, le=LARGEST, description="The id of the checkpoint.")]


@router.get("/jobs/{jobid}/checkpoints", **schemas.answers(flink.CheckpointingStatistics, 404))
def checkpoints(
    jobid: JobId,
    request: Request,
    shown: Shown,
    history: Annotated[int, Query(ge=0, le=flink.MOST_HISTORY, description="How many of the newest.")] = flink.HISTORY,
) -> Response:
    """The checkpoints of a job: counts, summary, latest and history."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink.checkpointing_statistics(facts, history))


@router.get("/jobs/{jobid}/checkpoints/config", **schemas.answers(CheckpointConfigInfo, 404))
def config(jobid: JobId, request: Request, shown: Shown) -> Response:
    """How a job takes checkpoints."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: checkpoint_config(facts))


@router.get("/jobs/{jobid}/checkpoints/details/{checkpointid}", **schemas.answers(flink.CheckpointStatistics, 404))
def details(jobid: JobId, checkpointid: CheckpointId, request: Request, shown: Shown) -> Response:
    """One checkpoint with its vertices."""
    facts = shown.facts(jobid)
    stats = checkpoint_of(facts, checkpointid)
    return shown.answer(facts, request, lambda: flink.checkpoint_details(facts, stats))


@router.get(
    "/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}",
    **schemas.answers(flink.TaskCheckpointStatisticsWithSubtasks, 404),
)
def subtasks(jobid: JobId, checkpointid: CheckpointId, vertexid: VertexId, request: Request, shown: Shown) -> Response:
    """The subtasks of one vertex in one checkpoint."""
    facts = shown.facts(jobid)
    found = flink.subtask_details(facts, checkpoint_of(facts, checkpointid), vertexid)
    if found is None:
        raise RestError(404, f"There is no step of the id {vertexid}, so checkpoint {checkpointid} has none either.")
    return shown.answer(facts, request, lambda: found)


@router.get("/jobs/{jobid}/rescales/overview", **schemas.answers(rescales.JobRescalesOverview, 404))
def rescales_overview(jobid: JobId, request: Request, shown: Shown) -> Response:
    """How often the parallelism of a job changed, and the last change."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: rescales.rescales_overview(facts))


@router.get("/jobs/{jobid}/rescales/history", **schemas.list_of(rescales.JobRescaleDetails, 404))
def rescales_history(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The changes of a job's parallelism, newest first."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: rescales.rescales_history(facts))


@router.get("/jobs/{jobid}/rescales/summary", **schemas.answers(rescales.JobRescalesSummary, 404))
def rescales_summary(jobid: JobId, request: Request, shown: Shown) -> Response:
    """How long the changes of a job's parallelism took."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: rescales.rescales_summary(facts))


@router.get("/jobs/{jobid}/rescales/config", **schemas.answers(rescales.JobRescaleConfigInfo, 404))
def rescales_config(jobid: JobId, request: Request, shown: Shown) -> Response:
    """How a job is rescaled."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, rescales.rescales_config)


@router.get("/jobs/{jobid}/rescales/details/{rescaleuuid}", **schemas.answers(rescales.JobRescaleDetails, 404))
def rescale_details(
    jobid: JobId,
    rescaleuuid: Annotated[str, Path(pattern="^[0-9a-f-]{36}$", description="`rescaleUuid` of the history.")],
    request: Request,
    shown: Shown,
) -> Response:
    """One change of a job's parallelism, with the states that the job went through."""
    facts = shown.facts(jobid)
    found = rescales.rescale_details(facts, rescaleuuid)
    if found is None:
        raise RestError(404, f"Could not find rescale statistics for rescale {rescaleuuid}.")
    return shown.answer(facts, request, lambda: found)


def checkpoint_of(facts: JobFacts, id: int) -> CheckpointStats:
    """The figures of a checkpoint. One that the history does not hold is a 404."""
    found = next((one for one in reversed(facts.checkpoints.history) if one.id == id), None)
    if found is None:
        raise RestError(404, f"Could not find checkpointing statistics for checkpoint {id}.")
    return found
