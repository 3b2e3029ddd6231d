"""What happens to a run, as its listeners learn it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from strandline.checkpoint.stats import CheckpointStats
from strandline.runtime.driver.recoveries import Recovery, Rescaling


@dataclass(frozen=True, slots=True)
class Started:
    """The run has begun."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """A batch was committed, and Spark has reported on it."""

    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    """A checkpoint or savepoint was completed or has failed."""

    stats: CheckpointStats


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run has recovered from a failure."""

    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The parallelism of the run was changed."""

    rescaling: Rescaling


@dataclass(frozen=True, slots=True)
class Terminated:
    """The run is over."""


RunEvent: TypeAlias = Started | Progressed | CheckpointEnded | Recovered | Rescaled | Terminated
