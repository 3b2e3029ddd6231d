"""Values of the changelog that no option sets. Tests choose others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChangelogTuning:
    """The defaults are what a job runs with."""

    upkeep_interval: float = 0.25
    """Seconds between two looks at what has to be materialized or merged."""
    rest: float = 5.0
    """Seconds without another try after a merge or an early materialization failed."""
    early_bytes: int = 32 << 20
    """Segments below this size are never a reason to materialize early, however small the state is."""
    merge_from: int = 64
    """A subtask with so many segments gets some of them merged."""
    merge_at_least: int = 16
    """A merge takes at least so many segments."""
    retry_delay: float = 0.2
    """Seconds between a failed upload of segments and the next attempt."""


PRODUCTION = ChangelogTuning()
