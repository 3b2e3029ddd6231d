"""Rules about sinks: a commit that keeps failing, and a sink that holds the job up."""

from __future__ import annotations

from collections.abc import Iterator

from strandline.config import Config
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.rules.measures import interval_s, setting
from strandline.observe.words import duration, size

FAILED_WARNING = 3
"""One failure of a commit passes. After three in a row there is a cause that stays for a while."""
HELD_UP_WARNING_S = 10.0
"""Batches that wait for less are a spike."""


def sink_fails(facts: JobFacts) -> Iterator[Finding]:
    """The rows of a completed checkpoint cannot be published."""
    for sink in () if facts.figures is None else facts.figures.sinks:
        if sink.failures_in_row < FAILED_WARNING:
            continue
        yield Finding(
            "sink-fails",
            "critical",
            "A sink does not take its rows",
            f"The last {sink.failures_in_row} tries to publish rows in {sink.place} failed, the last one because: "
            f"{sink.error[:300]}. {size(sink.staged_bytes)} of later rows wait, too.",
            "Nothing is lost: the rows are staged, and are published as soon as the target takes them. See that the "
            "target is up, reachable and not full, and that the job has the rights it needs.",
            sink.place,
        )


def sink_behind(facts: JobFacts) -> Iterator[Finding]:
    """Batches wait for a sink, or a sink needs most of the interval between two checkpoints."""
    figures = facts.figures
    if figures is None or not figures.sinks:
        return
    slowest = max(figures.sinks, key=lambda sink: sink.last_commit_ms)
    took, interval = slowest.last_commit_ms / 1000, interval_s(facts)
    if figures.held_up_s < HELD_UP_WARNING_S and took < max(interval, HELD_UP_WARNING_S):
        return
    waits = f" Batches have been waiting for {duration(figures.held_up_s)}." if figures.held_up_s else ""
    yield Finding(
        "sink-behind",
        "warning",
        "A sink is slower than the job",
        f"The last commit into {slowest.place} took {duration(took)}, and checkpoints come every {duration(interval)}. "
        f"{size(sum(sink.staged_bytes for sink in figures.sinks))} of rows are staged; beyond "
        f"{size(setting(facts, Config.sink_backlog))} batches wait.{waits}",
        "Make the target faster: fewer indexes, more partitions, a nearer host. A longer checkpoint_interval makes "
        "commits fewer and larger. mode='upsert' into a table costs more than appending.",
        slowest.place,
    )
