"""The states in the life of a run."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """Where a run stands. A status equals its text: `run.status == "running"`.

    `run.status.ended` says whether the run is over.

    Attributes:
        STARTING: The first generation starts.
        RUNNING: The run processes rows.
        RESTARTING: The run failed, and starts again from its last completed checkpoint.
        RESCALING: The run changes its number of subtasks.
        FINISHED: The run ended by itself, because its sources are drained.
        STOPPED: `stop()` ended the run, after a last checkpoint.
        CANCELLED: `cancel()` ended the run.
        FAILED: The run ended with an error: see `JobRun.error`.
    """

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    RESCALING = "rescaling"
    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self in _ENDED


_ENDED = frozenset({RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.CANCELLED, RunStatus.FAILED})
