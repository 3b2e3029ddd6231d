"""Rules about load: back pressure, a slow subtask, skewed key groups, a watermark that stands still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
from strandline.observe.facts import Finding, JobFacts, Sample, SubtaskFacts
from strandline.observe.rules.measures import (
    RECENT_CHECKPOINTS,
    completed,
    interval_s,
    minutes,
    raised,
    rolling_medians,
    settled_samples,
    vertex_name,
)
from strandline.observe.words import duration, percent
from strandline.state.coding.keys import key_group_range

HIGH_BACK_PRESSURE = 0.5
"""From this share on Flink's page shows back pressure as high: the subtask waits longer than it works."""
LOW_BACK_PRESSURE = 0.3
"""Below this share the alarm ends: well below `HIGH_BACK_PRESSURE`, so that it does not flap."""
PRESSED_MINUTES = 3
"""Load spikes press for a while, and that is usual. A spike of a minute touches two averages."""
START_DELAY_SHARE = 0.5
"""A barrier that waits for half of the checkpoint interval makes the effective interval half as long again."""
LEAST_START_DELAY_MS = 1000.0
"""Start delays below a second are those of usual commits, however short the interval is."""

STRAGGLER_FACTOR = 3.0
"""A subtask is slow if it takes three times as long as the median of the others. A compaction alone doubles it."""
LEAST_STRAGGLER_MS = 1000.0
"""Less than a second more than the others does not hurt anybody."""
STRAGGLER_TIMES = 4
"""Of the last `RECENT_CHECKPOINTS`, in so many the same subtask must be the slow one: compaction moves around."""
BUSY = 0.9
"""A subtask that is busy for 90 % of the time has no room for a spike."""
LESS_BUSY = 0.8
OTHERS_BUSY = 0.45
"""If the others are busy for less than half of that, more subtasks do not help: the work is not divided."""

SKEW = 2.0
"""A subtask with twice its share of rows limits the job to half of what its slots could do."""
HOT_GROUP = 4.0
"""A key group with four times the mean of all has a hot key. Random keys give key groups of about the same size."""
LEAST_ROWS = 100_000
"""Fewer rows say nothing about the keys to come."""
SKEW_MATTERS = 0.7
"""Skew is a warning if the busiest subtask works for so much of the time; else it is only worth knowing."""

SILENT_CRITICAL_S = 60.0
"""A broker that is replaced, or a network that is rearranged, is back by then."""
STANDING_MS = 180_000
"""A watermark that stands still for three minutes holds windows and timers back. Batches and sources pause for less."""
STANDING_SHARE = 0.95
"""The lag of a watermark that stands still grows as fast as time goes by. 5 % are left for when it was measured."""


def back_pressure(facts: JobFacts) -> Iterator[Finding]:
    """Subtasks wait for others to take their output, or barriers wait long before they start."""
    averages = minutes(settled_samples(facts), lambda one: one.back_pressured)
    pressed = raised(averages, HIGH_BACK_PRESSURE, LOW_BACK_PRESSURE, PRESSED_MINUTES)
    interval = interval_s(facts)
    limit = max(START_DELAY_SHARE * interval * 1000, LEAST_START_DELAY_MS)
    delays = rolling_medians([one.start_delay_ms for one in completed(facts)])
    late = raised(delays, limit, 0.6 * limit)
    if not pressed and not late:
        return
    text = []
    subject = ""
    if pressed:
        text.append(
            f"In the last minute the subtask that waited longest was back-pressured for {percent(averages[-1])}."
        )
        worst = max(facts.subtasks, key=lambda one: one.back_pressured, default=None)
        if worst is not None:
            subject = f"{vertex_name(facts, worst.vertex)}, subtask {worst.index}"
            text.append(f"Now it is subtask {worst.index} of {vertex_name(facts, worst.vertex)}.")
    if late:
        text.append(
            f"Barriers of the last {RECENT_CHECKPOINTS} checkpoints waited {duration(delays[-1] / 1000)} before they "
            f"started (median), at an interval of {duration(interval)}."
        )
    yield Finding(
        "back-pressure",
        "warning",
        "Back pressure",
        " ".join(text),
        "Look for what the subtasks wait for: a slow sink, or with changelog=True a slow storage. If the subtasks "
        "themselves are busy, add some: run.rescale(n) or `strandline rescale JOB N`. If batches are long, bound them "
        "at the source: maxFilesPerTrigger, maxOffsetsPerTrigger.",
        subject,
    )


