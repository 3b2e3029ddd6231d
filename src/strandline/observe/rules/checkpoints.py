"""Rules about checkpoints: longer than their interval, uploads at the limit, failures in a row, none for long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from strandline.checkpoint.stats import CheckpointStats
from strandline.config import Config
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.rules.measures import (
    LOOKED_BACK,
    MINUTE_MS,
    RECENT_CHECKPOINTS,
    completed,
    interval_s,
    raised,
    rolling_medians,
    running_since,
    setting,
)
from strandline.observe.words import duration, percent, size

SLOW_OFF = 0.8
"""The alarm about slow checkpoints ends when the median is below 80 % of the interval, so that it does not flap."""

UPLOADS_LOOKED_AT = 10
"""The course of uploads is that of ten checkpoints: an older and a newer half of five each."""
LEAST_UPLOAD_MS = 1000.0
"""Uploads of less than a second are made of requests, not of bytes: their rate says nothing."""
UPLOADS_DOMINATE = 0.6
"""Below this share of a checkpoint's time, faster uploads would not help much."""
UPLOADS_MATTER = 0.5
"""Uploads that fit into half of the interval leave enough room."""
ASYNC_GROWS = 1.3
RATE_FLAT = 1.15
"""Uploads take longer by 30 %, and the rate stays within 15 %: more bytes do not get more bandwidth."""
RATE_SPREAD = 1.3
"""At the limit, rates of several checkpoints are almost equal."""
NEARLY_ALL = 0.8
"""Uploads that take 80 % of the interval at an even rate are at the limit, even if they do not grow."""
BEHIND_SHARE = 0.5
"""When half of `changelog_max_in_flight` is used, storage has failed or been slow for many batches."""

FAILED_WARNING = 2
"""One checkpoint fails now and then, for instance when a slot is lost. Two in a row have a cause that stays."""
FAILED_CRITICAL = 3

MISSING_INTERVALS = 3
"""Without a completed checkpoint for three intervals, a failure costs three times what was planned."""
LEAST_MISSING_S = 60.0
"""Short intervals are not kept exactly: below a minute, nobody is called."""
RATE_MEMORY_MS = MINUTE_MS
"""Rates cover ten seconds, or two batches: rows of the last batch before a pause may show for so long."""


def slow_checkpoints(facts: JobFacts) -> Iterator[Finding]:
    """Checkpoints take longer than their interval."""
    if setting(facts, Config.checkpoint_every_batch):
        return
    interval = interval_s(facts)
    taken = completed(facts)
    medians = rolling_medians([one.end_to_end_ms / 1000 for one in taken])
    if not raised(medians, interval, SLOW_OFF * interval):
        return
    newest = taken[-1]
    parts = {"start delay": newest.start_delay_ms, "synchronous part": newest.sync_ms, "uploads": newest.async_ms}
    most = max(parts, key=parts.__getitem__)
    yield Finding(
        "slow-checkpoints",
        "warning",
        "Checkpoints take longer than their interval",
        f"The last {RECENT_CHECKPOINTS} checkpoints took {duration(medians[-1])} (median), and the interval is "
        f"{duration(interval)}. So checkpoints follow each other without a pause. Of checkpoint {newest.id} the "
        f"longest part was: {most}, {duration(parts[most] / 1000)}.",
        "Give a longer checkpoint_interval, or a min_pause. Or make checkpoints shorter: changelog=True uploads "
        "changes all the time and leaves little for the checkpoint; incremental=True uploads only new files; more "
        "subtasks on more hosts upload side by side.",
    )


