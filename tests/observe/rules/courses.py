"""Facts for the rules of health: a quiet job, and changes that break one rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import JobFacts, Sample
from tests.observe.generated import NOW, generated_facts

with_ = msgspec.structs.replace


def quiet(**options: Any) -> JobFacts:
    """A healthy job with five subtasks that has run for an hour, and its last hundred checkpoints."""
    facts = generated_facts(**{"parallelism": 5, "checkpoints": 100, **options})
    return with_(facts, key_group_rows={vertex.id: (10_000,) * 128 for vertex in facts.steps})


def sampled(facts: JobFacts, change: Callable[[int, Sample], Sample]) -> JobFacts:
    """The facts with changed samples; `change` gets the number of seconds before now."""
    last = len(facts.samples)
    return with_(facts, samples=tuple(change(last - n, one) for n, one in enumerate(facts.samples)))


def checkpointed(facts: JobFacts, change: Callable[[int, CheckpointStats], CheckpointStats]) -> JobFacts:
    """The facts with changed checkpoints; `change` gets how many newer ones there are."""
    history = facts.checkpoints.history
    return with_history(facts, [change(len(history) - 1 - n, one) for n, one in enumerate(history)])


def with_history(facts: JobFacts, history: Sequence[CheckpointStats]) -> JobFacts:
    done = [one for one in history if one.status == "completed" and one.kind != "savepoint"]
    return with_(
        facts,
        checkpoints=with_(facts.checkpoints, history=tuple(history), last_completed=done[-1] if done else None),
    )


def all_completed(facts: JobFacts) -> JobFacts:
    """The facts as if no checkpoint had failed, and none were a savepoint or in progress."""
    return checkpointed(
        facts, lambda _back, one: replace(one, status="completed", kind="checkpoint", failure=None, path="/p")
    )


def without_checkpoints_since(facts: JobFacts, seconds: float) -> JobFacts:
    return with_history(facts, [one for one in facts.checkpoints.history if one.trigger_time < NOW - seconds])
