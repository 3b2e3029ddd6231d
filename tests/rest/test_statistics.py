"""Percentiles as Flink computes them."""

from __future__ import annotations

import pytest

from strandline.rest.statistics import StatsSummary, spread


def test_percentiles_are_those_of_flinks_library() -> None:
    found = spread(range(1, 11))
    assert (found.min, found.max, found.avg) == (1, 10, 6)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx((5.5, 9.9, 10, 10))
    assert spread(range(1, 101)).p95 == pytest.approx(95.95)


def test_few_values_have_percentiles_too() -> None:
    assert spread([]) == StatsSummary()
    assert spread([7]).p50 == spread([7]).p999 == 7
    assert spread([1, 3]).p50 == 2
