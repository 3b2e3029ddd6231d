"""Which places of a plan are read, and which share the rows of another."""

from __future__ import annotations

import pytest

from strandline.runtime.driver.source_reads import _reads

FILE, EMPTY, TABLE = ("LogicalRelation", True), ("LocalRelation", True), ("Range", False)


@pytest.mark.parametrize(
    ("places", "logical", "reused", "reads"),
    [
        ((0, 0), [FILE, FILE], [False, False], {0: 2}),
        ((0, 0, 0), [FILE, FILE, FILE], [False, True, True], {0: 1}),
        ((0, 1, 0), [FILE, TABLE, FILE, TABLE, FILE], [False, False, False, True, True], {0: 1, 1: 1}),
        ((0, 1, 0, 1), [FILE, EMPTY, FILE, EMPTY], [False, True], {0: 1}),
        ((0, 0), [FILE, FILE, FILE], [False, True, False], {0: 1}),  # the last one is the tick source
        ((0, 0), [FILE, FILE], [False], {}),  # Spark left out a place that has rows
    ],
)
def test_reads_of_streams_with_rows(
    places: tuple[int, ...], logical: list[tuple[str, bool]], reused: list[bool], reads: dict[int, int]
) -> None:
    assert _reads(places, logical, reused) == reads
