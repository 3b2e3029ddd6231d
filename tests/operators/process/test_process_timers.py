"""Timers fire once, in the order of time, whatever is run again, restarted, chained or deleted meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError, StrandlineError, UserCodeError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.testing.harness import ProcessorHarness
from tests.examples import examples

SERVICES = ["heap", "rocksdb"]
INPUT = "k string, op string, t long"
OUTPUT = "k string, t long, n long, timers array<long>"


class Alarms(KeyedProcessor):
    """Does to timers what its rows say; a timer that fires may set and delete others, by its own time."""

    def open(self, context: Any) -> None:
        self.fired = context.value_state("fired", "long")

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
        for row in rows:
            (context.register_timer if row.op == "set" else context.delete_timer)(row.t)

    def on_timer(self, key: Any, timestamp: int, context: Any) -> Iterator[Any]:
        self.fired.update((self.fired.get() or 0) + 1)
        yield (*key, timestamp, self.fired.get(), context.list_timers())
        for op, t in consequences(timestamp):
            (context.register_timer if op == "set" else context.delete_timer)(t)


def consequences(t: int) -> list[tuple[str, int]]:
    chained = []
    if t % 3 == 0:
        chained.append(("set", t + 2))
    if t % 4 == 0:
        chained.append(("delete", t + 1))
    if t % 5 == 0:
        chained.append(("set", t - 1))
    if t % 7 == 0:
        chained += [("delete", t + 3), ("set", t + 3)]
    return chained


def harness(
    service: str,
    time_mode: str = "event",
    processor: KeyedProcessor | None = None,
    limits: ProcessLimits = DEFAULT_LIMITS,
) -> ProcessorHarness:
    return ProcessorHarness(
        processor or Alarms(),
        input_schema=INPUT,
        key="k",
        output_schema=OUTPUT,
        time_mode=time_mode,
        timer_service=service,  # type: ignore[arg-type]
        limits=limits,
    )


class Model:
    """Timers as sets of times."""

    def __init__(self) -> None:
        self.timers: dict[Any, set[int]] = {}
        self.fired: dict[Any, int] = {}
        self.deleted: set[tuple[Any, int]] = set()

    def copy(self) -> Model:
        other = Model()
        other.timers = {key: set(times) for key, times in self.timers.items()}
        other.fired = dict(self.fired)
        return other

    def apply(self, key: Any, op: str, t: int) -> None:
        if op == "delete":
            self.deleted.add((key, t))
        (set.add if op == "set" else set.discard)(self.timers.setdefault(key, set()), t)

    def batch(self, rows: list[Any], until: int | None) -> list[Any]:
        for key, op, t in rows:
            self.apply(key, op, t)
        due = [(t, key) for key, times in self.timers.items() for t in times if until is not None and t <= until]
        made = []
        self.deleted.clear()
        for t, key in sorted(due, key=lambda timer: timer[0]):
            if (key, t) not in self.deleted:
                self.fired[key] = self.fired.get(key, 0) + 1
                made.append((key, t, self.fired[key], sorted(self.timers[key])))
                for op, other in consequences(t):
                    self.apply(key, op, other)
                self.timers[key].discard(t)
        return made

    def earliest(self) -> int | None:
        return min((t for times in self.timers.values() for t in times), default=None)


row = st.tuples(
    st.sampled_from(["", "a", "b", "a\0", None]), st.sampled_from(["set", "set", "delete"]), st.integers(-5, 40)
)
batch = st.tuples(
    st.lists(row, max_size=8),
    st.none() | st.integers(0, 12),
    st.sampled_from(["commit", "commit", "lost", "restart"]),
)


@pytest.mark.parametrize("service", SERVICES)
@settings(max_examples=examples(80), deadline=None)
@given(
    batches=st.lists(batch, max_size=8),
    limit=st.sampled_from([1, 2, 1000]),
    clock=st.sampled_from(["event", "processing"]),
)
def test_timers_follow_a_plain_model(service: str, batches: Any, limit: int, clock: str) -> None:
    model, now = Model(), 0
    with harness(service, clock, limits=ProcessLimits(first_chunk=limit, largest_chunk=limit)) as h:
        for rows, step, how in batches:
            now += step or 0
            if clock == "event":
                h.watermark_ms = until = now if step is not None or h.watermark_ms is not None else None
            else:
                h.processing_time_ms = until = now
            then = model.copy()
            expected = then.batch(sorted(rows, key=lambda row: row[0] or ""), until)
            made = h.process(rows, commit=how != "lost")
            assert [row.t for row in made] == sorted(row.t for row in made)
            assert in_order(made) == in_order(expected)
            assert h.next_timer_ms == then.earliest()
            if how == "restart":
                h.restart()
            if how != "lost":
                model = then
            for key in model.timers:
                assert h.timers(key) == sorted(model.timers[key])
                assert h.state("fired", key) == model.fired.get(key)


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(map(tuple, rows), key=lambda row: (row[1], row[0] is not None, row[0] or ""))


@pytest.mark.parametrize("service", SERVICES)
def test_a_try_that_is_void_changes_no_timer_even_if_it_fired_all(service: str) -> None:
    with harness(service) as h:
        h.process([("a", "set", 7), ("b", "set", 8), ("b", "set", 101)])
        for _ in range(3):
            assert [row.t for row in h.advance_watermark(10, commit=False)] == [7, 8]
        assert [row.t for row in h.advance_watermark(7)] == [7]
        assert [row.t for row in h.advance_watermark(200)] == [8, 10, 101]
        assert h.next_timer_ms == 9


@pytest.mark.parametrize("service", SERVICES)
def test_a_due_timer_set_by_a_timer_waits_for_the_next_batch_which_is_asked_for(service: str) -> None:
    with harness(service) as h:
        h.process([("a", "set", 9)])
        assert [row.t for row in h.advance_watermark(50)] == [9]
        assert h.next_timer_ms == 11
        assert [row.t for row in h.process([])] == [11]
        assert h.next_timer_ms is None


@pytest.mark.parametrize("service", SERVICES)
def test_a_due_timer_set_by_a_row_fires_after_the_rows_of_the_same_batch(service: str) -> None:
    with harness(service) as h:
        h.advance_watermark(50)
        made = h.process([("b", "set", 1), ("a", "set", 2), ("c", "set", 46), ("c", "set", 51)])
        assert [(row.k, row.t) for row in made] == [("b", 1), ("a", 2), ("c", 46)]
        assert h.timers("c") == [51]


@pytest.mark.parametrize("service", SERVICES)
def test_a_timer_that_sets_itself_again_is_gone_after_the_call_as_in_spark(service: str) -> None:
    class Again(Alarms):
        def on_timer(self, key: Any, timestamp: int, context: Any) -> Any:
            context.register_timer(timestamp)
            return [(*key, timestamp, 0, context.list_timers())]

    with harness(service, processor=Again()) as h:
        h.process([("a", "set", 1)])
        assert h.advance_watermark(5) == [("a", 1, 0, [1])]
        assert h.process([]) == []
        assert h.next_timer_ms is None


@pytest.mark.parametrize("service", SERVICES)
def test_many_timers_fire_in_chunks_with_their_own_keys_state(service: str) -> None:
    with harness(service, limits=ProcessLimits(output_rows=100)) as h:
        h.process([(f"k{at}", "set", at * 30 + 1) for at in range(3000)])
        h.restart()
        made = h.advance_watermark(10**6)
        assert [(row.k, row.t, row.n) for row in made] == [(f"k{at}", at * 30 + 1, 1) for at in range(3000)]


def test_a_session_that_moves_its_timer_all_the_time_keeps_the_index_small() -> None:
    with harness("heap") as h:
        for at in range(60):
            h.process(
                [(f"k{key}", op, t) for key in range(50) for op, t in (("delete", at + 1000), ("set", at + 1001))]
            )
        subtask: Any = h.operator._subtask
        assert len(subtask._timers._index._heap) <= 2 * 50 + 1024
        assert h.next_timer_ms == 1060


@pytest.mark.parametrize("service", SERVICES)
def test_keys_of_every_type_come_back_as_they_were(service: str) -> None:
    at = datetime(2024, 2, 29, 12, tzinfo=UTC)
    seen: list[Any] = []

    class Keys(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            seen.append(key)
            context.register_timer(1)

        def on_timer(self, key: Any, timestamp: int, context: Any) -> None:
            assert context.list_timers() == [1]
            seen.append(key)

    schema = (
        "a long, d double, b boolean, y binary, ts timestamp, de decimal(5,2), s struct<p:int,q:array<struct<r:int>>>"
    )
    full = (1, -0.0, True, b"\0\xff", at, Decimal("1.25"), {"p": 1, "q": [{"r": 2}]})
    rows = [full, (None,) * 7, (2, math.nan, False, b"", at, Decimal("0.00"), {"p": None, "q": None})]
    with ProcessorHarness(
        Keys(), input_schema=schema, key=["a", "d", "b", "y", "ts", "de", "s"], output_schema="n long",
        time_mode="processing", timer_service=service,  # type: ignore[arg-type]
    ) as h:  # fmt: skip
        h.process(rows)
        h.restart()
        h.advance_processing_time(5)
    given_keys, fired = seen[:3], seen[3:]
    assert {repr(key).replace("-0.0", "0.0") for key in fired} == {
        repr(key).replace("-0.0", "0.0") for key in given_keys
    }
    assert next(key for key in fired if key[0] == 1)[6].q[0].r == 2


@pytest.mark.parametrize("service", SERVICES)
def test_event_timers_wait_for_the_first_watermark(service: str) -> None:
    with harness(service) as h:
        assert h.process([("a", "set", -5)]) == []
        assert h.advance_processing_time("1h") == []
        assert h.next_timer_ms == -5
        assert [row.t for row in h.advance_watermark(-4)] == [-5]


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_an_error_in_on_timer_names_the_key_and_the_method(kind: type[BaseException]) -> None:
    class Broken(Alarms):
        def on_timer(self, key: Any, timestamp: int, context: Any) -> Any:
            raise kind("no luck")

    with harness("heap", processor=Broken()) as h:
        h.process([("a", "set", 1)])
        with pytest.raises(UserCodeError, match=r"key \('a',\), batch 2: on_timer\(\) failed"):
            h.advance_watermark(5)


def test_a_wrong_row_of_a_timer_names_its_key() -> None:
    class Wrong(Alarms):
        def on_timer(self, key: Any, timestamp: int, context: Any) -> Any:
            return [(*key, "x" if key == ("b",) else 1, 1, [])]

    with harness("heap", processor=Wrong()) as h:
        h.process([("a", "set", 1), ("b", "set", 2), ("c", "set", 3)])
        with pytest.raises(StrandlineError, match=r"key \('b',\): output column 't'"):
            h.advance_watermark(5)


@pytest.mark.parametrize("service", SERVICES)
def test_plain_keys_come_back_as_they_were(service: str) -> None:
    at = datetime(2024, 2, 29, 12, 0, 0, 123456)
    seen: list[Any] = []

    class Keys(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            seen.append(key)
            context.register_timer(np.int64(1))

        def on_timer(self, key: Any, timestamp: int, context: Any) -> None:
            seen.append(key)

    plain = "i int, d double, b boolean, y binary, ts timestamp, tn timestamp_ntz, dt date"
    schema = f"{plain}, iv interval day to second, a array<int>"
    full = (
        1,
        1.5,
        True,
        b"\0\xff",
        at.replace(tzinfo=UTC),
        at,
        at.date(),
        timedelta(days=-1, microseconds=3),
        [1, None],
    )
    with ProcessorHarness(
        Keys(), input_schema=schema, key=["i", "d", "b", "y", "ts", "tn", "dt", "iv", "a"], output_schema="n long",
        time_mode="processing", timer_service=service,  # type: ignore[arg-type]
    ) as h:  # fmt: skip
        h.process([full])
        h.restart()
        h.process([(None,) * 9])
        h.restart()
        h.advance_processing_time(5)
    assert seen[:2] == [full, (None,) * 9]
    assert sorted(seen[2:], key=str) == sorted(seen[:2], key=str)


@pytest.mark.parametrize("time", [1.5, "1", None, 2**63])
def test_a_time_that_is_none_is_refused(time: Any) -> None:
    class Odd(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            context.register_timer(time)

    with harness("heap", processor=Odd()) as h, pytest.raises(StrandlineError, match="whole number of milliseconds"):
        h.process([("a", "set", 1)])


def test_timers_are_refused_outside_of_a_key() -> None:
    class Early(KeyedProcessor):
        def open(self, context: Any) -> None:
            context.register_timer(1)

    with pytest.raises(StrandlineError, match=r"outside of process\(\) and on_timer\(\)"):
        harness("heap", processor=Early())


def test_timers_are_part_of_the_declared_states() -> None:
    with harness("heap") as h:
        assert [(state.name, state.kind) for state in h.operator.states()] == [
            ("fired", "value"),
            ("__sl_timers", "timers"),
        ]


def test_wrong_words_are_found_at_once() -> None:
    with pytest.raises(
        JobDefinitionError, match="time_mode='wall' is not valid; use 'none' or 'processing' or 'event'"
    ):
        harness("heap", "wall")
    with pytest.raises(JobDefinitionError, match="timer_service='disk' is not valid; use 'heap' or 'rocksdb'"):
        harness("disk")
