"""Side outputs, late rows, folding states, and what is found wrong before a job runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import ProcessLimits
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from strandline.testing.harness import ProcessorHarness
from tests.examples import examples

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Split(KeyedProcessor):
    """Sends odd numbers aside."""

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        for row in rows:
            if row.x % 2:
                context.emit("odd", (*key, row.x))
            else:
                yield (*key, row.x)


def split(**more: Any) -> ProcessorHarness:
    arguments = {
        "input_schema": "k string, x long",
        "key": "k",
        "output_schema": "k string, x long",
        "side_outputs": {"odd": "k string, x long"},
    }
    return ProcessorHarness(**{"processor": Split(), **arguments, **more})


# --- side outputs --------------------------------------------------------------------------------


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30), limit=st.sampled_from([1, 3, 99])
)
def test_every_row_goes_to_the_output_it_was_sent_to(rows: Any, limit: int) -> None:
    with split(limits=ProcessLimits(output_rows=limit)) as h:
        assert h.process(rows, commit=False) == h.process(rows)
        made = {(row.k, row.x) for row in h.side("odd")}
        assert made == {(k, x) for k, x in rows if x % 2}
        assert len(h.side("odd")) == sum(x % 2 for _, x in rows)


def test_a_timer_may_emit_too() -> None:
    class Later(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            context.register_timer(5)

        def on_timer(self, key: Any, timestamp: int, context: Any) -> None:
            context.emit("odd", {"k": key[0], "x": timestamp})

    with split(processor=Later(), time_mode="processing") as h:
        h.process([("a", 1), ("b", 1)])
        h.advance_processing_time(10)
        assert sorted(h.side("odd")) == [("a", 5), ("b", 5)]


def test_a_wrong_row_for_a_side_output_is_told_with_its_key_and_cannot_be_swallowed() -> None:
    class Wrong(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            with suppress(SchemaError):
                context.emit("odd", (*key, "x" if key == ("b",) else 1))

    for limit in (1, 99):
        with split(processor=Wrong(), limits=ProcessLimits(output_rows=limit)) as h:
            with pytest.raises(SchemaError, match=r"side output 'odd', key \('b',\): output column 'x'"):
                h.process([("a", 1), ("b", 1)])
            assert h.process([("a", 1)]) == []
            assert h.side("odd") == [("a", 1)]


def test_an_unknown_side_output_names_those_that_exist() -> None:
    class Lost(KeyedProcessor):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            context.emit("even", (1,))

    with split(processor=Lost()) as h, pytest.raises(StrandlineError, match=r"no side output 'even'; .* 'odd'"):
        h.process([("a", 1)])
    with (
        split(processor=Lost(), side_outputs=None) as h,
        pytest.raises(StrandlineError, match="name it in side_outputs="),
    ):
        h.process([("a", 1)])


# --- late rows -----------------------------------------------------------------------------------


class Pass(KeyedProcessor):
    """Gives its rows back."""

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        yield from rows


def timed(late: str, **more: Any) -> ProcessorHarness:
    schema = "k string, ts timestamp"
    return ProcessorHarness(
        Pass(),
        input_schema=schema,
        key="k",
        output_schema=schema,
        time_mode="event",
        event_time="ts",
        late=late,
        **more,
    )


def at(ms: float) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


times = st.none() | st.integers(-3, 12)


@settings(max_examples=examples(60), deadline=None)
@given(
    batches=st.lists(st.tuples(st.lists(st.tuples(st.sampled_from("ab"), times)), st.integers(0, 5)), max_size=4),
    late=st.sampled_from(["keep", "drop", "late"]),
)
def test_rows_up_to_the_last_batchs_watermark_are_late(batches: Any, late: str) -> None:
    watermark = None
    aside: list[Any] = []
    count = 0
    with timed(late) as h:
        for given_rows, step in batches:
            rows = [(k, None if ms is None else at(ms)) for k, ms in given_rows]
            passed = [
                row for row in rows
                if late == "keep" or watermark is None or row[1] is None or row[1] > at(watermark)
            ]  # fmt: skip
            gone = [row for row in rows if row not in passed]
            h.watermark_ms = (h.watermark_ms or 0) + step
            assert sorted(map(str, h.process(rows))) == sorted(map(str, map(row_of, passed)))
            watermark = h.watermark_ms
            aside += gone
            count += len(gone)
        assert h.late_rows == count
        if late == "late":
            assert sorted(map(str, h.side("late"))) == sorted(map(str, map(row_of, aside)))


def row_of(pair: tuple[Any, Any]) -> Any:
    from pyspark.sql import Row

    return Row(k=pair[0], ts=pair[1])


def test_a_time_between_two_milliseconds_is_compared_as_it_is() -> None:
    with timed("drop") as h:
        h.advance_watermark(10)
        assert [row.ts for row in h.process([("a", at(10)), ("a", at(10.001)), ("a", at(9.999))])] == [at(10.001)]
        assert h.late_rows == 2


def test_a_late_output_may_have_some_of_the_inputs_columns() -> None:
    with timed("late", side_outputs={"late": "ts timestamp"}) as h:
        h.advance_watermark(10)
        h.process([("a", at(3)), ("b", at(30))])
        assert h.side("late") == [(at(3),)]
    with pytest.raises(JobDefinitionError, match="its columns must be columns of the input; x bigint is not"):
        timed("late", side_outputs={"late": "x long"})


# --- the event time of output rows ----------------------------------------------------------------


class Shifted(KeyedProcessor):
    """Yields its rows with a time that is `by_ms` later, and a row without a time."""

    def __init__(self, by_ms: float) -> None:
        self.by = timedelta(milliseconds=by_ms)

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        for row in rows:
            yield row.k, row.ts + self.by
        yield (*key, None)


def shifted(by_ms: float, **more: Any) -> ProcessorHarness:
    schema = "k string, ts timestamp"
    event: Any = {"time_mode": "event", "event_time": "ts", "output_time": "ts"}
    return ProcessorHarness(Shifted(by_ms), input_schema=schema, key="k", output_schema=schema, **(event | more))


@given(
    by_ms=st.integers(-20, 5) | st.floats(-20, 5),
    delay_ms=st.integers(0, 20),
    moments=st.lists(st.integers(-5, 30), min_size=1),
    watermark=st.integers(0, 20),
)
def test_an_output_row_is_refused_exactly_if_the_next_step_would_find_it_late(
    by_ms: float, delay_ms: int, moments: list[int], watermark: int
) -> None:
    with shifted(by_ms, output_delay=delay_ms / 1000) as h:
        assert h.operator.time_columns == {"ts": delay_ms}
        h.advance_watermark(watermark)
        rows = [("a", at(moment)) for moment in moments]
        made = [moment + timedelta(milliseconds=by_ms) for _, moment in rows if moment > at(watermark)]
        late = [moment for moment in made if moment <= at(watermark - delay_ms)]
        if late:
            with pytest.raises(
                UserCodeError, match=r"key \('a',\): the processor yielded a row with ts = 19"
            ) as caught:
                h.process(rows)
            assert f"ts = {late[0]}. The watermark is at {at(watermark)}" in str(caught.value)
            assert "output_delay=" in str(caught.value)
        else:
            assert [row.ts for row in h.process(rows)][: len(made)] == made


def test_before_the_first_watermark_no_output_row_is_late() -> None:
    with shifted(-1_000_000) as h:
        assert [row.ts for row in h.process([("a", at(0))])] == [at(-1_000_000), None]


class LateTimer(KeyedProcessor):
    """Yields a row with the time of its timer, and another one that is a day older."""

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
        for row in rows:
            context.register_timer(int(row.ts.timestamp() * 1000))

    def on_timer(self, key: Any, timestamp: int, context: Any) -> Iterator[Any]:
        yield *key, at(timestamp)
        if key == ("old",):
            yield *key, at(timestamp) - timedelta(days=1)


def test_rows_of_timers_are_compared_with_the_watermark_of_the_batch_before() -> None:
    schema = "k string, ts timestamp"
    event: Any = {"time_mode": "event", "event_time": "ts", "output_time": "ts"}
    with ProcessorHarness(LateTimer(), input_schema=schema, key="k", output_schema=schema, **event) as h:
        h.advance_watermark(0)
        h.process([("a", at(5)), ("old", at(10))])
        assert [row.ts for row in h.advance_watermark(7)] == [at(5)]
        with pytest.raises(UserCodeError, match=r"operator 'test', subtask 0, batch 4, key \('old',\)"):
            h.advance_watermark(12)


def test_the_time_column_of_the_output_is_checked_when_the_job_is_built() -> None:
    for wrong, told in (
        ({"output_time": "at"}, r"output_time='at': no column 'at'"),
        ({"output_time": "k"}, r"output_time='k': the time column 'k' is of type string, not a timestamp"),
        ({"time_mode": "processing", "event_time": None}, r"output_time='ts' needs time_mode='event'"),
        ({"output_time": None, "output_delay": "5s"}, r"output_delay= needs output_time="),
    ):
        with pytest.raises(JobDefinitionError, match=f"^operator 'test': {told}"):
            shifted(0, **wrong)


def test_late_rows_need_a_time_column() -> None:
    for word in ("keep", "aside"):
        with pytest.raises(JobDefinitionError, match=f"late='{word}' needs time_mode='event'"):
            split(late=word)
    with pytest.raises(JobDefinitionError, match="late='' is not valid; use 'drop', 'keep' or the name of a side"):
        split(late="")
    with pytest.raises(JobDefinitionError, match="no column 'ts'; the columns are k, x"):
        split(event_time="ts")
    with pytest.raises(
        JobDefinitionError, match="the time column 'x' is of type bigint, not a timestamp; convert it first"
    ):
        split(event_time="x")


# --- folding states ------------------------------------------------------------------------------


class Folding(KeyedProcessor):
    """The largest value, and the mean."""

    def open(self, context: Any) -> None:
        self.largest = context.reducing_state("largest", "long", max, ttl="1s")
        self.mean = context.aggregating_state(
            "mean",
            "n long, s long",
            create=lambda: (0, 0),
            add=lambda held, x: (held[0] + 1, held[1] + x),
            result=lambda held: held[1] / held[0],
            merge=lambda a, b: (a[0] + b[0], a[1] + b[1]),
        )

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        for row in rows:
            if row.x is None:
                self.largest.clear()
                self.mean.clear()
            else:
                self.largest.add(row.x)
                self.mean.add(row.x)
        assert self.largest.exists() == (self.largest.get() is not None)
        assert self.mean.exists() == (self.mean.get() is not None)
        yield (*key, self.largest.get(), self.mean.get())


def folding() -> ProcessorHarness:
    return ProcessorHarness(
        Folding(), input_schema="k string, x long", key="k", output_schema="k string, m long, a double"
    )


numbers = st.lists(st.tuples(st.just("a"), st.none() | st.integers(-9, 9)), min_size=1, max_size=8)


@settings(max_examples=examples(40), deadline=None)
@given(batches=st.lists(st.tuples(numbers, st.booleans()), max_size=4))
def test_folding_states_follow_a_plain_model(batches: Any) -> None:
    held: list[int] = []
    with folding() as h:
        for rows, commit in batches:
            now = list(held)
            for _, x in rows:
                now = [] if x is None else [*now, x]
            expected = ("a", max(now), sum(now) / len(now)) if now else ("a", None, None)
            assert h.process(rows, commit) == [expected]
            held = now if commit else held
        assert h.state("mean", "a") == ((len(held), sum(held)) if held else None)


def test_folding_states_expire_and_merge() -> None:
    with folding() as h:
        h.process([("a", 5)])
        h.advance_processing_time("1s")
        assert h.process([("a", 3)]) == [("a", 3, 4.0)]
        assert [state.kind for state in h.operator.states()] == ["reducing", "aggregating"]

    class Merging(Folding):
        def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
            for row in rows:
                self.mean.merge((1, row.x))
            yield (*key, 0, self.mean.get())

    with ProcessorHarness(
        Merging(), input_schema="k string, x long", key="k", output_schema="k string, m long, a double"
    ) as h:
        assert h.process([("a", 5), ("a", 7)]) == [("a", 0, 6.0)]


# --- what is found before the run ----------------------------------------------------------------


class Declares(KeyedProcessor):
    """Declares what it is told to."""

    def __init__(self, declare: Any) -> None:
        self.declare = declare
        self.held: Any = None

    def open(self, context: Any) -> None:
        assert context.subtask == -1
        self.held = self.declare(context)


def checked(declare: Any) -> ProcessOperator:
    struct = parse_schema("k string, x long")
    return ProcessOperator("visits", Declares(declare), ["k"], struct, struct)


def test_a_check_opens_a_copy_and_knows_the_states() -> None:
    operator = checked(lambda context: context.value_state("n", "long", ttl="1h"))
    assert [(state.name, state.ttl_ms) for state in operator.check()] == [("n", 3_600_000)]
    assert isinstance(operator.processor, Declares)
    assert operator.processor.held is None
    assert operator.states() == []


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda c: c.value_state("a b", "long"), "cannot be the name of a state"),
        (lambda c: c.value_state("__sl_x", "long"), "names that begin with '__sl_'"),
        (lambda c: [c.value_state("x", "long"), c.map_state("x", "long", "long")], "declares the state 'x' twice"),
        (lambda c: c.value_state("x", "n lang"), "state 'x' of operator 'visits': cannot read the schema"),
        (lambda c: c.map_state("x", "long", "n lang"), "state 'x' of operator 'visits': cannot read the schema"),
        (lambda c: c.value_state("x", "long", ttl="soon"), "state 'x' of operator 'visits': ttl='soon' is not valid"),
        (lambda c: c.list_state("x", "long", ttl_update="never"), "ttl_update='never' is not valid; use 'write' or"),
        (lambda c: c.reducing_state("x", "long", "max"), "reduce= must be a function, not 'max'"),
        (lambda c: c.value_state("x", "long").get(), r"outside of process\(\)"),
    ],
)
def test_wrong_declarations_are_found_by_a_check(declare: Any, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=told):
        checked(declare).check()


def test_a_check_tells_an_error_of_open_and_a_processor_that_cannot_travel() -> None:
    with pytest.raises(UserCodeError, match=r"(?s)open\(\) failed in the driver.*ZeroDivisionError"):
        checked(lambda context: 1 / 0).check()
    stuck = checked(lambda context: None)
    stuck.processor.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(JobDefinitionError, match=r"Declares cannot be sent to the slots: .*lock"):
        stuck.check()