def straggler(facts: JobFacts) -> Iterator[Finding]:
    """One subtask of a step is much slower than the others."""
    slow = Counter(found for one in completed(facts)[-RECENT_CHECKPOINTS:] if (found := _slowest(one)) is not None)
    if slow:
        (uid, index), times = slow.most_common(1)[0]
        if times >= STRAGGLER_TIMES:
            yield _straggler(facts, uid, index, _checkpoint_text(facts, uid, index))
            return
    busy = minutes(settled_samples(facts), lambda one: one.busy)
    if not raised(busy, BUSY, LESS_BUSY, PRESSED_MINUTES):
        return
    for vertex in facts.steps:
        subtasks = [one for one in facts.subtasks if one.vertex == vertex.id]
        worst = max(subtasks, key=lambda one: one.busy, default=None)
        if worst is None or len(subtasks) < 2 or worst.busy < LESS_BUSY:
            continue
        others = median(one.busy for one in subtasks if one is not worst)
        if others <= OTHERS_BUSY:
            yield _straggler(facts, vertex.name, worst.index, _busy_text(worst, others))


def _slowest(checkpoint: CheckpointStats) -> tuple[str, int] | None:
    """The subtask that was much slower than the others of its step in a checkpoint; None if none was."""
    steps: dict[str, list[SubtaskStats]] = {}
    for one in checkpoint.subtasks:
        steps.setdefault(one.operator, []).append(one)
    found: tuple[float, str, int] | None = None
    for uid, some in steps.items():
        if len(some) < 2:
            continue
        worst = max(some, key=_work_ms)
        usual = median(_work_ms(one) for one in some if one is not worst)
        taken = _work_ms(worst)
        slow = taken >= STRAGGLER_FACTOR * usual and taken - usual >= LEAST_STRAGGLER_MS
        if slow and (found is None or taken > found[0]):
            found = (taken, uid, worst.subtask)
    return None if found is None else found[1:]


def _work_ms(one: SubtaskStats) -> float:
    return one.sync_ms + one.async_ms


def _checkpoint_text(facts: JobFacts, uid: str, index: int) -> str:
    newest = next(one for one in reversed(completed(facts)) if _slowest(one) == (uid, index))
    some = [one for one in newest.subtasks if one.operator == uid]
    usual = median(_work_ms(one) for one in some if one.subtask != index)
    taken = next(_work_ms(one) for one in some if one.subtask == index)
    return (
        f"Subtask {index} of {uid} took {duration(taken / 1000)} for its part of checkpoint {newest.id}; the median of "
        f"the other {len(some) - 1} is {duration(usual / 1000)}. It was the slowest in at least {STRAGGLER_TIMES} of "
        f"the last {RECENT_CHECKPOINTS} checkpoints."
    )


def _busy_text(worst: SubtaskFacts, others: float) -> str:
    return (
        f"Subtask {worst.index} is busy for {percent(worst.busy)} of the time; the median of the others is "
        f"{percent(others)}."
    )


def _straggler(facts: JobFacts, uid: str, index: int, text: str) -> Finding:
    where = next((one for one in facts.subtasks if one.index == index and vertex_name(facts, one.vertex) == uid), None)
    if where is not None and where.host:
        text += f" It runs on {where.host} (process {where.pid})."
    return Finding(
        "straggler",
        "warning",
        "One slow subtask",
        text,
        "If skewed-key-groups is reported as well, the keys are the cause. Else look at the host (disk, CPU, other "
        f"processes) and at the log: `strandline logs JOB --subtask {index}`. Ending the slot's process moves nothing; "
        "`strandline rescale JOB N` with the present number spreads slots over the executors again.",
        f"{uid}, subtask {index}",
    )


