"""Minimum, maximum, average and percentiles of figures, as Flink gives them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class StatsSummary(Struct, frozen=True):
    """The spread of a figure. All are 0 if there is none."""

    min: int = 0
    max: int = 0
    avg: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0


def spread(values: Iterable[float]) -> StatsSummary:
    """The spread of these values."""
    ordered = sorted(values)
    if not ordered:
        return StatsSummary()
    p50, p90, p95, p99, p999 = (_percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99, 0.999))
    average = round(sum(ordered) / len(ordered))
    return StatsSummary(round(ordered[0]), round(ordered[-1]), average, p50, p90, p95, p99, p999)


def _percentile(ordered: list[float], share: float) -> float:
    """The value below which that share of the values lies, between two neighbours by their distance.

    The place is that of Apache Commons Math, which Flink uses. The page computes the same in `checkpoints.js`.
    """
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (place - low) * (ordered[high] - ordered[low]), 3)
