"""The history of a run's recoveries: what was lost, what was brought back, and from where."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strandline.runtime.protocol.messages import Rebuilt
from strandline.state.coding.keys import key_group_range, subtask_of

KEPT_RECOVERIES = 1000


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A run went on with another number of subtasks. Durations are milliseconds."""

    time: float
    parallelism_before: int
    parallelism: int
    batch: int
    """The last batch before."""
    duration_ms: float
    """From the call to the next batch's beginning."""
    pause_ms: float
    """The part of it in which no rows were processed."""
    checkpoint_ms: float
    """The part of the pause that the last checkpoint before took."""
    slots_ms: float
    """The part of the pause that the slots took to come up with their state."""
    moved_key_groups: int
    """How many key groups had to be copied to where other state is; the rest was opened as it was."""
    local_bytes: int
    """What was read from the local disks of the slots' hosts."""
    durable_bytes: int
    """What was read from durable storage."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A failure that a run got over. Times are seconds since the epoch, durations milliseconds."""

    time: float
    kind: Literal["slots", "restart"]
    """`slots`: some slots were rebuilt while the query and the others went on. `restart`: all went back to the last
    completed checkpoint."""
    slots: tuple[int, ...]
    """The slots that were rebuilt; their subtasks of every step have the same number."""
    batch: int
    """The batch that the state was brought back to."""
    duration_ms: float
    local_bytes: int
    """What was read from the local files of lost slots."""
    durable_bytes: int
    """What was read from durable storage."""
    reason: str = ""


def moved_key_groups(before: int, after: int, max_parallelism: int) -> int:
    """How many key groups are not part of the largest piece of old state that their new subtask begins with."""
    moved = 0
    for index in range(after):
        groups = key_group_range(index, after, max_parallelism)
        pieces = Counter(subtask_of(group, before, max_parallelism) for group in groups)
        moved += len(groups) - max(pieces.values())
    return moved


def slot_recovery(began: float, batch: int, rebuilt: Mapping[int, Sequence[Rebuilt]]) -> Recovery:
    """Some slots were rebuilt at `batch`."""
    states = [state for some in rebuilt.values() for state in some]
    return Recovery(
        time=began,
        kind="slots",
        slots=tuple(sorted(rebuilt)),
        batch=batch,
        duration_ms=(time.time() - began) * 1000,
        local_bytes=sum(state.local_bytes for state in states),
        durable_bytes=sum(state.durable_bytes for state in states),
    )
