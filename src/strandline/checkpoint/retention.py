"""How many completed checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence


def retain(retained: Sequence[int], completed: int, num_retained: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which checkpoints stay after `completed` (newest last), and which are dropped (oldest first)."""
    num_retained = max(1, num_retained)
    ids = sorted({*retained, completed})
    return tuple(ids[-num_retained:]), tuple(ids[:-num_retained])
