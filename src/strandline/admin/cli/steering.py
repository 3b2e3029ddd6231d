"""The commands `checkpoint`, `stop`, `cancel` and `rescale`, and the part of `savepoint` that takes one."""

from __future__ import annotations

import os
import time
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from strandline.admin.cli.options import JobName, Json, TokenFile, Url, looked_for, print_json
from strandline.admin.problems import NotReachedError, NotRunningError
from strandline.errors import StrandlineError

if TYPE_CHECKING:
    from strandline.admin.found_jobs import FoundJob, Where
    from strandline.admin.rest_client import RestClient

ENDED_AFTER: Final = 60.0
"""How many seconds `cancel` waits for the end of a run."""


class SavepointType(StrEnum):
    """What a savepoint is made of."""

    canonical = "canonical"
    native = "native"


Type = Annotated[
    SavepointType,
    typer.Option("--type", help="canonical: restores into either backend. native: RocksDB's own files, faster."),
]
Detached = Annotated[bool, typer.Option("--detached", help="Do not wait: print the id of the operation and return.")]


def take_savepoint(
    job: str, directory: str | None, kind: SavepointType, where: Where, *, detached: bool, as_json: bool
) -> None:
    """Take a savepoint of a running job."""
    found = _found(job, where)
    body = {"target-directory": _absolute(directory), "formatType": kind.upper()}
    said = f'Triggering {kind} savepoint for job "{found.name}".'
    result = _operate(found, "savepoints", "savepoints", body, f"savepoint of {found.name}", said, detached=detached)
    if not _print_triggered(found, "savepoint", result, as_json):
        path = str(result.get("location", ""))
        _print(_facts(found, path=path, type=kind.value), f"Savepoint completed. Path: {path}", as_json)


def checkpoint(
    job: JobName,
    full: Annotated[bool, typer.Option("--full", help="Upload the whole state, not only what is new.")] = False,
    detached: Detached = False,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
) -> None:
    """Take a checkpoint now."""
    found = _found(job, looked_for(url, token_file))
    kind = "FULL" if full else "CONFIGURED"
    body = {"checkpointType": kind}
    result = _operate(found, "checkpoints", "checkpoints", body, f"checkpoint of {found.name}", detached=detached)
    if not _print_triggered(found, "checkpoint", result, as_json):
        number = result.get("checkpointId")
        text = f"Checkpoint({kind}) {number} for job {found.name} ({found.id}) completed."
        _print(_facts(found, checkpoint=number, type=kind), text, as_json)


def stop(
    job: JobName,
    savepoint_path: Annotated[
        str | None,
        typer.Option("--savepoint-path", "-p", metavar="DIR", help="Also make a savepoint in this directory."),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="For good: before, close all windows and fire all event-time timers."),
    ] = False,
    kind: Type = SavepointType.canonical,
    detached: Detached = False,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
) -> None:
    """End a job after a last checkpoint: every processed row is visible. With -p, a savepoint is made as well."""
    where = looked_for(url, token_file)
    found = _found(job, where)
    found.steered()  # a job that does not run is an error before anything is asked
    directory = _absolute(savepoint_path)
    body = {"targetDirectory": directory, "formatType": kind.upper(), "drain": drain}
    begins = f'Draining job "{found.name}", then suspending it' if drain else f'Suspending job "{found.name}"'
    said = f"{begins} with a {'savepoint' if directory else 'last checkpoint'}."
    begun = time.time()
    try:
        result = _operate(found, "stop", "stop", body, f"stopping {found.name}", said, detached=detached)
    except NotRunningError:
        # The driver may be gone before anybody could ask for the result. Its history has it.
        path = _stopped(found, where, begun, savepoint=directory is not None)
        result = {"location": path}
    if _print_triggered(found, "stop", result, as_json):
        return
    path = result.get("location")
    text = f"Savepoint completed. Path: {path}" if path else f"Stopped job {found.name} ({found.id})."
    _print(_facts(found, path=path, status="stopped"), text, as_json)


def cancel(job: JobName, url: Url = "", token_file: TokenFile = "", as_json: Json = False) -> None:
    """End a job at once, without a last checkpoint. It can go on from its newest completed one."""
    from strandline.admin.cli.progress import progress_of
    from strandline.admin.job_facts import asked, ended
    from strandline.admin.rest_client import Progress

    found = _found(job, looked_for(url, token_file))
    client = found.steered()
    asked(found, lambda _client: client.cancel(found.id))
    _say(f"Cancelling job {found.id}.")
    deadline = time.monotonic() + ENDED_AFTER
    with progress_of(f"cancelling {found.name}") as reporter:
        while not (ended(found) or _has_ended(client, found)):
            if time.monotonic() > deadline:
                raise StrandlineError(f"job {found.name!r} was told to end, but still runs after {ENDED_AFTER:g} s")
            reporter.report(Progress("the run ends"))
            time.sleep(0.1)
    _print(_facts(found, status="cancelled"), f"Cancelled job {found.name} ({found.id}).", as_json)


