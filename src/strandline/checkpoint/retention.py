"""Which completed checkpoints are retained."""

from __future__ import annotations

from collections.abc import Sequence


def retain(retained: Sequence[int], completed: int, num_retained: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The checkpoints that are retained after `completed` (newest last), and the dropped ones (oldest first)."""
    num_retained = max(1, num_retained)
    ids = sorted({*retained, completed})
    return tuple(ids[-num_retained:]), tuple(ids[:-num_retained])
