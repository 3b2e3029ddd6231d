"""Rules about state: a changelog that outgrows it, a cache that misses, memory that is short, state that only grows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from strandline.config import Config
from strandline.observe.facts import Finding, JobFacts, Vertex
from strandline.observe.rules.measures import minutes, raised, setting, settled_samples
from strandline.observe.words import duration, percent, size

AMPLIFICATION_SLACK = 1.2
"""A materialization begins at the limit and takes time; the changelog may pass the limit by a fifth meanwhile."""
SMALL_CHANGELOG = 32_000_000
"""Up to so many bytes for each subtask the changelog of a small state may exceed the limit: it is read in a second."""
EARLY_SHARE = 0.5
"""If half of the materializations begin early, the interval says nothing any more: the log decides."""
LEAST_MATERIALIZATIONS = 4
"""Fewer materializations may be those of the start, when the state is small and the log grows faster than it."""

MISSES = 0.2
"""If a fifth of the reads miss the cache, reads of local files take most of a batch's time on common disks."""
FEWER_MISSES = 0.13
MISSED_MINUTES = 2
ROCKSDB_SHARE = 2 / 3
"""The part of `state_memory` that RocksDB gets for its cache and write buffers."""
CACHE_FULL = 0.85
"""A cache that is not full misses because data is new, and more memory would not help."""
MEMORY_SHORT = 0.9
"""With the heap backend, state above 90 % of the budget leaves no room for the old values of a snapshot."""
MEMORY_EXCEEDED = 0.8
"""RocksDB stays within two thirds of its budget. Above 80 %, flushes do not keep up with writes."""

GROWTH_SPAN_S = 3600.0
"""State is judged over an hour: keys of a new job, and windows that fill, grow for a while."""
GROWTH_PARTS = 6
"""The hour is cut into so many parts, and the least size of each part must be larger than that of the one before."""
GROWTH_STEP = 1.01
"""Growth of less than 1 % from part to part is noise of compaction."""
GROWTH = 1.2
"""A state that has grown by a fifth in the time that is known is worth knowing."""
LEAST_STATE = 64_000_000
"""A state below this size is no burden, however it grows."""
SOON_S = 6 * 3600.0
"""A state that doubles within a working day is a warning."""


def changelog_amplification(facts: JobFacts) -> Iterator[Finding]:
    """The changelog is too large beside the state, or forces early materializations."""
    figures = facts.figures
    if figures is None or figures.changelog is None:
        return
    log = figures.changelog
    limit = setting(facts, Config.changelog_max_amplification)
    ratio = (log.base_bytes + log.segment_bytes) / max(log.base_bytes, 1)
    large = log.segment_bytes > SMALL_CHANGELOG * max(figures.parallelism, 1)
    over = log.base_bytes > 0 and large and ratio > AMPLIFICATION_SLACK * limit
    early = (
        large
        and log.materializations >= LEAST_MATERIALIZATIONS
        and log.early_materializations >= EARLY_SHARE * log.materializations
    )
    if not over and not early:
        return
    text = (
        f"The segments since the last materialization are {size(log.segment_bytes)}, beside a materialized state of "
        f"{size(log.base_bytes)}: {ratio:.1f} times the state in all, where changelog_max_amplification is {limit:g}. "
        f"{log.early_materializations:,} of {log.materializations:,} materializations began early, and "
        f"{log.failed_materializations:,} failed; the last one took {duration(log.last_materialization_ms / 1000)}."
    )
    yield Finding(
        "changelog-amplification",
        "warning" if over else "info",
        "The changelog outgrows the state",
        text,
        "A recovery reads state and changelog. If materializations fail or are slow, look at the storage and at "
        "`strandline logs JOB`. Else the job rewrites its state often: a shorter materialization_interval keeps the "
        "log small, a larger changelog_max_amplification uploads the state less often; without the changelog "
        "(changelog=False) each checkpoint uploads a key only once.",
    )


