"""Flink's JSON about rescales, as its adaptive scheduler reports them since Flink 2.3."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from strandline.observe.facts import JobFacts
from strandline.rest.statistics import StatsSummary, spread
from strandline.runtime.driver.recoveries import KEPT_RECOVERIES, Rescaling

MOST_RESCALES = 1_000
_GROUP = "default"


class VertexParallelismRescaleInfo(Struct, frozen=True):
    """One vertex in a rescale."""

    jobVertexId: str
    jobVertexName: str
    slotSharingGroupId: str
    slotSharingGroupName: str
    desiredParallelism: int
    sufficientParallelism: int
    preRescaleParallelism: int | None
    postRescaleParallelism: int | None


class SlotSharingGroupRescaleInfo(Struct, frozen=True):
    """The slots in a rescale. A slot runs one subtask of every step, so there is one group."""

    slotSharingGroupId: str
    slotSharingGroupName: str
    requestResourceProfile: dict[str, str]
    desiredSlots: int
    minimalRequiredSlots: int
    preRescaleSlots: int | None
    postRescaleSlots: int | None
    acquiredResourceProfile: dict[str, str]


class SchedulerStateSpan(Struct, frozen=True):
    """A state that the job went through while it was rescaled."""

    state: str
    enterTimestampInMillis: int | None
    leaveTimestampInMillis: int | None
    durationInMillis: int | None
    stringifiedException: str | None = None


class JobRescaleDetails(Struct, frozen=True):
    """One rescale. `schedulerStates` is null in lists."""

    rescaleUuid: str
    resourceRequirementsUuid: str
    rescaleAttemptId: int
    vertices: dict[str, VertexParallelismRescaleInfo]
    slots: dict[str, SlotSharingGroupRescaleInfo]
    schedulerStates: list[SchedulerStateSpan] | None
    startTimestampInMillis: int
    endTimestampInMillis: int | None
    terminalState: Literal["COMPLETED", "FAILED", "IGNORED"] | None
    triggerCause: Literal["UPDATE_REQUIREMENT"]
    terminatedReason: Literal["SUCCEEDED", "EXCEPTION_OCCURRED"] | None


class RescalesCounts(Struct, frozen=True):
    """How many rescales there were."""

    ignored: int
    inProgress: int
    completed: int
    failed: int


class LatestRescales(Struct, frozen=True):
    """The last rescale of each end."""

    completed: JobRescaleDetails | None
    failed: JobRescaleDetails | None
    ignored: JobRescaleDetails | None


class JobRescalesOverview(Struct, frozen=True):
    """The number of rescales, and the last ones."""

    rescalesCounts: RescalesCounts
    latest: LatestRescales


class JobRescalesSummary(Struct, frozen=True):
    """How long rescales took, in milliseconds."""

    rescalesCounts: RescalesCounts
    rescalesDurationStatsInMillis: StatsSummary
    completedRescalesDurationStatsInMillis: StatsSummary
    ignoredRescalesDurationStatsInMillis: StatsSummary
    failedRescalesDurationStatsInMillis: StatsSummary


class JobRescaleConfigInfo(Struct, frozen=True):
    """How a job is rescaled: on request only, at once. Options of Flink that wait for resources are null."""

    rescaleHistoryMax: int = KEPT_RECOVERIES
    schedulerExecutionMode: str | None = None
    submissionResourceWaitTimeoutInMillis: int | None = None
    submissionResourceStabilizationTimeoutInMillis: int | None = None
    slotIdleTimeoutInMillis: int | None = None
    executingCooldownTimeoutInMillis: int | None = None
    executingResourceStabilizationTimeoutInMillis: int | None = None
    maximumDelayForTriggeringRescaleInMillis: int | None = None
    rescaleOnFailedCheckpointCount: int | None = None


def rescales_overview(facts: JobFacts) -> JobRescalesOverview:
    """`GET /jobs/:jobid/rescales/overview`."""
    all_of_them = rescales_history(facts)
    latest = {one.terminalState: one for one in reversed(all_of_them)}
    return JobRescalesOverview(
        _counts(facts, all_of_them), LatestRescales(latest.get("COMPLETED"), latest.get("FAILED"), None)
    )


def rescales_history(facts: JobFacts) -> list[JobRescaleDetails]:
    """`GET /jobs/:jobid/rescales/history`, newest first."""
    found = [*(_completed(facts, one) for one in facts.rescalings), *_failed(facts)]
    found.sort(key=lambda one: one.startTimestampInMillis, reverse=True)
    return found[:MOST_RESCALES]


def rescales_summary(facts: JobFacts) -> JobRescalesSummary:
    """`GET /jobs/:jobid/rescales/summary`."""
    durations = spread(one.duration_ms for one in facts.rescalings)
    return JobRescalesSummary(
        _counts(facts, rescales_history(facts)), durations, durations, StatsSummary(), StatsSummary()
    )


def rescales_config() -> JobRescaleConfigInfo:
    """`GET /jobs/:jobid/rescales/config`."""
    return JobRescaleConfigInfo()


def rescale_details(facts: JobFacts, rescale: str) -> JobRescaleDetails | None:
    """`GET /jobs/:jobid/rescales/details/:uuid`; None if there is no such rescale."""
    for rescaling in facts.rescalings:
        if _uuid(facts, rescaling.time) == rescale:
            return _completed(facts, rescaling, _spans(rescaling))
    return next((one for one in _failed(facts) if one.rescaleUuid == rescale), None)


def _completed(
    facts: JobFacts, rescaling: Rescaling, spans: list[SchedulerStateSpan] | None = None
) -> JobRescaleDetails:
    before, after = rescaling.parallelism_before, rescaling.parallelism
    return JobRescaleDetails(
        rescaleUuid=_uuid(facts, rescaling.time),
        resourceRequirementsUuid=_uuid(facts, rescaling.time),
        rescaleAttemptId=1,
        vertices={
            vertex.id: VertexParallelismRescaleInfo(
                vertex.id, vertex.name, facts.id, _GROUP, after, after, before, after
            )
            for vertex in facts.steps
        },
        slots={facts.id: SlotSharingGroupRescaleInfo(facts.id, _GROUP, {}, after, after, before, after, {})},
        schedulerStates=spans,
        startTimestampInMillis=round(rescaling.time * 1000),
        endTimestampInMillis=round(rescaling.time * 1000 + rescaling.duration_ms),
        terminalState="COMPLETED",
        triggerCause="UPDATE_REQUIREMENT",
        terminatedReason="SUCCEEDED",
    )


def _failed(facts: JobFacts) -> list[JobRescaleDetails]:
    """The rescales that failed. How long they took and what they asked for is not kept."""
    return [
        JobRescaleDetails(
            rescaleUuid=_uuid(facts, failure.time_ms / 1000),
            resourceRequirementsUuid=_uuid(facts, failure.time_ms / 1000),
            rescaleAttemptId=1,
            vertices={},
            slots={},
            schedulerStates=[SchedulerStateSpan("Executing", None, failure.time_ms, None, failure.cause[:20_000])],
            startTimestampInMillis=failure.time_ms,
            endTimestampInMillis=failure.time_ms,
            terminalState="FAILED",
            triggerCause="UPDATE_REQUIREMENT",
            terminatedReason="EXCEPTION_OCCURRED",
        )
        for failure in facts.failures
        if failure.kind == "rescale"
    ]


def _spans(rescaling: Rescaling) -> list[SchedulerStateSpan]:
    """The job runs while new slots are prepared; then it pauses for a checkpoint and for the slots."""
    start, end = rescaling.time * 1000, rescaling.time * 1000 + rescaling.duration_ms
    paused = end - rescaling.pause_ms
    saved = min(end, paused + rescaling.checkpoint_ms)
    names = ("Executing", "StopWithSavepoint", "Restarting")
    return [
        SchedulerStateSpan(name, round(enter), round(leave), round(leave - enter))
        for name, (enter, leave) in zip(names, pairwise((start, paused, saved, end)), strict=True)
    ]


def _counts(facts: JobFacts, rescales: Iterable[JobRescaleDetails]) -> RescalesCounts:
    states = [one.terminalState for one in rescales]
    in_progress = int(facts.runs and facts.status == "rescaling")
    return RescalesCounts(0, in_progress, states.count("COMPLETED"), states.count("FAILED"))


def _uuid(facts: JobFacts, time: float) -> str:
    """The same rescale has the same id, whoever asks and whenever."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{facts.id}/{round(time * 1000)}"))
