"""The facts of a job as one bounded JSON document."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import KEPT_SAMPLES, JobFacts

MOST_CHECKPOINTS = 10_000
MOST_CHECKPOINT_SUBTASKS = 20_000
MOST_SUBTASKS = 5_000
MOST_EVENTS = 1_000
"""How many recoveries, rescales and changes of the status the document holds."""
MOST_FAILURES = 200
MOST_TEXT = 20_000
"""How long the text of an error may be."""


class Wanted(msgspec.Struct, frozen=True):
    """Which part of the facts a client asks for.

    Attributes:
        checkpoints: How many of the newest checkpoints.
        after: Only checkpoints of this id and newer ones.
        subtasks: Whether checkpoints come with their subtasks, at most `MOST_CHECKPOINT_SUBTASKS` in all.
        samples_after: Only samples that are newer, in milliseconds since the epoch.
    """

    checkpoints: int = 100
    after: int = 0
    subtasks: bool = False
    samples_after: int = 0


def bounded(facts: JobFacts, wanted: Wanted) -> JobFacts:
    """The wanted part of the facts, with all texts and lists bounded."""
    known = facts.checkpoints
    budget = _Budget(MOST_CHECKPOINT_SUBTASKS if wanted.subtasks else 0)
    chosen = (
        [one for one in known.history if one.id >= wanted.after][-wanted.checkpoints :] if wanted.checkpoints else []
    )
    history = [budget.within(one) for one in reversed(chosen)]
    return msgspec.structs.replace(
        facts,
        checkpoints=msgspec.structs.replace(
            known,
            history=tuple(reversed(history)),
            last_completed=known.last_completed and budget.within(known.last_completed),
            last_failed=known.last_failed and budget.within(known.last_failed),
            last_savepoint=known.last_savepoint and budget.within(known.last_savepoint),
        ),
        error=facts.error[:MOST_TEXT],
        samples=tuple(one for one in facts.samples if one.time_ms > wanted.samples_after)[-KEPT_SAMPLES:],
        subtasks=facts.subtasks[:MOST_SUBTASKS],
        recoveries=facts.recoveries[-MOST_EVENTS:],
        rescalings=facts.rescalings[-MOST_EVENTS:],
        statuses=facts.statuses[-MOST_EVENTS:],
        failures=tuple(
            msgspec.structs.replace(one, text=one.text[:MOST_TEXT], cause=one.cause[:MOST_TEXT])
            for one in facts.failures[-MOST_FAILURES:]
        ),
    )


class _Budget:
    """How many subtasks of checkpoints still fit into the document."""

    def __init__(self, left: int) -> None:
        self._left = left

    def within(self, stats: CheckpointStats) -> CheckpointStats:
        """The figures of a checkpoint, without those of its subtasks if they are too many."""
        failure = stats.failure[:MOST_TEXT] if stats.failure else stats.failure
        if len(stats.subtasks) > self._left:
            return replace(stats, subtasks=(), failure=failure)
        self._left -= len(stats.subtasks)
        return stats if failure == stats.failure else replace(stats, failure=failure)
