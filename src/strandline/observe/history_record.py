"""What happened to one run, bounded: taken from the facts of the run, second by second."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Generic, TypeVar

import msgspec

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import KEPT_SAMPLES, CheckpointsFacts, FailureFacts, JobFacts, Sample, StatusChange
from strandline.runtime.driver.recoveries import Recovery, Rescaling

T = TypeVar("T")

KEPT_CHECKPOINTS = 10_000
KEPT_DETAILED = 1_000
"""How many of the newest checkpoints keep the figures of their subtasks."""
KEPT_SUBTASKS = 100_000
"""How many figures of subtasks are kept in all: a job with many subtasks keeps those of fewer checkpoints."""
KEPT_FAILURES = 200
KEPT_RECOVERIES = 1_000
KEPT_STATUSES = 1_000

_TEXT = 8_000
_LINE = 1_000


class Events(msgspec.Struct, frozen=True):
    """What happened to a run: all of it, or what was new at some moment. Oldest first."""

    checkpoints: tuple[CheckpointStats, ...] = ()
    failures: tuple[FailureFacts, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    rescalings: tuple[Rescaling, ...] = ()
    statuses: tuple[StatusChange, ...] = ()
    samples: tuple[Sample, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


class News(IntEnum):
    """The most important thing that is new in the facts of a run, and not saved yet."""

    NOTHING = 0
    FIGURES = 1
    """Rows, state or health."""
    CHECKPOINT = 2
    """A checkpoint has ended, or was dropped."""
    EVENT = 3
    """A failure, a recovery, a rescale, another status."""


class Recent(Generic[T]):
    """The newest of what was offered, each once, and those among them that are not saved yet.

    `key` tells two of them apart. `mark` tells whether one that is known has changed.
    """

    def __init__(
        self,
        limit: int,
        key: Callable[[T], Hashable] = lambda one: one,
        mark: Callable[[T], object] = lambda _one: None,
        kept: Callable[[T], T] = lambda one: one,
    ) -> None:
        """`kept` is the form in which one is kept."""
        self._limit = limit
        self._key = key
        self._mark = mark
        self._kept = kept
        self._last: Sequence[T] = ()
        self._seen: dict[Hashable, object] = {}
        self.items: dict[Hashable, T] = {}
        self.fresh: dict[Hashable, T] = {}

    def offer(self, offered: Sequence[T]) -> bool:
        """Takes what is new among `offered`, oldest first; whether there was something new."""
        if offered is self._last:
            return False
        self._last = offered
        marks = {self._key(one): self._mark(one) for one in offered}
        new = [one for one in offered if self._seen.get(key := self._key(one), _NOTHING) != marks[key]]
        # What fell out of the items is not new again as long as it is offered.
        self._seen = {key: mark for key, mark in self._seen.items() if key in self.items} | marks
        for one in new:
            key = self._key(one)
            self.items[key] = self.fresh[key] = self._kept(one)  # one that is known keeps its place
        _shorten(self.items, self._limit)
        _shorten(self.fresh, self._limit)
        return bool(new)


_NOTHING = object()


def _shorten(items: dict[Hashable, T], limit: int) -> None:
    while len(items) > limit:
        del items[next(iter(items))]


class HistoryRecord:
    """Everything that the history keeps of one run, and what of it is not saved yet."""

    def __init__(self) -> None:
        self._checkpoints = Recent[CheckpointStats](
            KEPT_CHECKPOINTS,
            lambda one: one.id,
            lambda one: (one.status, one.trigger_time, one.discarded),
            _short_checkpoint,
        )
        self._failures = Recent[FailureFacts](KEPT_FAILURES, kept=_short_failure)
        self._recoveries = Recent[Recovery](KEPT_RECOVERIES, kept=_short_recovery)
        self._rescalings = Recent[Rescaling](KEPT_RECOVERIES)
        self._statuses = Recent[StatusChange](KEPT_STATUSES)
        self._samples = Recent[Sample](KEPT_SAMPLES, lambda one: one.time_ms, lambda one: one)
        self._parts: tuple[
            Recent[CheckpointStats]
            | Recent[FailureFacts]
            | Recent[Recovery]
            | Recent[Rescaling]
            | Recent[StatusChange]
            | Recent[Sample],
            ...,
        ] = (self._checkpoints, self._failures, self._recoveries, self._rescalings, self._statuses, self._samples)
        self._figures: Hashable = None
        self.facts: JobFacts | None = None

    def offer(self, facts: JobFacts) -> News:
        """Takes what is new in the newest facts of the run; the most important of it."""
        if facts is self.facts:
            return News.NOTHING
        self.facts = facts
        ended = tuple(one for one in facts.checkpoints.history if one.status != "in_progress")
        self._samples.offer(facts.samples)
        events = [
            self._failures.offer(facts.failures),
            self._recoveries.offer(facts.recoveries),
            self._rescalings.offer(facts.rescalings),
            self._statuses.offer(facts.statuses),
        ]
        checkpoint = self._checkpoints.offer(ended)
        before, self._figures = self._figures, _figures_of(facts)
        if any(events):
            return News.EVENT
        if checkpoint:
            return News.CHECKPOINT
        return News.NOTHING if before == self._figures else News.FIGURES

    def head(self) -> JobFacts:
        """The newest facts without what `fresh` and `all` hold."""
        assert self.facts is not None
        return head_of(self.facts)

    def fresh(self) -> Events:
        """What is not saved yet."""
        return Events(
            tuple(self._checkpoints.fresh.values()),
            tuple(self._failures.fresh.values()),
            tuple(self._recoveries.fresh.values()),
            tuple(self._rescalings.fresh.values()),
            tuple(self._statuses.fresh.values()),
            tuple(self._samples.fresh.values()),
        )

    def all(self) -> Events:
        """Everything that is kept."""
        return Events(
            with_few_subtasks(self._checkpoints.items.values()),
            tuple(self._failures.items.values()),
            tuple(self._recoveries.items.values()),
            tuple(self._rescalings.items.values()),
            tuple(self._statuses.items.values()),
            tuple(self._samples.items.values()),
        )

    def saved(self) -> None:
        """Notes that everything is saved."""
        checkpoints = with_few_subtasks(self._checkpoints.items.values())
        self._checkpoints.items = {one.id: one for one in checkpoints}
        for part in self._parts:
            part.fresh.clear()


def _figures_of(facts: JobFacts) -> Hashable:
    """What of the figures stays the same as long as a job has nothing to do: no clocks, and no rates."""
    figures = facts.figures
    counts = (figures.rows, figures.rows_out, figures.late_rows, figures.state_bytes) if figures is not None else ()
    return counts, tuple((one.rule, one.subject) for one in facts.health)


def head_of(facts: JobFacts) -> JobFacts:
    """`facts` without the lists that grow, and with the checkpoints that are in progress alone."""
    seen = facts.checkpoints
    return msgspec.structs.replace(
        facts,
        error=facts.error[:_LINE],
        checkpoints=CheckpointsFacts(
            counts=seen.counts,
            history=tuple(_bare(one) for one in seen.history if one.status == "in_progress"),
            last_completed=seen.last_completed and _bare(seen.last_completed),
            last_failed=seen.last_failed and _bare(seen.last_failed),
            last_savepoint=seen.last_savepoint and _bare(seen.last_savepoint),
            restored=seen.restored,
        ),
        recoveries=(),
        rescalings=(),
        failures=(),
        statuses=(),
        samples=(),
    )


def with_few_subtasks(checkpoints: Iterable[CheckpointStats]) -> tuple[CheckpointStats, ...]:
    """The checkpoints, oldest first; only the newest ones keep the figures of their subtasks."""
    kept: list[CheckpointStats] = []
    figures = 0
    for number, one in enumerate(reversed(list(checkpoints))):
        figures += len(one.subtasks)
        # The newest checkpoint keeps its figures, however many subtasks there are.
        too_many = number >= KEPT_DETAILED or (figures > KEPT_SUBTASKS and number > 0)
        kept.append(_bare(one) if too_many else one)
    return tuple(reversed(kept))


def _bare(one: CheckpointStats) -> CheckpointStats:
    return replace(one, subtasks=()) if one.subtasks else one


def _short_checkpoint(one: CheckpointStats) -> CheckpointStats:
    return replace(one, failure=one.failure[:_LINE]) if one.failure and len(one.failure) > _LINE else one


def _short_failure(one: FailureFacts) -> FailureFacts:
    return msgspec.structs.replace(one, cause=one.cause[:_LINE], text=one.text[:_TEXT])


def _short_recovery(one: Recovery) -> Recovery:
    return replace(one, reason=one.reason[:_LINE])
