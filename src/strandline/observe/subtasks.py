"""Figures of subtasks: rates and shares over the last seconds, from what the slots counted since they started."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from strandline.observe.facts import SubtaskFacts, Vertex
from strandline.runtime.driver.slot_samples import SlotSample

WINDOW_NS = 10_000_000_000
"""Over which time rates and shares are computed. A batch may take seconds, so one second would show all or nothing."""


class SlotWindow:
    """What the slots said in the last seconds."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[SlotSample]] = {}

    def add(self, samples: Iterable[SlotSample]) -> None:
        """The newest sample of every slot. One that was added before does not count again."""
        known, self._samples = self._samples, {}
        for sample in samples:
            kept = self._samples[sample.index] = known.get(sample.index, deque())
            if kept and not _same_process(kept[-1], sample):
                kept.clear()
            if not kept or _taken(kept[-1]) < _taken(sample):
                kept.append(sample)
            while len(kept) > 2 and _taken(kept[-1]) - _taken(kept[1]) >= WINDOW_NS:
                kept.popleft()

    def subtasks(self, steps: Sequence[Vertex], watermarks: Mapping[str, int | None]) -> tuple[SubtaskFacts, ...]:
        """The subtasks of all steps, by step and number. `watermarks` are those of the steps, by their uid."""
        return tuple(
            subtask_facts(step, kept[0], kept[-1], watermarks.get(step.name))
            for step in steps
            for _index, kept in sorted(self._samples.items())
            if step.name in kept[-1].figures.operators
        )

    def key_group_rows(self, steps: Sequence[Vertex], max_parallelism: int) -> dict[str, tuple[int, ...]]:
        """For each step, by the id of its vertex: rows per key group since its slots started."""
        found: dict[str, tuple[int, ...]] = {}
        for step in steps:
            rows = [0] * max_parallelism
            for kept in self._samples.values():
                figures = kept[-1].figures.operators.get(step.name)
                if figures is not None:
                    first, counts = figures.first_key_group, figures.key_group_rows
                    rows[first : first + len(counts)] = counts
            found[step.id] = tuple(rows[:max_parallelism])
        return found


def subtask_facts(step: Vertex, before: SlotSample, now: SlotSample, watermark_ms: int | None) -> SubtaskFacts:
    """One subtask of a step, from two samples of its slot. If they are the same one, rates and shares are 0."""
    old, new = before.figures.operators[step.name], now.figures.operators[step.name]
    passed = new.taken_ns - old.taken_ns
    waited = new.back_pressured_ns - old.back_pressured_ns + now.durability_wait_ns - before.durability_wait_ns
    busy = _share(new.busy_ns - old.busy_ns, passed)
    return SubtaskFacts(
        vertex=step.id,
        index=now.index,
        task_manager=now.task_manager,
        host=now.host,
        pid=now.figures.pid,
        rows_in=new.rows_in,
        rows_out=new.rows_out,
        rows_in_per_second=_per_second(new.rows_in - old.rows_in, passed),
        rows_out_per_second=_per_second(new.rows_out - old.rows_out, passed),
        busy=busy,
        back_pressured=min(1.0 - busy, _share(waited, passed)),
        state_bytes=new.state_bytes,
        memory_bytes=new.memory_bytes,
        estimated_keys=new.estimated_keys,
        cache_hit_ratio=_hit_ratio(new.cache_hits - old.cache_hits, new.cache_misses - old.cache_misses),
        watermark_ms=watermark_ms,
        bytes_in=new.bytes_in,
        bytes_out=new.bytes_out,
    )


def _same_process(one: SlotSample, other: SlotSample) -> bool:
    return (
        (one.task_manager, one.host, one.figures.pid) == (other.task_manager, other.host, other.figures.pid)
        and one.figures.operators.keys() == other.figures.operators.keys()
        and _taken(one) <= _taken(other)
    )


def _taken(sample: SlotSample) -> int:
    return max((figures.taken_ns for figures in sample.figures.operators.values()), default=0)


def _share(part_ns: int, whole_ns: int) -> float:
    return min(1.0, max(0.0, part_ns / whole_ns)) if whole_ns > 0 else 0.0


def _hit_ratio(hits: int, misses: int) -> float | None:
    """None if no block was read: write buffers held what was asked for, or nobody asked."""
    return hits / (hits + misses) if hits >= 0 and misses >= 0 and hits + misses > 0 else None


def _per_second(count: int, passed_ns: int) -> float:
    return max(0.0, count * 1e9 / passed_ns) if passed_ns > 0 else 0.0
