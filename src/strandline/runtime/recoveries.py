"""The history of a run's recoveries: what was lost, what was brought back, and from where."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strandline.runtime.messages import Rebuilt

KEPT_RECOVERIES = 1000


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
