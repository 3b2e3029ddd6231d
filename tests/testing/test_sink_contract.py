"""A sink that breaks its contract is told which rows are wrong, and what was done before."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.sqlite import SQLiteSink
from strandline.testing.sink import Row, SinkContract, SinkJob, a_context
from strandline.testing.sink_rows import check_rows

RIGHT = [("a", 1), ("a", 1), ("b", 2), ("c", 3)]


class Broken(SinkContract):
    """Its target loses a row, makes one up, and has one twice."""

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        return [("b", 2), ("b", 2), ("z", 9)]


def test_the_rows_and_the_steps_of_a_failure_are_told(tmp_path: Path) -> None:
    context = a_context(tmp_path / "checkpoints")
    job = SinkJob(SQLiteSink(tmp_path / "target.db", "visits").bound(context), context)
    job.start().checkpoint([("a", 1)], [("b", 2)])
    with pytest.raises(AssertionError) as raised:
        Broken().check(job, [("a", 1), ("b", 2)])
    assert str(raised.value).splitlines() == [
        "the target has 3 rows and should have 2: 1 row is missing: ('a', 1); 1 row is there and should not be: "
        "('z', 9); 1 row is there too often: ('b', 2) 2 times, not 1",
        "after these steps:",
        "  1. a driver starts without a checkpoint",
        "  2. it is generation 1",
        "  3. generation 1 has claimed and recovered the target",
        "  4. generation 1 has staged batch 1: 2 rows of 2 tasks",
        "  5. generation 1 has completed checkpoint 1",
        "  6. generation 1 publishes checkpoint 1",
    ]


def test_rows_in_any_order_are_right() -> None:
    check_rows(reversed(RIGHT), RIGHT)


def test_rows_are_counted() -> None:
    with pytest.raises(AssertionError, match=r"has 3 rows and should have 4: 1 row is missing: \('a', 1\)$"):
        check_rows(RIGHT[1:], RIGHT)
    with pytest.raises(AssertionError, match=r"1 row is there too often: \('c', 3\) 2 times, not 1$"):
        check_rows([*RIGHT, RIGHT[-1]], RIGHT)


def test_of_many_rows_and_steps_some_are_told() -> None:
    with pytest.raises(AssertionError) as raised:
        check_rows([], [("a", n) for n in range(30)], [f"step {n}" for n in range(1, 31)])
    told = str(raised.value)
    assert "30 rows are missing: " in told
    assert "and 20 more\nafter these steps:\n  ...\n  19. step 19\n" in told
    assert told.endswith("\n  30. step 30")