def skewed_key_groups(facts: JobFacts) -> Iterator[Finding]:
    """One subtask of a step gets far more rows than its share, because of hot keys."""
    for vertex in facts.steps:
        groups = facts.key_group_rows.get(vertex.id, ())
        total = sum(groups)
        if vertex.parallelism < 2 or total < LEAST_ROWS or len(groups) < vertex.parallelism:
            continue
        mean = total / len(groups)
        hottest = max(range(len(groups)), key=groups.__getitem__)
        if groups[hottest] < HOT_GROUP * mean:
            continue
        rows = [_rows(groups, index, vertex.parallelism) for index in range(vertex.parallelism)]
        worst = max(range(len(rows)), key=rows.__getitem__)
        share = rows[worst] * vertex.parallelism / total
        if share < SKEW:
            continue
        averages = minutes(settled_samples(facts), lambda one: one.busy)
        yield Finding(
            "skewed-key-groups",
            "warning" if raised(averages, SKEW_MATTERS, SKEW_MATTERS - 0.1) else "info",
            "Skewed keys",
            f"Subtask {worst} of {vertex.name} took in {rows[worst]:,} of {total:,} rows: {share:.1f} times its share. "
            f"Key group {hottest} alone has {percent(groups[hottest] / total)} of the rows, "
            f"{groups[hottest] / mean:.0f} times the mean.",
            "More subtasks do not divide one key. Aggregate in two steps: first by the key and a random number "
            "(key_by of both), then by the key. Or filter out a default key such as null or an empty text. `strandline "
            "state read PATH --operator UID --limit 20` shows keys.",
            vertex.name,
        )


def _rows(groups: Sequence[int], index: int, parallelism: int) -> int:
    mine = key_group_range(index, parallelism, len(groups))
    return sum(groups[mine.start : mine.stop])


def silent_source(facts: JobFacts) -> Iterator[Finding]:
    """A source does not answer, and Spark waits for it without a word."""
    figures = facts.figures
    if figures is None or not facts.runs or not figures.silent_source:
        return
    yield Finding(
        "silent-source",
        "critical" if figures.silent_s >= SILENT_CRITICAL_S else "warning",
        "A source does not answer",
        f"{figures.silent_source} has not answered for {duration(figures.silent_s)}. The job waits, and reads no rows.",
        "Look whether the servers of the source run, and whether the driver reaches them. Nothing is lost: the job "
        "goes on when they answer. Spark may give up before, which is an error that restarts the run.",
        figures.silent_source,
    )


def idle_source(facts: JobFacts) -> Iterator[Finding]:
    """The watermark stands still although rows come."""
    samples = settled_samples(facts)
    if not samples or samples[-1].time_ms - samples[0].time_ms < STANDING_MS:
        return
    since = samples[-1].time_ms - STANDING_MS
    window = [one for one in samples if one.time_ms >= since]
    first, last = window[0], window[-1]
    if first.watermark_lag_ms is None or last.watermark_lag_ms is None or last.watermark_lag_ms < STANDING_MS:
        return
    span = last.time_ms - first.time_ms
    if last.watermark_lag_ms - first.watermark_lag_ms < STANDING_SHARE * span:
        return
    if not _rows_came(window):
        return  # all sources pause, or batches are rare: nobody waits
    idle = _idle_sources(facts, first, last)
    what = f"No rows came from {' and '.join(idle)} in this time. " if idle else ""
    yield Finding(
        "idle-source",
        "warning",
        "The watermark stands still",
        f"The watermark is {duration(last.watermark_lag_ms / 1000)} behind, and did not move in the last "
        f"{duration(span / 1000)}, although {last.rows_per_second:,.0f} rows per second came. {what}Windows do not "
        "close, timers in event time do not fire, and their state stays.",
        'If a source may be silent, let the others go on without it: job.source(…, idle_after="30s"). If every source '
        "brings rows, their event times do not advance: look at the event time column of new rows.",
        idle[0] if len(idle) == 1 else "",
    )


def _rows_came(window: Sequence[Sample]) -> bool:
    """Whether rows came in both halves of the time: one batch alone cannot show that the watermark stays behind it."""
    read = [sum(one.source_rows) for one in (window[0], window[len(window) // 2], window[-1])]
    if read[-1] > 0:
        return read[0] < read[1] < read[2]
    return min(one.rows_per_second for one in window) > 0


def _idle_sources(facts: JobFacts, first: Sample, last: Sample) -> list[str]:
    if facts.figures is None or not len(first.source_rows) == len(last.source_rows) == len(facts.figures.sources):
        return []
    return [
        source.description
        for source, before, after in zip(facts.figures.sources, first.source_rows, last.source_rows, strict=True)
        if after == before
    ]