def cache_misses(facts: JobFacts) -> Iterator[Finding]:
    """Many reads of state miss RocksDB's cache, and the cache is full."""
    figures = facts.figures
    if figures is None or setting(facts, Config.state_backend) != "rocksdb":
        return
    memory = figures.state_memory
    if memory.most_used_bytes < CACHE_FULL * ROCKSDB_SHARE * memory.slot_budget_bytes:
        return
    missed = minutes(
        settled_samples(facts), lambda one: None if one.cache_hit_ratio is None else 1 - one.cache_hit_ratio
    )
    if not missed or not raised(missed, MISSES, FEWER_MISSES, MISSED_MINUTES):
        return
    known = [one for one in facts.subtasks if one.cache_hit_ratio is not None]
    worst = min(known, key=lambda one: one.cache_hit_ratio or 0.0, default=None)
    where = "" if worst is None else f" Subtask {worst.index} hits least: {percent(worst.cache_hit_ratio or 0.0)}."
    yield Finding(
        "cache-misses",
        "warning",
        "Reads miss the cache",
        f"{percent(missed[-1])} of the reads in the last minute missed RocksDB's cache. The slot that uses most holds "
        f"{size(memory.most_used_bytes)} of its budget of {size(memory.slot_budget_bytes)}, and the state is "
        f"{size(figures.state_bytes)}.{where}",
        "Give more state_memory (now "
        f"{size(memory.executor_budget_bytes)} per executor), or spread the state over more executors. "
        'rocksdb={"partitioned_index_filters": True} or {"filters_for_hits": True} needs less cache.',
    )


def memory_short(facts: JobFacts) -> Iterator[Finding]:
    """State takes more memory than its budget."""
    figures = facts.figures
    if figures is None or figures.state_memory.slot_budget_bytes <= 0:
        return
    memory = figures.state_memory
    heap = setting(facts, Config.state_backend) == "heap"
    limit = MEMORY_SHORT if heap else MEMORY_EXCEEDED
    used = memory.most_used_bytes / memory.slot_budget_bytes
    if used < limit:
        return
    yield Finding(
        "memory-short",
        "warning",
        "The state's memory is used up",
        f"The slot that uses most holds {size(memory.most_used_bytes)}: {percent(used)} of its budget of "
        f"{size(memory.slot_budget_bytes)}."
        + (" The heap backend keeps the whole state in memory." if heap else " Flushes do not keep up with writes."),
        "Give more state_memory, and as much more to spark.executor.memoryOverhead. With the heap backend, change to "
        'state_backend="rocksdb" through a canonical savepoint (`strandline savepoint JOB DIR --type canonical`).'
        if heap
        else "Give more state_memory, a faster local_dir, or more rocksdb background_jobs.",
    )


def state_only_grows(facts: JobFacts) -> Iterator[Finding]:
    """The state has grown for an hour without a pause, and a step keeps state that never expires."""
    steps = [one for one in facts.steps if one.state_expires is not True]
    if not steps or facts.figures is None or facts.figures.state_bytes < LEAST_STATE:
        return
    least = _least_sizes(facts)
    if len(least) < GROWTH_PARTS or least[-1] < GROWTH * least[0]:
        return
    if any(after < GROWTH_STEP * before for before, after in pairwise(least)):
        return
    per_second = (least[-1] - least[0]) / (GROWTH_SPAN_S * (GROWTH_PARTS - 1) / GROWTH_PARTS)
    doubles_s = least[-1] / max(per_second, 1e-9)
    largest = max(steps, key=lambda one: _state_bytes(facts, one))
    known = [one.name for one in steps if one.state_expires is False]
    never = f" {', '.join(known)} keeps state without a time to live." if known else ""
    yield Finding(
        "state-only-grows",
        "warning" if doubles_s < SOON_S else "info",
        "The state only grows",
        f"In the last hour the state grew from {size(least[0])} to {size(least[-1])}, and never shrank. At this rate "
        f"it doubles in {duration(doubles_s)}. The largest step is {largest.name}, with "
        f"{size(_state_bytes(facts, largest))}.{never}",
        "If old keys are never needed again, let them expire: a ttl for the states of a processor, a window instead of "
        "an aggregate for ever, a time limit for a join, or a deduplication within a time. If they are needed, plan "
        "disk and state_memory for the growth.",
        largest.name,
    )


def _least_sizes(facts: JobFacts) -> list[int]:
    """The least size of the state in each part of the last hour, by its checkpoints; empty if a part had none."""
    now = facts.taken_ms / 1000
    if now - facts.start_ms / 1000 < GROWTH_SPAN_S:
        return []
    parts: dict[int, int] = {}
    for one in reversed(facts.checkpoints.history):
        back = int((now - one.trigger_time) * GROWTH_PARTS / GROWTH_SPAN_S)
        if back >= GROWTH_PARTS:
            break
        if one.status == "completed" and one.kind != "savepoint" and one.full_bytes > 0:
            parts[back] = min(parts.get(back, one.full_bytes), one.full_bytes)
    return [parts[back] for back in sorted(parts, reverse=True)]


def _state_bytes(facts: JobFacts, step: Vertex) -> int:
    figures = facts.figures.steps.get(step.name) if facts.figures is not None else None
    return figures.state_bytes if figures is not None else 0
