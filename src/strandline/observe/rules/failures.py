"""Rules about failures: a run that failed, a lost driver, restarts that come again, local recovery that missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from strandline.config import Config
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.rules.measures import setting
from strandline.observe.words import duration, percent, size
from strandline.runtime.driver.recoveries import Recovery, first_line
from strandline.runtime.driver.status import RunStatus

AGAIN_S = 1800.0
"""Failures within half an hour belong together: the restart delay grows to a minute only, and a crash loop shows."""
RESTARTS = 3
"""Two restarts may be two accidents. Three in half an hour have a cause."""
MANY_RESTARTS = 5
SLOT_LOSSES = 3
"""As for restarts: the third loss of a slot in half an hour is no accident."""

MISSED_S = 3600.0
"""A recovery is worth a look for an hour."""
MISSED_SHARE = 0.1
"""Some files are always read from storage, such as those that were not copied yet."""
LEAST_MISSED = 1_000_000
"""Below a megabyte the place does not matter."""
LONG_RECOVERY_MS = 10_000.0
"""A recovery that takes longer than this is felt by those who wait for rows."""


def run_failed(facts: JobFacts) -> Iterator[Finding]:
    """The run ended with an error."""
    if facts.status is not RunStatus.FAILED:
        return
    when = "" if facts.end_ms is None else f" {duration((facts.end_ms - facts.start_ms) / 1000)} after its start"
    yield Finding(
        "run-failed",
        "critical",
        "The run failed",
        f"The run ended{when} with: {first_line(facts.error) or 'an unknown error'}.",
        f"Remove the cause (see `strandline logs {facts.name}`, and the table of errors in the operations guide), then "
        f"start the job again: `strandline run APP.py`. {_next_start(facts)}",
    )


def driver_lost(facts: JobFacts) -> Iterator[Finding]:
    """The driver is gone, and the run had not ended."""
    if not facts.driver_lost:
        return
    yield Finding(
        "driver-lost",
        "critical",
        "The driver is gone",
        f"Process {facts.driver.pid} on {facts.driver.host or 'an unknown host'} ended without ending the run, or does "
        f"not answer. The last status was {facts.status}. Its task managers and slots end by themselves.",
        f"Look for why the process ended (the kernel's log, the cluster's log: often memory), then start the job "
        f"again: `strandline run APP.py`. {_next_start(facts)}",
    )


def _next_start(facts: JobFacts) -> str:
    last = facts.checkpoints.last_completed
    if last is None:
        return "It begins anew: no checkpoint has completed."
    return f"It goes on from checkpoint {last.id}."


def repeated_restarts(facts: JobFacts) -> Iterator[Finding]:
    """The run restarts, or loses slots, again and again."""
    if not facts.runs:
        return
    since = facts.taken_ms / 1000 - AGAIN_S
    recent = [one for one in facts.recoveries if one.time >= since]
    restarts = [one for one in recent if one.kind == "restart"]
    if len(restarts) >= RESTARTS:
        yield _again(facts, restarts)
    losses = Counter(index for one in recent if one.kind == "slots" for index in one.slots)
    if losses and losses.most_common(1)[0][1] >= SLOT_LOSSES:
        index, times = losses.most_common(1)[0]
        last = next(one for one in reversed(recent) if one.kind == "slots" and index in one.slots)
        yield Finding(
            "repeated-restarts",
            "warning",
            f"Slot {index} is lost again and again",
            f"Slot {index} was replaced {times} times in the last {duration(AGAIN_S)}. The last cause: "
            f"{first_line(last.reason) or 'unknown'}.",
            f"`strandline logs JOB --subtask {index}` shows its last lines. A slot that is killed by SIGKILL mostly "
            "has too little memory: raise spark.executor.memoryOverhead, or lower state_memory.",
            f"slot {index}",
        )


def _again(facts: JobFacts, restarts: list[Recovery]) -> Finding:
    causes = Counter(first_line(one.reason) for one in restarts)
    cause, times = causes.most_common(1)[0]
    same = f"{times} of them" if times > 1 else "the last one"
    attempts = setting(facts, Config.restart_attempts)
    allowed = "any number of restarts is allowed" if attempts < 0 else f"restart_attempts is {attempts}"
    return Finding(
        "repeated-restarts",
        "critical" if len(restarts) >= MANY_RESTARTS or facts.status is RunStatus.RESTARTING else "warning",
        "The run restarts again and again",
        f"{len(restarts)} restarts in the last {duration(AGAIN_S)}, {same} because of: {cause or 'an unknown cause'}. "
        f"Each cost {duration(sum(one.duration_ms for one in restarts) / len(restarts) / 1000)} on average; {allowed}.",
        "Remove the cause; `strandline logs JOB` has the whole text. If it passes by itself, such as a storage that is "
        "away for minutes, give a longer restart_delay.",
    )


def local_recovery_missed(facts: JobFacts) -> Iterator[Finding]:
    """Local recovery is on, and the last recovery read from storage all the same."""
    if not facts.recoveries or not facts.runs or not setting(facts, Config.local_recovery):
        return
    last = facts.recoveries[-1]
    total = last.local_bytes + last.durable_bytes
    if facts.taken_ms / 1000 - last.time > MISSED_S or last.durable_bytes < max(LEAST_MISSED, MISSED_SHARE * total):
        return
    yield Finding(
        "local-recovery-missed",
        "warning" if last.duration_ms >= LONG_RECOVERY_MS else "info",
        "Local recovery missed",
        f"The last recovery, {duration(facts.taken_ms / 1000 - last.time)} ago, read {size(last.durable_bytes)} from "
        f"storage and {size(last.local_bytes)} from local disks: {percent(last.durable_bytes / total)} from storage. "
        f"It took {duration(last.duration_ms / 1000)}.",
        "If a host was lost, this is as it must be. Else look into the logs of the task managers for copies that could "
        "not be made: a full or slow local_dir, or one on another file system than the state. Copies do not outlive "
        "the run, so a new driver always reads from storage.",
    )