def rescale(
    job: JobName,
    parallelism: Annotated[int, typer.Argument(metavar="N", min=1, help="The new number of subtasks of each step.")],
    detached: Detached = False,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
) -> None:
    """Change the number of subtasks while the job runs."""
    from strandline.admin.cli.words import lasted

    found = _found(job, looked_for(url, token_file))
    path = f"rescaling?parallelism={parallelism}"
    title = f"rescaling {found.name} to {parallelism}"
    result = _operate(found, path, "rescaling", None, title, method="PATCH", detached=detached)
    if _print_triggered(found, "rescale", result, as_json):
        return
    facts = result.get("rescaling") or {}
    text = (
        f"Rescaled job {found.name} ({found.id}) from {facts.get('parallelism_before')} to "
        f"{facts.get('parallelism')} subtasks in {lasted(facts.get('duration_ms', 0.0))}; it paused for "
        f"{lasted(facts.get('pause_ms', 0.0))}."
    )
    _print(_facts(found, rescaling=facts), text, as_json)


def _found(job: str, where: Where) -> FoundJob:
    from strandline.admin.found_jobs import find_job

    return find_job(job, where)


def _absolute(directory: str | None) -> str | None:
    """A directory as the driver must know it: its working directory is another one."""
    return directory if directory is None or "://" in directory else os.path.abspath(directory)


def _operate(
    job: FoundJob,
    path: str,
    polled: str,
    body: dict[str, Any] | None,
    title: str,
    said: str = "",
    *,
    method: str = "POST",
    detached: bool = False,
) -> dict[str, Any]:
    """Start an operation, and wait for its result unless it is detached. `said` is printed when it has begun."""
    from strandline.admin.cli.progress import progress_of
    from strandline.admin.job_facts import asked, ended

    client = job.steered()
    trigger = uuid.uuid4().hex  # a request that is sent twice starts one operation
    sent = {**body, "triggerId": trigger} if body is not None else None
    where = path if body is not None else f"{path}&triggerId={trigger}"
    request = asked(job, lambda _client: client.trigger(job.id, where, sent, method=method))
    if said:
        _say(said)
    if detached:
        return {"request-id": request}
    with progress_of(title) as reporter:
        return asked(
            job, lambda _client: client.result(job.id, polled, request, reporter.report, lost=lambda: ended(job))
        )


def _has_ended(client: RestClient, job: FoundJob) -> bool:
    """Whether the server says that the run has ended. A server that is gone says so for a job of another host."""
    try:
        return client.facts(job.id).status.ended
    except NotReachedError:
        return job.run is None


def _stopped(job: FoundJob, where: Where, begun: float, *, savepoint: bool) -> str | None:
    """The savepoint of a run that has stopped. Raises `NotRunningError` if the run ended otherwise."""
    from strandline.admin.job_facts import facts_of

    if job.run is None:
        raise NotRunningError(f"job {job.name!r} does not answer any more; whether it stopped is not known")
    facts = facts_of(job, where)
    if facts.run != job.run.entry.run or facts.status != "stopped":
        raise NotRunningError(f"job {job.name!r} ended as {facts.status}: {facts.error or 'no error is known'}")
    last = facts.checkpoints.last_savepoint
    if not savepoint:
        return None
    if last is None or last.trigger_time < begun - 60 or last.path is None:
        raise NotRunningError(f"job {job.name!r} has stopped, but no savepoint of it is known")
    return last.path


def _facts(job: FoundJob, **others: Any) -> dict[str, Any]:
    return {"id": job.id, "name": job.name, **others}


def _print_triggered(job: FoundJob, what: str, result: dict[str, Any], as_json: bool) -> bool:
    """Print the id of an operation that nobody waits for; False if somebody did."""
    request = result.get("request-id")
    if request is None:
        return False
    _print(_facts(job, **{"request-id": request}), f"Successfully triggered {what}, triggerId: {request}", as_json)
    return True


def _print(facts: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    from strandline.admin.cli.console import SafeConsole

    SafeConsole().print(text, soft_wrap=True)


def _say(text: str) -> None:
    """Say what begins, on standard error."""
    from strandline.admin.cli.console import SafeConsole

    SafeConsole(stderr=True).print(text, soft_wrap=True)
