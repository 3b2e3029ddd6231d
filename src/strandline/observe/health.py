"""Health in words: which rules the figures of a job break, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from strandline.observe.facts import Finding, JobFacts, Severity
from strandline.observe.rules import checkpoints, failures, load, sinks, state
from strandline.observe.rules.measures import settled


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of health. Findings carry its name, and the operations guide has a heading for it."""

    name: str
    look: Callable[[JobFacts], Iterator[Finding]]
    settled_only: bool = True
    """Whether the rule is asked only of a run that has processed rows for a minute. The others tell of failures."""


RULES: Final = (
    Rule("run-failed", failures.run_failed, settled_only=False),
    Rule("driver-lost", failures.driver_lost, settled_only=False),
    Rule("repeated-restarts", failures.repeated_restarts, settled_only=False),
    Rule("sink-fails", sinks.sink_fails, settled_only=False),
    Rule("silent-source", load.silent_source, settled_only=False),
    Rule("no-checkpoint", checkpoints.no_checkpoint),
    Rule("failed-checkpoints", checkpoints.failed_checkpoints),
    Rule("slow-checkpoints", checkpoints.slow_checkpoints),
    Rule("upload-limit", checkpoints.upload_limit),
    Rule("sink-behind", sinks.sink_behind),
    Rule("back-pressure", load.back_pressure),
    Rule("straggler", load.straggler),
    Rule("skewed-key-groups", load.skewed_key_groups),
    Rule("idle-source", load.idle_source),
    Rule("cache-misses", state.cache_misses),
    Rule("memory-short", state.memory_short),
    Rule("changelog-amplification", state.changelog_amplification),
    Rule("state-only-grows", state.state_only_grows),
    Rule("local-recovery-missed", failures.local_recovery_missed),
)
"""The rules; of findings that are equally bad, those of the earlier rule come first."""

_ORDER: Final[dict[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}


def findings(facts: JobFacts) -> tuple[Finding, ...]:
    """The rules that a job breaks, worst first; empty for a healthy job.

    The result depends on nothing but `facts`. A run that has just started, restarted or was rescaled is judged by its
    failures alone: its load counts after a minute.
    """
    judged = settled(facts)
    found = [one for rule in RULES if judged or not rule.settled_only for one in rule.look(facts)]
    return tuple(sorted(found, key=lambda one: _ORDER[one.severity]))
