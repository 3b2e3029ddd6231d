"""How much an aggregation works on, and holds in memory, at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupingLimits:
    """Bounds of the steps of an aggregation, in rows or keys and in bytes."""

    gather_rows: int = 1 << 18
    gather_bytes: int = 64 << 20
    """Input rows are gathered up to here before they are grouped: a grouping is costly for a small record batch."""
    held_groups: int = 1 << 20
    held_bytes: int = 256 << 20
    """Partial results are held up to here. Beyond it they are merged into state before the batch ends."""
    slice_rows: int = 1 << 16
    first_slice_rows: int = 1 << 13
    slice_bytes: int = 32 << 20
    """State is read and written for a slice of keys at a time. Slices begin short, and grow unless values are large."""
    sketch_bytes: int = 1 << 21
    """Sketches of distinct values are unpacked for up to this many stored bytes at a time."""


DEFAULT_LIMITS = GroupingLimits()
