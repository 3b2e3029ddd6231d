"""The states in the life of a run."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """Where a run stands. A status equals its text: `run.status == "running"`."""

    STARTING = "starting"
    """The first generation starts."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """The run failed, and starts again from its last completed checkpoint."""
    RESCALING = "rescaling"
    """The run changes its number of subtasks."""
    FINISHED = "finished"
    """The run ended by itself, because its sources are drained."""
    STOPPED = "stopped"
    """`stop()` ended the run, after a last checkpoint."""
    CANCELLED = "cancelled"
    """`cancel()` ended the run."""
    FAILED = "failed"
    """The run ended with an error: see `JobRun.error`."""

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self in _ENDED


_ENDED = frozenset({RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.CANCELLED, RunStatus.FAILED})
