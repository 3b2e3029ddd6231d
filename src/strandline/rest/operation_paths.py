"""Paths that steer a job. Each starts an operation and answers 202 with the id by which to ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response

from strandline.observe.views import JobControl, JobView
from strandline.rest import flink_operations as flink
from strandline.rest.answers import RestError
from strandline.rest.flink_jobs import max_parallelism
from strandline.rest.service import Body, JobId, Service, Shown, control_of, decoded, facts_of, json, schemas
from strandline.rest.triggers import Kind, Progress, Say
from strandline.runtime.driver.restore.disposal import dispose_savepoint
from strandline.runtime.driver.restore.savepoints import SavepointFormat, open_savepoint

router = APIRouter()

TriggerPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The `request-id` of the operation.")]
MOST_PARALLELISM = 32_768
_STARTED = schemas.answers(flink.TriggerResponse, 404, 409, status=202)
_FORMATS: dict[flink.FormatType, SavepointFormat] = {"CANONICAL": "canonical", "NATIVE": "native"}


@router.post("/jobs/{jobid}/checkpoints", **_STARTED, **schemas.body(flink.CheckpointRequest))
def trigger_checkpoint(jobid: JobId, shown: Shown, body: Body) -> Response:
    """Take a checkpoint."""
    view, asked = shown.view(jobid), decoded(body, flink.CheckpointRequest)
    if asked.checkpointType == "INCREMENTAL" and facts_of(view).config.get("incremental") is False:
        raise RestError(400, "The job is configured with incremental = false, so it takes full checkpoints only.")
    full = asked.checkpointType == "FULL"
    return _start(
        shown,
        view,
        "checkpoint",
        asked.triggerId,
        lambda control, _say: control.trigger_checkpoint(full=full),
        _checkpoints(view, savepoint=False),
    )


@router.get("/jobs/{jobid}/checkpoints/{triggerid}", **schemas.answers(flink.CheckpointStatus, 404))
def checkpoint_status(jobid: JobId, triggerid: TriggerPath, shown: Shown) -> Response:
    """How far a triggered checkpoint is."""
    return _status(shown, jobid, triggerid, "checkpoint")


@router.post("/jobs/{jobid}/savepoints", **_STARTED, **schemas.body(flink.SavepointRequest))
def trigger_savepoint(jobid: JobId, shown: Shown, body: Body) -> Response:
    """Take a savepoint, and cancel the job afterwards if `cancel-job` is set."""
    view, asked = shown.view(jobid), decoded(body, flink.SavepointRequest)

    def work(control: JobControl, _say: Say) -> str:
        path = control.savepoint(asked.target_directory, _FORMATS[asked.formatType])
        if asked.cancel_job:
            control.cancel()
        return path

    return _start(shown, view, "savepoint", asked.triggerId, work, _checkpoints(view, savepoint=True))


@router.get("/jobs/{jobid}/savepoints/{triggerid}", **schemas.answers(flink.SavepointStatus, 404))
def savepoint_status(jobid: JobId, triggerid: TriggerPath, shown: Shown) -> Response:
    """How far a savepoint or a stop is."""
    return _status(shown, jobid, triggerid, "savepoint", "stop")


@router.post("/jobs/{jobid}/stop", **_STARTED, **schemas.body(flink.StopRequest))
def stop(jobid: JobId, shown: Shown, body: Body) -> Response:
    """End the job after a last checkpoint, and after a savepoint if there is a directory."""
    view, asked = shown.view(jobid), decoded(body, flink.StopRequest)
    last = _checkpoints(view, savepoint=asked.targetDirectory is not None)
    return _start(
        shown,
        view,
        "stop",
        asked.triggerId,
        lambda control, _say: control.stop(asked.targetDirectory, _FORMATS[asked.formatType], drain=asked.drain),
        lambda: flink.restore_progress(view.facts(), "opening the state; then the job stops") or last(),
    )


@router.get("/jobs/{jobid}/stop/{triggerid}", **schemas.answers(flink.SavepointStatus, 404))
def stop_status(jobid: JobId, triggerid: TriggerPath, shown: Shown) -> Response:
    """How far a stop is."""
    return _status(shown, jobid, triggerid, "stop")


@router.patch("/jobs/{jobid}", **schemas.answers(flink.Accepted, 404, 409, status=202))
def cancel(jobid: JobId, shown: Shown, mode: Annotated[Literal["cancel"], Query()] = "cancel") -> Response:
    """Cancel the job."""
    view = shown.view(jobid)
    _start(shown, view, "cancel", None, lambda control, _say: control.cancel())
    return json(flink.Accepted(), 202)


@router.patch("/jobs/{jobid}/rescaling", **_STARTED)
@router.post("/jobs/{jobid}/rescaling", **_STARTED)
def rescale(
    jobid: JobId,
    shown: Shown,
    parallelism: Annotated[int, Query(ge=1, le=MOST_PARALLELISM)],
    triggerId: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
) -> Response:
    """Change the number of subtasks of each step."""
    view = shown.view(jobid)
    most = max_parallelism(facts_of(view))
    if parallelism > most:
        raise RestError(400, f"parallelism: the job has {most} key groups, so at most {most} subtasks of each step.")
    return _start(
        shown,
        view,
        "rescale",
        triggerId,
        lambda control, say: control.rescale(parallelism, say),
        lambda: flink.restore_progress(view.facts(), f"opening the state of {parallelism} subtasks"),
    )


@router.get("/jobs/{jobid}/rescaling/{triggerid}", **schemas.answers(flink.RescaleStatus, 404))
def rescale_status(jobid: JobId, triggerid: TriggerPath, shown: Shown) -> Response:
    """How far a change of parallelism is."""
    return _status(shown, jobid, triggerid, "rescale")


@router.post("/jobs/{jobid}/flamegraph", **_STARTED, **schemas.body(flink.ProfileRequest))
@router.post("/jobs/{jobid}/profile", **_STARTED, **schemas.body(flink.ProfileRequest))
def profile(jobid: JobId, shown: Shown, body: Body) -> Response:
    """Sample the Python threads of one slot."""
    view, asked = shown.view(jobid), decoded(body, flink.ProfileRequest)
    return _start(
        shown, view, "profile", asked.triggerId, lambda control, _say: control.profile(asked.subtask, asked.seconds)
    )


@router.get("/jobs/{jobid}/flamegraph/{triggerid}", **schemas.answers(flink.ProfileStatus, 404))
@router.get("/jobs/{jobid}/profile/{triggerid}", **schemas.answers(flink.ProfileStatus, 404))
def profile_status(jobid: JobId, triggerid: TriggerPath, shown: Shown) -> Response:
    """The sampled stacks. Needs the token."""
    return _status(shown, jobid, triggerid, "profile")


@router.post(
    "/savepoint-disposal",
    **schemas.answers(flink.TriggerResponse, 409, status=202),
    **schemas.body(flink.DisposalRequest, required=True),
)
def dispose(shown: Shown, body: Body) -> Response:
    """Delete a savepoint. The driver's own credentials must reach it."""
    asked = decoded(body, flink.DisposalRequest)
    id = shown.triggers.start("", "disposal", asked.triggerId, lambda _say: _dispose(asked.savepoint_path))
    return json(flink.TriggerResponse(id), 202)


