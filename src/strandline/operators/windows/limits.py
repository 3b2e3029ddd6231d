"""How much a window operator works on, and holds in memory, at a time."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Bounds of the steps of a window operator."""

    grouping: GroupingLimits = DEFAULT_LIMITS
    chunk_entries: int = 1 << 17
    """About how many stored panes are merged at a time."""
    looks_per_gap: int = 16
    """Sessions are looked at in steps of this part of their gap, so that the time index has few different times."""


DEFAULT_WINDOW_LIMITS = WindowLimits()
