"""The states of jobs and subtasks in Flink's words.

| ours | Flink's job | Flink's subtasks | why |
|---|---|---|---|
| starting | INITIALIZING | INITIALIZING | the slots open their state |
| running | RUNNING | RUNNING | |
| restarting | RESTARTING | INITIALIZING | |
| rescaling | RESTARTING | INITIALIZING | Flink's adaptive scheduler restarts a job to rescale it |
| finished | FINISHED | FINISHED | |
| stopped | FINISHED | FINISHED | as after Flink's `stop` |
| cancelled | CANCELED | CANCELED | |
| failed | FAILED | FAILED | |
| any, but its driver is lost | SUSPENDED | CANCELED | nobody runs the job, and it can go on from its checkpoint |
"""

from __future__ import annotations

from typing import Literal

from strandline.observe.facts import JobFacts
from strandline.runtime.driver.status import RunStatus

JobState = Literal["INITIALIZING", "RUNNING", "RESTARTING", "FINISHED", "CANCELED", "FAILED", "SUSPENDED"]
TaskState = Literal["INITIALIZING", "RUNNING", "FINISHED", "CANCELED", "FAILED"]

_JOB: dict[RunStatus, JobState] = {
    RunStatus.STARTING: "INITIALIZING",
    RunStatus.RUNNING: "RUNNING",
    RunStatus.RESTARTING: "RESTARTING",
    RunStatus.RESCALING: "RESTARTING",
    RunStatus.FINISHED: "FINISHED",
    RunStatus.STOPPED: "FINISHED",
    RunStatus.CANCELLED: "CANCELED",
    RunStatus.FAILED: "FAILED",
}
_TASK: dict[JobState, TaskState] = {
    "INITIALIZING": "INITIALIZING",
    "RUNNING": "RUNNING",
    "RESTARTING": "INITIALIZING",
    "FINISHED": "FINISHED",
    "CANCELED": "CANCELED",
    "FAILED": "FAILED",
    "SUSPENDED": "CANCELED",
}

TASK_STATES = (
    "created",
    "scheduled",
    "deploying",
    "initializing",
    "running",
    "finished",
    "canceling",
    "canceled",
    "failed",
    "reconciling",
)
"""All states of a subtask that Flink counts, in lower case as in `tasks` of `/jobs/overview`."""


def state_of(status: RunStatus) -> JobState:
    """The state of a job whose driver lives."""
    return _JOB[status]


def job_state(facts: JobFacts) -> JobState:
    """The state of a job."""
    return "SUSPENDED" if facts.driver_lost and not facts.status.ended else _JOB[facts.status]


def task_state(facts: JobFacts) -> TaskState:
    """The state of all subtasks of a job. They start and end together."""
    return _TASK[job_state(facts)]
