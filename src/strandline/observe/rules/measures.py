"""How rules read figures that jump: averages of minutes, medians of checkpoints, thresholds with hysteresis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, TypeVar

from strandline.checkpoint.stats import CheckpointStats
from strandline.config import Config
from strandline.config.option import Option
from strandline.errors import ConfigError
from strandline.observe.facts import JobFacts, Sample
from strandline.runtime.driver.status import RunStatus

Out = TypeVar("Out")

QUIET_MS = 60_000
"""A run is not judged by its load in the minute after it started, restarted or was rescaled: caches are cold, slots
have just opened their state, and rows that waited are caught up with. Back pressure is usual then."""

MINUTE_MS = 60_000
RECENT_CHECKPOINTS = 5
"""Of so many checkpoints the median counts: one slow checkpoint, such as one with a large compaction, is usual."""
LOOKED_BACK = 60
"""Of how many checkpoints rules look at the course at most."""


def running_since(facts: JobFacts) -> int:
    """When the run last began to process rows, in milliseconds since the epoch."""
    for change in reversed(facts.statuses):
        if change.status is RunStatus.RUNNING:
            return change.time_ms
    return facts.start_ms


def settled(facts: JobFacts) -> bool:
    """Whether the run has processed rows for long enough to be judged by its load."""
    return facts.runs and facts.status is RunStatus.RUNNING and facts.taken_ms - running_since(facts) >= QUIET_MS


def settled_samples(facts: JobFacts) -> Sequence[Sample]:
    """The samples since the run settled, oldest first."""
    since = running_since(facts) + QUIET_MS
    samples = facts.samples
    first = next((number for number, one in enumerate(samples) if one.time_ms >= since), len(samples))
    return samples[first:]


def minutes(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> list[float]:
    """The averages of a figure over whole minutes, oldest first. The last minute ends with the last sample.

    A minute counts if samples span most of it: the first one may be cut. Samples without the figure are left out.
    """
    if not samples:
        return []
    end = samples[-1].time_ms
    buckets: dict[int, list[Sample]] = {}
    for one in samples:
        buckets.setdefault((end - one.time_ms) // MINUTE_MS, []).append(one)
    averages = []
    for _back, some in sorted(buckets.items(), reverse=True):
        values = [value for one in some if (value := figure(one)) is not None]
        if values and some[-1].time_ms - some[0].time_ms >= MINUTE_MS * 0.8:
            averages.append(sum(values) / len(values))
    return averages


def raised(values: Iterable[float], on: float, off: float, times: int = 1) -> bool:
    """Whether an alarm is on after a course of values, oldest first.

    It goes on when `times` values in a row are at least `on`, and off with the first one below `off`. Between the two
    it stays as it was, so that a figure near the threshold does not switch it to and fro.
    """
    alarm, above = False, 0
    for value in values:
        above = above + 1 if value >= on else 0
        if above >= times:
            alarm = True
        elif value < off:
            alarm = False
    return alarm


def completed(facts: JobFacts) -> list[CheckpointStats]:
    """The newest completed checkpoints of this run that are no savepoints, oldest first."""
    found: list[CheckpointStats] = []
    for one in reversed(facts.checkpoints.history):
        if one.status == "completed" and one.kind != "savepoint" and one.trigger_time * 1000 >= facts.start_ms:
            found.append(one)
            if len(found) == LOOKED_BACK:
                break
    return found[::-1]


def rolling_medians(values: Sequence[float], width: int = RECENT_CHECKPOINTS) -> list[float]:
    """The medians of every `width` values in a row, oldest first; empty if there are fewer."""
    return [median(values[end - width : end]) for end in range(width, len(values) + 1)]


def setting(facts: JobFacts, option: Option[Any, Out]) -> Out:
    """The value of an option; its default if the facts do not have it, or have it in words."""
    value = facts.config.get(option.name)
    if value is not None:
        try:
            return option.read(value)
        except ConfigError:
            pass
    return option.read(option.default)


def interval_s(facts: JobFacts) -> float:
    """The checkpoint interval in seconds."""
    return setting(facts, Config.checkpoint_interval)


def vertex_name(facts: JobFacts, vertex: str) -> str:
    """The name of a vertex, by its id."""
    return next((one.name for one in facts.graph if one.id == vertex), vertex)
