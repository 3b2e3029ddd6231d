"""Makes one document of what the history tells about the runs of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from strandline.checkpoint.stats import CheckpointCounts, CheckpointStats
from strandline.observe.facts import KEPT_SAMPLES, CheckpointsFacts, DriverFacts, JobFacts, job_id
from strandline.observe.history_record import (
    KEPT_CHECKPOINTS,
    KEPT_FAILURES,
    KEPT_RECOVERIES,
    KEPT_STATUSES,
    Events,
    with_few_subtasks,
)
from strandline.observe.run_entries import FoundRun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the files of one run tell."""

    found: FoundRun
    head: JobFacts | None
    """Its newest facts without the lists; None if no part can be read."""
    events: tuple[Events, ...]
    """What happened to it, in the order of its parts."""


def merged(runs: Sequence[RunFacts], checkpoint_dir: str, job: str) -> JobFacts:
    """The facts of the newest run, with what happened to the others in front. `runs` are newest first."""
    newest = runs[0]
    alive = newest.found.alive
    head = _told_by_entry(newest.head or _without_parts(newest.found), newest.found)
    return msgspec.structs.replace(
        head,
        # What the storage tells counts, not what somebody wrote into a file: a folder may have been renamed.
        id=job_id(checkpoint_dir, job),
        name=job,
        run=newest.found.entry.run,
        checkpoint_dir=checkpoint_dir,
        driver_lost=not alive and not head.status.ended,
        subtasks=head.subtasks if alive else (),
        checkpoints=_checkpoints(runs, head, alive),
        failures=_newest(KEPT_FAILURES, (one for events in _events(runs) for one in events.failures)),
        recoveries=_newest(KEPT_RECOVERIES, (one for events in _events(runs) for one in events.recoveries)),
        rescalings=_newest(KEPT_RECOVERIES, (one for events in _events(runs) for one in events.rescalings)),
        statuses=_newest(KEPT_STATUSES, (one for events in newest.events for one in events.statuses)),
        samples=_newest(KEPT_SAMPLES, (one for events in newest.events for one in events.samples)),
    )


def _told_by_entry(head: JobFacts, found: FoundRun) -> JobFacts:
    """The entry may know that the run lived on after the last part of its history, or that it has ended."""
    if head.status.ended:
        return head
    if found.liveness != "ended":
        return msgspec.structs.replace(head, taken_ms=max(head.taken_ms, found.entry.beat_ms))
    ended = found.entry.beat_ms or head.taken_ms
    return msgspec.structs.replace(head, status=found.entry.status, end_ms=ended)


def _without_parts(found: FoundRun) -> JobFacts:
    entry = found.entry
    return JobFacts(
        id=entry.job_id,
        name=entry.job,
        run=entry.run,
        status=entry.status,
        taken_ms=max(entry.beat_ms, entry.started_ms),
        start_ms=entry.started_ms,
        driver=DriverFacts(host=entry.host, pid=entry.pid, user=entry.user, ui_url=entry.rest_url),
    )


def _events(runs: Sequence[RunFacts]) -> Iterable[Events]:
    """Of all runs, oldest first."""
    return (events for run in reversed(runs) for events in run.events)


def _newest(limit: int, items: Iterable[T]) -> tuple[T, ...]:
    return tuple(items)[-limit:]


def _checkpoints(runs: Sequence[RunFacts], head: JobFacts, alive: bool) -> CheckpointsFacts:
    ended: dict[int, CheckpointStats] = {}
    for events in _events(runs):
        for one in events.checkpoints:
            # An id is used again if its checkpoint never completed.
            ended.pop(one.id, None)
            ended[one.id] = one
    history = with_few_subtasks(sorted(ended.values(), key=lambda one: one.id)[-KEPT_CHECKPOINTS:])
    by_id = {one.id: one for one in history}
    heads = [run.head.checkpoints for run in runs if run.head is not None]

    def last(name: str) -> CheckpointStats | None:
        found: CheckpointStats | None = next((one for each in heads if (one := getattr(each, name))), None)
        detailed = by_id.get(found.id) if found is not None else None
        same = detailed is not None and found is not None and detailed.trigger_time == found.trigger_time
        return detailed if same else found

    return CheckpointsFacts(
        counts=_counts(head.checkpoints.counts, alive),
        history=(*history, *(head.checkpoints.history if alive else ())),
        last_completed=last("last_completed"),
        last_failed=last("last_failed"),
        last_savepoint=last("last_savepoint"),
        restored=next((each.restored for each in heads if each.restored), None),
    )


def _counts(counts: CheckpointCounts, alive: bool) -> CheckpointCounts:
    """Those of the newest run, as while it ran. Only a run that is alive has checkpoints in progress."""
    return counts if alive else replace(counts, total=counts.total - counts.in_progress, in_progress=0)