def upload_limit(facts: JobFacts) -> Iterator[Finding]:
    """Uploads take most of a checkpoint, and storage takes no more bytes per second."""
    yield from _changelog_behind(facts)
    interval_ms = interval_s(facts) * 1000
    taken = [one for one in completed(facts)[-UPLOADS_LOOKED_AT:] if one.checkpointed_bytes > 0]
    if len(taken) < UPLOADS_LOOKED_AT:
        return
    older, newer = taken[: UPLOADS_LOOKED_AT // 2], taken[UPLOADS_LOOKED_AT // 2 :]
    upload = median(one.async_ms for one in newer)
    share = median(one.async_ms / max(one.end_to_end_ms, 1.0) for one in newer)
    if upload < max(LEAST_UPLOAD_MS, UPLOADS_MATTER * interval_ms) or share < UPLOADS_DOMINATE:
        return
    before = max(median(one.async_ms for one in older), 1.0)
    rate, rate_before = _rate(newer), _rate(older)
    grows = upload >= ASYNC_GROWS * before and rate <= RATE_FLAT * rate_before
    rates = [_rate([one]) for one in newer]
    full = upload >= NEARLY_ALL * interval_ms and max(rates) <= RATE_SPREAD * min(rates)
    if not grows and not full:
        return
    yield Finding(
        "upload-limit",
        "warning",
        "Uploads are at the limit of the storage",
        f"Uploads took {duration(upload / 1000)} of the last {len(newer)} checkpoints (median; before that "
        f"{duration(before / 1000)}), {percent(share)} "
        f"of their time. The rate was {size(rate)}/s, and {size(rate_before)}/s before.",
        "Upload less: a longer checkpoint_interval, incremental=True, snapshot_compression, rocksdb="
        '{"bottommost_compression": "zstd"}. Or upload evenly: changelog=True. Or give more bandwidth: more hosts, or '
        "a storage that is nearer.",
    )


def _rate(some: Sequence[CheckpointStats]) -> float:
    """Bytes per second of uploads (median)."""
    return median(one.checkpointed_bytes / max(one.async_ms, 1.0) * 1000 for one in some)


def _changelog_behind(facts: JobFacts) -> Iterator[Finding]:
    changelog = None if facts.figures is None else facts.figures.changelog
    if changelog is None:
        return
    allowed = setting(facts, Config.changelog_max_in_flight)
    if changelog.behind_bytes < BEHIND_SHARE * allowed:
        return
    yield Finding(
        "upload-limit",
        "critical" if changelog.behind_bytes >= allowed else "warning",
        "The changelog is behind",
        f"{size(changelog.behind_bytes)} of committed changes are not durable yet; from {size(allowed)} on processing "
        f"waits. {changelog.upload_attempts:,} attempts were made for {changelog.upload_requests:,} uploads, and "
        f"{changelog.upload_failures:,} uploads were given up.",
        "Look at the storage: is it reachable, does it answer 503? A nearer one for the changelog alone: "
        "changelog_dir. If outages pass, a larger changelog_max_in_flight bridges them.",
        "changelog",
    )


def failed_checkpoints(facts: JobFacts) -> Iterator[Finding]:
    """The last checkpoints failed, one after the other."""
    failed: list[CheckpointStats] = []
    for one in reversed(facts.checkpoints.history):
        if one.kind == "savepoint" or one.status == "in_progress":
            continue
        if one.status == "completed":
            break
        failed.append(one)
    if len(failed) < FAILED_WARNING:
        return
    cause = next(iter((failed[0].failure or "").splitlines()), "") or "no cause is known"
    tolerable = setting(facts, Config.tolerable_failed_checkpoints)
    yield Finding(
        "failed-checkpoints",
        "critical" if len(failed) >= FAILED_CRITICAL else "warning",
        f"The last {len(failed)} checkpoints failed",
        f"Checkpoints {failed[-1].id} to {failed[0].id} failed, the last one because: {cause[:300]}. "
        f"tolerable_failed_checkpoints is {tolerable}.",
        "The cause says what to do: storage that is full, slow or refuses access; a checkpoint_timeout "
        f"({duration(setting(facts, Config.checkpoint_timeout))}) that is too short for the state. Until a checkpoint "
        "completes, rows stay invisible in Parquet sinks, and a failure goes back to the last completed one.",
    )


def no_checkpoint(facts: JobFacts) -> Iterator[Finding]:
    """Rows are processed, and no checkpoint has completed for long."""
    interval = interval_s(facts)
    limit = max(MISSING_INTERVALS * interval, LEAST_MISSING_S)
    last = facts.checkpoints.last_completed
    done_ms = 0.0 if last is None else last.end_time * 1000
    age = (facts.taken_ms - max(done_ms, running_since(facts))) / 1000
    if age < limit or not (_tried_for(facts, done_ms) >= limit * 1000 or _rows_for(facts, done_ms) >= limit * 1000):
        return
    which = f"Checkpoint {last.id} was the last one that completed." if last is not None else "None has completed yet."
    yield Finding(
        "no-checkpoint",
        "critical",
        "No completed checkpoint for long",
        f"For {duration(age)} rows were processed and no checkpoint completed; the interval is {duration(interval)}. "
        f"{which}",
        "See whether one is in progress, and which subtask has not acknowledged: `strandline checkpoints show`, or the "
        "page's Checkpoints tab. A batch that never ends holds the barrier back: bound batches at the source "
        "(maxFilesPerTrigger, maxOffsetsPerTrigger). `strandline checkpoint JOB` tries one now.",
    )


def _tried_for(facts: JobFacts, done_ms: float) -> float:
    """For how many milliseconds checkpoints have been tried since the last one completed; 0 if none is tried now."""
    tried = [
        one
        for one in facts.checkpoints.history[-LOOKED_BACK:]
        if one.status != "completed" and one.kind != "savepoint" and one.trigger_time * 1000 > done_ms
    ]
    if not tried:
        return 0.0
    newest = tried[-1]
    if newest.status == "failed" and facts.taken_ms - newest.end_time * 1000 > 2000 * interval_s(facts):
        return 0.0  # nothing was committed since, so there is nothing to cover
    return facts.taken_ms - max(tried[0].trigger_time * 1000, running_since(facts))


def _rows_for(facts: JobFacts, done_ms: float) -> float:
    """For how many milliseconds rows have come without a break that no checkpoint covers.

    A periodic checkpoint is skipped when nothing was committed, so a pause of the sources is no fault. Rows of the
    minute after the last completion may be those that it covers: see `RATE_MEMORY_MS`.
    """
    since = facts.taken_ms
    for one in reversed(facts.samples):
        if one.rows_per_second <= 0 or one.time_ms <= max(done_ms, running_since(facts)):
            break
        since = one.time_ms
    return facts.taken_ms - since - RATE_MEMORY_MS
