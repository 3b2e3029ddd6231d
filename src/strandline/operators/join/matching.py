"""Finds the pairs of rows that join: equal keys, and times within bounds of each other."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

LARGEST_PLACE: Final = 1 << 62
"""Key and time are combined in one number of up to this size."""


def matching(
    keys: npt.NDArray[np.int64],
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
    target_keys: npt.NDArray[np.int64],
    target_times: npt.NDArray[np.int64],
    largest_place: int = LARGEST_PLACE,
) -> Matches:
    """For each query, the targets with the same key and a time from its `low` to its `high`."""
    if not len(keys) or not len(target_keys):
        nothing = np.zeros(len(keys), np.int64)
        return Matches(np.arange(len(target_keys)), nothing, nothing)
    first, last = int(target_times.min()), int(target_times.max())
    if (max(int(keys.max()), int(target_keys.max())) + 1) * (last - first + 2) < largest_place:
        low, high = np.clip(low, first, last + 1) - first, np.clip(high + 1, first, last + 1) - first
        ranks, span = target_times - first, last - first + 2
    else:
        times = np.unique(target_times)
        low, high = np.searchsorted(times, low), np.searchsorted(times, high, side="right")
        ranks, span = np.searchsorted(times, target_times), len(times) + 1
    # The place of a target combines its key and its time, so the targets of a query are next to each other.
    places = target_keys * span + ranks
    order = np.argsort(places, kind="stable")
    places = places[order]
    return Matches(order, np.searchsorted(places, keys * span + low), np.searchsorted(places, keys * span + high))


class Matches:
    """Pairs of queries and targets. The targets of a query are a range of `order`."""

    def __init__(self, order: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> None:
        self._order = order
        self._begin = begin
        self._counts = np.maximum(end - begin, 0)
        self._totals = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._totals[-1]) if len(self._totals) else 0

    def queries(self) -> npt.NDArray[np.bool_]:
        """Which queries have a target."""
        found_one: npt.NDArray[np.bool_] = self._counts > 0
        return found_one

    def targets(self) -> npt.NDArray[np.bool_]:
        """Which targets have a query."""
        steps = np.zeros(len(self._order) + 1, np.int64)
        np.add.at(steps, self._begin, self._counts > 0)
        np.add.at(steps, self._begin + self._counts, -(self._counts > 0).astype(np.int64))
        met = np.zeros(len(self._order), np.bool_)
        met[self._order] = np.cumsum(steps)[:-1] > 0
        return met

    def pairs(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The pairs from number `start` to `stop`: the places of the queries, and of the targets."""
        numbers = np.arange(start, min(stop, len(self)))
        queries = np.searchsorted(self._totals, numbers, side="right")
        within: Any = numbers - (self._totals[queries] - self._counts[queries])
        return queries, self._order[self._begin[queries] + within]
