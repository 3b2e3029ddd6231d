"""The harness runs a processor as a slot would, and its own mistakes are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import Row

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.testing import ProcessorHarness


class CountVisits(KeyedProcessor):
    """Counts visits, and begins anew after an hour without one."""

    def __init__(self) -> None:
        self.closed = 0
        self.calls = 0

    def open(self, context: Any) -> None:
        self.visits = context.value_state("visits", "long")

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        self.calls += 1
        for timer in context.list_timers():
            context.delete_timer(timer)
        self.visits.update((self.visits.get() or 0) + sum(1 for _ in rows))
        context.register_timer(context.processing_time + 3_600_000)
        yield (*key, self.visits.get())

    def on_timer(self, key: Any, timestamp: int, context: Any) -> Iterator[Any]:
        self.visits.clear()
        yield (*key, 0)

    def close(self) -> None:
        self.closed += 1


def visits(processor: KeyedProcessor | None = None) -> ProcessorHarness:
    return ProcessorHarness(
        processor or CountVisits(),
        input_schema="user string, at timestamp",
        key="user",
        output_schema="user string, n long",
        time_mode="processing",
    )


def test_the_example_of_its_documentation_is_true() -> None:
    with visits() as h:
        assert h.process([("ann", None), {"user": "bob"}]) == [("ann", 1), ("bob", 1)]
        assert h.state("visits", "ann") == 1
        assert h.timers("ann") == [3_600_000]
        h.restart()
        assert sorted(h.advance_processing_time("1h")) == [("ann", 0), ("bob", 0)]


def test_rows_come_back_with_names_and_in_the_order_of_their_keys_first_row() -> None:
    with visits() as h:
        made = h.process([("b", None), Row(user="a", at=datetime(2024, 1, 1)), ["b", None]])
        assert [(row.user, row.n) for row in made] == [("b", 2), ("a", 1)]


def test_a_lost_batch_leaves_nothing_and_runs_again() -> None:
    with visits() as h:
        for commit in (False, False, True):
            assert h.process([("ann", None)], commit=commit) == [("ann", 1)]
        assert h.advance_processing_time("1h", commit=False) == [("ann", 0)]
        assert h.state("visits", "ann") == 1
        assert h.processing_time_ms == 0
        assert h.process([("ann", None)]) == [("ann", 2)]


def test_a_restart_runs_a_fresh_copy_over_the_same_state() -> None:
    first = CountVisits()
    with visits(first) as h:
        h.process([("ann", None)])
        h.restart()
        assert h.process([("ann", None)]) == [("ann", 2)]
        assert isinstance(h.processor, CountVisits)
        assert (first.closed, first.calls, h.processor.calls) == (1, 1, 1)
    h.close()
    assert h.processor.closed == 1


def test_the_harness_says_what_is_wrong_with_a_question() -> None:
    with visits() as h:
        with pytest.raises(StrandlineError, match="no state 'visit'; the processor declared visits"):
            h.state("visit", "ann")
        with pytest.raises(StrandlineError, match="no side output 'late' among none"):
            h.side("late")
        with pytest.raises(SchemaError, match=r"a key has 1 values \(user\), got 2"):
            h.state("visits", ("ann", 1))
        with pytest.raises(SchemaError, match="the test's input, key of row 1: output column 'user'"):
            h.process([("ann", None), (7, None)])
        h.advance_watermark(10)
        with pytest.raises(StrandlineError, match="a watermark never goes back: it is at 10"):
            h.advance_watermark(9)


def test_time_never_goes_back() -> None:
    with visits() as h:
        h.advance_processing_time("10s")
        with pytest.raises(StrandlineError, match="processing time never goes back: it is at 10000 and cannot move to"):
            h.advance_processing_time(-1)
        with pytest.raises(StrandlineError, match="processing time never goes back"):
            h.processing_time_ms = 9_999
        h.watermark_ms = 10
        with pytest.raises(StrandlineError, match="a watermark never goes back: it is at 10 and cannot move to None"):
            h.watermark_ms = None


class Shopping(KeyedProcessor):
    """Has a state of every kind, and shows what is in them."""

    def open(self, context: Any) -> None:
        self.last = context.value_state("last", "item string, n long", ttl="10s")
        self.items = context.list_state("items", "string")
        self.prices = context.map_state("prices", "string", "double")
        self.most = context.reducing_state("most", "long", max)
        self.mean = context.aggregating_state(
            "mean", "n long, s long", create=lambda: (0, 0), add=lambda a, v: (a[0] + 1, a[1] + v), result=tuple
        )

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        states = self.last.get(), list(self.items.get()), dict(self.prices.items()), self.most.get(), self.mean.get()
        yield (*key, str(states))


def test_a_test_can_set_and_delete_state() -> None:
    contents = {"last": ("tea", 2), "items": ["tea", "milk"], "prices": {"tea": 3.5}, "most": 7, "mean": (2, 10)}
    arguments: Any = {"input_schema": "user string", "key": "user", "output_schema": "user string, found string"}
    with ProcessorHarness(Shopping(), **arguments) as h:
        for name, content in contents.items():
            h.set_state(name, "ann", content)
            h.set_state(name, "ann", content)  # replaces it: a list does not have its values twice
            assert h.state(name, "ann") == content
        nothing = "(None, [], {}, None, None)"
        assert h.process([("ann",), ("bob",)]) == [("ann", str(tuple(contents.values()))), ("bob", nothing)]
        h.restart()
        h.advance_processing_time("10s")
        assert h.process([("ann",)]) == [("ann", str((None, *list(contents.values())[1:])))]  # its time to live is over
        for name in contents:
            h.delete_state(name, "ann")
        assert h.process([("ann",)]) == [("ann", nothing)]
        with pytest.raises(StrandlineError, match="no state 'lost'"):
            h.set_state("lost", "ann", 1)
        with pytest.raises(SchemaError, match="state 'most' of operator 'test'"):
            h.set_state("most", "ann", "much")


class Pass(KeyedProcessor):
    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        yield from rows


@pytest.mark.parametrize(("words", "passes"), [({}, False), ({"late": "keep"}, True), ({"late": "aside"}, False)])
@pytest.mark.parametrize("mode", ["event", "EventTime"])
def test_late_rows_are_treated_as_in_a_job(words: Any, passes: bool, mode: str) -> None:
    columns: Any = {"input_schema": "k long, at timestamp", "key": "k", "output_schema": "k long, at timestamp"}
    old, new = (1, datetime(2025, 1, 1, tzinfo=UTC)), (2, datetime(2026, 1, 1, tzinfo=UTC))
    with ProcessorHarness(Pass(), **columns, time_mode=mode, event_time="at", **words) as h:
        h.advance_watermark(int(old[1].timestamp() * 1000))
        assert h.process([old, new]) == ([old, new] if passes else [new])
        assert h.late_rows == (0 if passes else 1)
        if words.get("late") == "aside":
            assert h.side("aside") == [old]


def test_a_processor_that_cannot_be_copied_runs_but_does_not_restart() -> None:
    stuck = CountVisits()
    stuck.lock = threading.Lock()  # type: ignore[attr-defined]
    with visits(stuck) as h:
        assert h.process([("ann", None)]) == [("ann", 1)]
        with pytest.raises(StrandlineError, match="cannot be restarted"):
            h.restart()
