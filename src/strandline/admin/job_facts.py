"""The facts and logs of a job that was found: from its server while it runs, else from its history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from strandline.admin.found_jobs import FoundJob, Where
from strandline.admin.problems import NoSuchJobError, NotReachedError, NotRunningError
from strandline.admin.rest_client import RestClient
from strandline.observe.facts import JobFacts
from strandline.observe.registration import local_runs
from strandline.observe.views import JobView, LogText

T = TypeVar("T")


def facts_of(job: FoundJob, where: Where) -> JobFacts:
    """The newest facts of a job. Raises `NotReachedError` if it runs and its server does not answer."""
    if job.served is not None:
        try:
            return asked(job, lambda client: client.facts(job.id, checkpoints=20, samples=True))
        except NotRunningError:
            pass  # it ended meanwhile: its history has the facts
    return history_of(job, where).facts()


def asked(job: FoundJob, ask: Callable[[RestClient], T]) -> T:
    """Ask the server of a job. Raises `NotRunningError` if it does not answer because the job ended meanwhile."""
    try:
        return ask(job.client())
    except (NotReachedError, NoSuchJobError) as error:
        if ended(job):
            raise NotRunningError(f"job {job.name!r} does not run any more") from error
        raise


def ended(job: FoundJob) -> bool:
    """Whether the run of this host that was found has ended, or its driver is gone."""
    if job.run is None:
        return False
    run = job.run.entry.run
    return all(not other.alive for other in local_runs() if other.entry.run == run)


def history_of(job: FoundJob, where: Where) -> JobView:
    """The history of a job that does not run, or runs elsewhere. Raises `NoSuchJobError` if it has none."""
    from strandline.observe.history_jobs import HistoryJobs

    assert job.run is not None, "a job at a server is asked there"
    place = job.run.entry.checkpoint_dir
    view = HistoryJobs([place], where.storage_options).get(job.id)
    if view is None:
        raise NoSuchJobError(f"job {job.name!r} has no history in {place}; it may have been deleted")
    return view


@dataclass(frozen=True, slots=True)
class Logs:
    """The logs of one job, wherever they are."""

    names: Callable[[], list[str]]
    read: Callable[[str, int], LogText]
    """The end of the log of a process: at most so many bytes."""
    grow: bool
    """Whether the job runs here, so that lines may be added."""


def logs_of(job: FoundJob, where: Where) -> Logs:
    """The logs of a job: from its server while it runs, else from its history."""
    if job.served is not None and not ended(job):
        client = job.steered()
        return Logs(
            lambda: asked(job, lambda _client: client.processes(job.id)),
            lambda process, size: asked(job, lambda _client: client.log(job.id, process, size)),
            grow=True,
        )
    view = history_of(job, where)
    return Logs(lambda: list(view.processes()), view.log, grow=False)