@router.get("/savepoint-disposal/{triggerid}", **schemas.answers(flink.OperationStatus, 404))
def disposal_status(triggerid: TriggerPath, shown: Shown) -> Response:
    """How far the deletion of a savepoint is."""
    return json(flink.operation_status(shown.triggers.get("", triggerid, "disposal")))


def _dispose(path: str) -> None:
    dispose_savepoint(*open_savepoint(path, {}))


def _start(
    shown: Service,
    view: JobView,
    kind: Kind,
    trigger: str | None,
    work: Callable[[JobControl, Say], Any],
    progress: Callable[[], Progress | None] = lambda: None,
) -> Response:
    if trigger is None or not shown.triggers.knows(view.id, kind, trigger):
        control = control_of(view)
        trigger = shown.triggers.start(view.id, kind, trigger, lambda say: work(control, say), progress)
    return json(flink.TriggerResponse(trigger), 202)


def _status(shown: Service, job: str, trigger: str, *kinds: Kind) -> Response:
    view = shown.view(job)
    return json(flink.operation_status(shown.triggers.get(view.id, trigger, *kinds)))


def _checkpoints(view: JobView, *, savepoint: bool) -> Callable[[], Progress | None]:
    """The progress of the checkpoint that is triggered now, from the facts of the job."""
    # A checkpoint is due a moment before it is asked for if one was due already.
    since_ms = int(time.time() * 1000) - 1000
    return lambda: flink.checkpoint_progress(view.facts(), since_ms, savepoint=savepoint)
