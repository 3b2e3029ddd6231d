"""Flink's JSON about the whole server: how many jobs and slots there are, and what the page may do."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct, field

from strandline.observe.facts import JobFacts
from strandline.rest.flink_states import job_state

REFRESH_MS = 3000


class ClusterOverview(Struct, frozen=True, rename="kebab"):
    """The jobs of this server in numbers. `flink-version` is the version of Strandline."""

    taskmanagers: int
    slots_total: int
    slots_available: int
    jobs_running: int
    jobs_finished: int
    jobs_cancelled: int
    jobs_failed: int
    flink_version: str
    flink_commit: str = ""


class Features(Struct, frozen=True, rename="kebab"):
    """What the page may do."""

    web_submit: bool = False
    web_cancel: bool = True
    web_rescale: bool = True
    web_history: bool = False


class DashboardConfiguration(Struct, frozen=True, rename="kebab"):
    """What the page needs to know."""

    refresh_interval: int
    timezone_name: str
    timezone_offset: int
    flink_version: str
    flink_revision: str = ""
    features: Features = field(default_factory=Features)


def cluster_overview(jobs: Sequence[JobFacts], version: str) -> ClusterOverview:
    """`GET /overview`."""
    states = [job_state(one) for one in jobs]
    managers = {(one.id, subtask.task_manager) for one in jobs for subtask in one.subtasks}
    slots = {(one.id, subtask.index) for one in jobs for subtask in one.subtasks}
    return ClusterOverview(
        taskmanagers=len(managers),
        slots_total=len(slots),
        slots_available=0,
        jobs_running=sum(one.runs for one in jobs),
        jobs_finished=states.count("FINISHED"),
        jobs_cancelled=states.count("CANCELED"),
        jobs_failed=states.count("FAILED"),
        flink_version=version,
    )


def dashboard_configuration(version: str) -> DashboardConfiguration:
    """`GET /config`."""
    local = time.localtime()
    return DashboardConfiguration(REFRESH_MS, local.tm_zone, local.tm_gmtoff * 1000, version)
