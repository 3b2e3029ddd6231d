"""Records of what a run recovered from: lost slots, restarts and rescalings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from strandline.runtime.protocol.messages import Rebuilt
from strandline.state.coding.keys import key_group_range, subtask_of

KEPT_RECOVERIES = 1000


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A change of a running job's parallelism. Times are seconds since the epoch, durations milliseconds."""

    time: float
    parallelism_before: int
    parallelism: int
    batch: int
    """The last batch with the old parallelism."""
    duration_ms: float
    """From the request until the new generation runs."""
    pause_ms: float
    """The part of the duration in which no rows were processed."""
    checkpoint_ms: float
    """The part of the pause for the last checkpoint with the old parallelism."""
    slots_ms: float
    """The part of the pause in which slots started and opened their state."""
    moved_key_groups: int
    """How many key groups were copied into the state of another subtask. The others were opened as they were."""
    local_bytes: int
    """Bytes that slots read from local disks."""
    durable_bytes: int
    """Bytes that slots read from durable storage."""

    def __repr__(self) -> str:
        return (
            f"<Rescaling {_utc(self.time)} from {self.parallelism_before} to {self.parallelism} subtasks after batch "
            f"{self.batch}: {self.duration_ms:,.0f} ms, paused {self.pause_ms:,.0f} ms, {self.moved_key_groups} key "
            "groups moved>"
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """A failure that a run recovered from. Times are seconds since the epoch, durations milliseconds."""

    time: float
    kind: Literal["slots", "restart"]
    """`slots`: lost slots were rebuilt, while the query and the other slots went on. `restart`: all slots went back to
    the last completed checkpoint."""
    slots: tuple[int, ...]
    """The slots that were rebuilt. Slot *i* holds subtask *i* of every step."""
    batch: int
    """The last batch that the rebuilt state contains."""
    duration_ms: float
    local_bytes: int
    """Bytes that slots read from local disks."""
    durable_bytes: int
    """Bytes that slots read from durable storage."""
    reason: str = ""
    """The error that caused a restart; or how each of the slots was lost."""

    def __repr__(self) -> str:
        what = "restart" if self.kind == "restart" else f"slots {', '.join(map(str, self.slots))}"
        read = f"{self.local_bytes:,} bytes from local disks, {self.durable_bytes:,} from storage"
        return (
            f"<Recovery {_utc(self.time)} {what} at batch {self.batch}: {self.duration_ms:,.0f} ms, {read}; "
            f"{first_line(self.reason)}>"
        )


def moved_key_groups(before: int, after: int, max_parallelism: int) -> int:
    """How many key groups a change of parallelism copies.

    A new subtask opens the largest piece of old state in its range as it is. It copies the key groups of the others.
    """
    moved = 0
    for index in range(after):
        groups = key_group_range(index, after, max_parallelism)
        pieces = Counter(subtask_of(group, before, max_parallelism) for group in groups)
        moved += len(groups) - max(pieces.values())
    return moved


@dataclass(frozen=True, slots=True)
class Began:
    """The moment at which something began."""

    time: float
    """Seconds since the epoch, to be shown."""
    steady: float
    """By a clock that nobody sets, for durations."""

    @classmethod
    def now(cls) -> Began:
        return cls(time.time(), time.monotonic())

    def ms_until(self, steady: float | None = None) -> float:
        """The milliseconds from then until now, or until another moment of `time.monotonic`."""
        return ((time.monotonic() if steady is None else steady) - self.steady) * 1000


def lost_slots_text(lost: Mapping[int, str]) -> str:
    """Why slots were lost, in one line: `slot 0: …; slots 1, 2: …`."""
    slots: dict[str, list[int]] = {}
    for index, why in sorted(lost.items()):
        slots.setdefault(first_line(why), []).append(index)
    return "; ".join(
        f"slot{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: {why}" for why, some in slots.items()
    )


def first_line(text: str) -> str:
    """The beginning of a text that may hold a whole traceback."""
    return next(iter(text.splitlines()), "")[:200]


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def slot_recovery(began: Began, batch: int, rebuilt: Mapping[int, Sequence[Rebuilt]], reason: str = "") -> Recovery:
    """The record of slots that were rebuilt at `batch`, from `began` until now."""
    states = [state for some in rebuilt.values() for state in some]
    return Recovery(
        time=began.time,
        kind="slots",
        slots=tuple(sorted(rebuilt)),
        batch=batch,
        duration_ms=began.ms_until(),
        local_bytes=sum(state.local_bytes for state in states),
        durable_bytes=sum(state.durable_bytes for state in states),
        reason=reason,
    )
