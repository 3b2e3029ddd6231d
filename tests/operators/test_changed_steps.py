"""Changed steps over the state of the old ones: refused, or exactly what the changed step alone would have made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from strandline.errors import IncompatibleCheckpointError
from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
from strandline.operators.base import Operator
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.limits import JoinLimits
from strandline.operators.process.arrow_operator import ArrowProcessOperator
from strandline.operators.process.arrow_processor import ArrowProcessor
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.spark.spark_operator import SparkProcessorOperator
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.clocked import INFO, ClockedSlot
from tests.operators.restored import carry_over, changes_between

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
GROUPS = range(128)
INPUT = parse_schema("k string, j long, t timestamp, u timestamp, x long")
RIGHT = parse_schema("o string, i long, v timestamp, y string")


def at(ms: float | None) -> datetime | None:
    return None if ms is None else EPOCH + timedelta(milliseconds=ms)


class Keeps(KeyedProcessor):
    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long")


class KeepsColumns(ArrowProcessor):
    def open(self, context: Any) -> None:
        context.value_state("total", "n long")


class KeepsInSpark(StatefulProcessor):
    def init(self, handle: Any) -> None:
        handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return iter(())

    def close(self) -> None: ...


def joined(left: StructType, keys: Sequence[str] = ("k",), how: Any = "inner", **more: Any) -> JoinOperator:
    times: dict[str, Any] = {"left_time": "t", "right_time": "v", "lower_ms": -10, "upper_ms": 10}
    right_keys = {"k": "o", "j": "i", "x": "i"}
    return JoinOperator("s", keys, [right_keys[key] for key in keys], left, RIGHT, how, **{**times, **more})


def windowed(spec: Any) -> Callable[..., Operator]:
    def made(struct: StructType, keys: Sequence[str] = ("k",), time: str = "t") -> Operator:
        return WindowOperator("s", keys, struct, spec, time, {"n": agg.count()})

    return made


STEPS: dict[str, Callable[..., Operator]] = {
    "process": lambda struct, keys=("k",): ProcessOperator("s", Keeps(), keys, struct, struct),
    "spark": lambda struct, keys=("k",): SparkProcessorOperator("s", KeepsInSpark(), keys, struct, struct, rows="row"),
    "arrow": lambda struct, keys=("k",): ArrowProcessOperator("s", KeepsColumns(), keys, struct, struct),
    "aggregate": lambda struct, keys=("k",): AggregateOperator("s", keys, struct, {"n": agg.count()}),
    "window": windowed(SlidingWindow(20, 10)),
    "session": windowed(SessionWindow(20)),
    "deduplicate": lambda struct, keys=("k",), time="t": DeduplicateOperator("s", keys, struct, 10, time),
    "join": joined,
}


# --- keys, time columns, kinds -----------------------------------------------------------------------


def retyped(column: str, kind: str) -> StructType:
    return StructType(
        [
            StructField(f.name, parse_schema(f"c {kind}")[0].dataType if f.name == column else f.dataType)
            for f in INPUT.fields
        ]
    )


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ((INPUT, ("k",)), (INPUT, ("j",)), "the key: k string before, j bigint now"),
        ((INPUT, ("j",)), (INPUT, ("x",)), "the key: j bigint before, x bigint now, and nothing tells a renamed"),
        ((INPUT, ("k",)), (INPUT, ("k", "j")), "the key: k string before, k string, j bigint now"),
        ((INPUT, ("k", "j")), (INPUT, ("j", "k")), "the key: k string, j bigint before, j bigint, k string now"),
        ((INPUT, ("j",)), (retyped("j", "int"), ("j",)), "the key: j bigint before, j int now"),
    ],
)
def test_another_key_is_refused_in_every_kind_of_step(kind: str, before: Any, now: Any, text: str) -> None:
    if kind == "join" and "int" in text.split("before")[1].split():
        now = (now[0], ("x",))  # a join casts its keys to the wider type of both sides
        text = "the key: j bigint before, x bigint now"
    for allow in (False, True):
        with pytest.raises(IncompatibleCheckpointError) as caught:
            changes_between(STEPS[kind](*before), STEPS[kind](*now), allow)
        assert text in str(caught.value)
        assert "another uid" in str(caught.value)


@pytest.mark.parametrize("kind", STEPS)
def test_nullability_comments_and_other_columns_do_not_matter(kind: str) -> None:
    """But for a join, which stores all columns."""
    said = StructType([StructField(f.name, f.dataType, f.name != "k", {"comment": "x"}) for f in INPUT.fields])
    assert not changes_between(STEPS[kind](INPUT), STEPS[kind](said))
    wider = StructType([*said.fields, StructField("more", said["k"].dataType)])
    if kind == "join":
        with pytest.raises(IncompatibleCheckpointError, match="the left: k string, j bigint, t timestamp"):
            changes_between(STEPS[kind](INPUT), STEPS[kind](wider))
    else:
        assert not changes_between(STEPS[kind](INPUT), STEPS[kind](wider))


@pytest.mark.parametrize("before", STEPS)
@pytest.mark.parametrize("now", STEPS)
def test_a_step_of_another_kind_is_refused(before: str, now: str) -> None:
    user_code = {"process", "spark"}
    if before == now or {before, now} <= user_code:
        assert not changes_between(STEPS[before](INPUT), STEPS[now](INPUT))
        return
    for allow in (False, True):
        with pytest.raises(IncompatibleCheckpointError, match=r"kind of step|another kind of state"):
            changes_between(STEPS[before](INPUT), STEPS[now](INPUT), allow)


@pytest.mark.parametrize("kind", ["window", "session", "deduplicate"])
def test_another_time_column_is_refused(kind: str) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="the time column: t timestamp before, u timestamp now"):
        changes_between(STEPS[kind](INPUT), STEPS[kind](INPUT, time="u"))
    with pytest.raises(IncompatibleCheckpointError, match="t timestamp before, t timestamp_ntz now"):
        changes_between(STEPS[kind](INPUT), STEPS[kind](retyped("t", "timestamp_ntz")))


def test_the_clock_of_a_processor_may_come_but_not_become_another() -> None:
    def clocked(mode: Any) -> Operator:
        return ProcessOperator("s", Keeps(), ["k"], INPUT, INPUT, time_mode=mode)

    assert not changes_between(clocked("none"), clocked("event"))
    with pytest.raises(IncompatibleCheckpointError, match="time mode: processing before, event now, so the times of"):
        changes_between(clocked("processing"), clocked("event"), allow=True)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"has timers, and the step has no clock .*allow_non_restored"
    ):
        changes_between(clocked("processing"), clocked("none"))
    assert changes_between(clocked("processing"), clocked("none"), allow=True).dropped


# --- aggregates --------------------------------------------------------------------------------------

AGGREGATES: dict[str, Any] = {
    "n": agg.count(),
    "known": agg.count("x"),
    "total": agg.sum("x"),
    "least": agg.min("x"),
    "most": agg.max("y"),
    "mean": agg.avg("x"),
    "first": agg.first("x"),
    "last": agg.last("y"),
    "all": agg.collect_list("x"),
    "different": agg.approx_count_distinct("x"),
}
XS = ["short", "int", "long", "float", "double", "decimal(6,1)", "decimal(9,1)", "decimal(9,2)"]


def aggregated(names: Sequence[str], x: str, y: str) -> AggregateOperator:
    struct = parse_schema(f"k string, x {x}, y {y}")
    return AggregateOperator("s", ["k"], struct, {f"{name}_": AGGREGATES[name] for name in names})


class Best(ArrowAggregate):
    """A user's aggregate, of which only the type of its accumulator matters."""

    result_type = "double"

    def partial(self, rows: pa.Table) -> pa.Table: ...

    def merge(self, states: pa.Table) -> pa.Table: ...

    def result(self, states: pa.Table) -> Any: ...


def best(kind: pa.DataType) -> Any:
    return type("Best", (Best,), {"state_schema": pa.schema([("best", kind)])})()("x")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (pa.float64(), pa.int64()),
        (pa.int64(), pa.float64()),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("ms")),
        (pa.binary(4), pa.binary(8)),
        (pa.decimal256(10, 2), pa.decimal128(10, 2)),
    ],
)
@pytest.mark.parametrize("more", [{}, {"n": agg.count()}], ids=["alone", "with an aggregate that goes"])
def test_accumulators_of_user_code_that_have_another_type_are_refused(
    before: pa.DataType, now: pa.DataType, more: dict[str, agg.Aggregate]
) -> None:
    struct = parse_schema("k string, x double")
    old = AggregateOperator("s", ["k"], struct, {**more, "best": best(before)})
    changes_between(old, AggregateOperator("s", ["k"], struct, {"best": best(before)}))
    with pytest.raises(IncompatibleCheckpointError, match=r"user:best"):
        changes_between(old, AggregateOperator("s", ["k"], struct, {"best": best(now)}))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_aggregates_are_refused_or_exactly_right(tmp_path: Path, data: st.DataObject) -> None:
    def some(names: Sequence[str], label: str) -> list[str]:
        chosen = data.draw(st.permutations(names), label)
        return chosen[: data.draw(st.integers(1, len(chosen)), label)]

    x, y = data.draw(st.sampled_from(XS), "x"), data.draw(st.sampled_from(["date", "string", "int"]), "y")
    new_x = x if data.draw(st.booleans(), "same x") else data.draw(st.sampled_from(XS), "new x")
    new_y = (
        y if data.draw(st.integers(0, 3), "same y") else data.draw(st.sampled_from(["date", "int", "long"]), "new y")
    )
    fitting = [name for name in AGGREGATES if name != "mean" or "decimal" not in x + new_x]
    names = some(fitting, "before")
    left = some(names, "now") if data.draw(st.integers(0, 3), "fewer") else some(fitting, "now")
    old, new, alone = aggregated(names, x, y), aggregated(left, new_x, new_y), aggregated(left, new_x, new_y)
    slot, reference = ClockedSlot(old, tmp_path), ClockedSlot(alone, tmp_path)
    number = st.none() | st.integers(-9, 9)
    rows = st.lists(st.tuples(st.sampled_from("ab"), number, number), max_size=8)
    for _ in range(2):
        batch = data.draw(rows)
        slot.at([(k, a, shaped(b, y)) for k, a, b in batch])
        reference.at([(k, a, shaped(b, new_y)) for k, a, b in batch])
    try:
        carry_over(slot.operator, new, slot.backend, GROUPS)
    except IncompatibleCheckpointError:
        event("refused")
        return
    event(f"carried over, types changed: {(x, y) != (new_x, new_y)}")
    go_on(slot, new)
    for _ in range(2):
        batch = [(k, a, shaped(b, new_y)) for k, a, b in data.draw(rows)]
        assert Counter(map(repr, slot.at(batch))) == Counter(map(repr, reference.at(batch)))


def shaped(value: int | None, kind: str) -> Any:
    if value is None or kind in ("int", "long"):
        return value
    return str(value) if kind == "string" else (EPOCH + timedelta(days=value)).date()


def go_on(slot: ClockedSlot, operator: Operator) -> None:
    operator.open(INFO)
    slot.operator = operator


# --- deduplication -----------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_deduplication_is_refused_or_exactly_right(tmp_path: Path, data: st.DataObject) -> None:
    """Rows pass by the time that has gone by since the last one of their key that passed, if the key is known."""
    durations = st.integers(1, 40)
    by_event = data.draw(st.booleans(), "by event time")
    ttl = data.draw(durations if by_event else st.none() | durations)
    known: dict[str, int] = {}
    now, number = 0, 0
    slot = ClockedSlot(deduplicated(ttl, by_event), tmp_path)

    def run() -> None:
        nonlocal now, number
        now += data.draw(st.integers(0, 20))
        watermark = now if by_event else None
        expected, rows = [], []
        for key, ahead in data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=6)):
            number += 1
            time = now + ahead if by_event else now
            row = (key, number, at(time), None, 0)
            rows.append(row)
            if by_event and slot.late is not None and time <= slot.late:
                continue
            passed = known.get(key)
            gone = (
                passed is not None
                and ttl is not None
                and (time > passed + ttl or (not by_event and time == passed + ttl))
            )
            if passed is None or gone:
                known[key] = time
                expected.append(row)
        assert slot.at(rows, watermark, now) == expected
        for key, passed in list(known.items()):
            if ttl is not None and passed + ttl <= now:
                del known[key]

    for _ in range(data.draw(st.integers(1, 4))):
        run()
    for _ in range(data.draw(st.integers(1, 2), "changes")):
        by_event_now = by_event if data.draw(st.integers(0, 5)) else not by_event
        new_ttl = data.draw(durations if by_event_now else st.none() | durations)
        new = deduplicated(new_ttl, by_event_now)
        try:
            carry_over(slot.operator, new, slot.backend, GROUPS)
        except IncompatibleCheckpointError:
            event("refused")
            assert by_event_now != by_event or ttl is None
            return
        event("carried over")
        assert by_event_now == by_event
        go_on(slot, new)
        ttl = new_ttl
        for _ in range(data.draw(st.integers(1, 3))):
            run()
    if ttl is not None:
        now += 200
        slot.at([], now if by_event else None, now)
        assert slot.entries() == 0  # nothing stays for ever because of a change


def deduplicated(ttl: int | None, by_event: bool) -> DeduplicateOperator:
    return DeduplicateOperator("s", ["k"], INPUT, ttl, "t" if by_event else None)


# --- joins -------------------------------------------------------------------------------------------

LEFT = parse_schema("k string, t timestamp, x long")
JOIN_RIGHT = parse_schema("k string, v timestamp, y string")
HOWS = ["inner", "left", "right", "full"]


def join(how: Any, lower: int, upper: int, left: StructType = LEFT) -> JoinOperator:
    limits = JoinLimits(least_bucket_us=7000)
    return JoinOperator("s", ["k"], ["k"], left, JOIN_RIGHT, how, "t", "v", lower, upper, limits)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_join_is_refused_or_exactly_right(tmp_path: Path, data: st.DataObject) -> None:
    how, new_how = data.draw(st.sampled_from(HOWS[1:] + HOWS)), data.draw(st.sampled_from(HOWS))
    lower, upper = data.draw(st.sampled_from([(-10, 10), (0, 25), (-30, -5)]))
    same = data.draw(st.integers(0, 4))
    bounds = (lower, upper) if same else (lower - data.draw(st.integers(-3, 3)), upper)
    slot = ClockedSlot(join(how, lower, upper), tmp_path)
    alone = ClockedSlot(join(new_how, *bounds), tmp_path)
    number, watermark = 0, 0

    def run() -> tuple[Counter[Any], Counter[Any]]:
        nonlocal number, watermark
        rows = []
        for key, side, ahead in data.draw(
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(-20, 40)), max_size=8)
        ):
            number += 1
            time = at(watermark + ahead)
            rows.append(
                (key, side, time, number, None, None) if side == 0 else (key, side, None, None, time, str(number))
            )
        watermark += data.draw(st.integers(0, 25))
        return Counter(slot.at(rows, watermark)), Counter(alone.at(rows, watermark))

    for _ in range(data.draw(st.integers(1, 4))):
        run()
    new = join(new_how, *bounds)
    try:
        carry_over(slot.operator, new, slot.backend, GROUPS)
    except IncompatibleCheckpointError:
        event("refused")
        return
    event("carried over")
    go_on(slot, new)
    for _ in range(data.draw(st.integers(1, 5))):
        made, expected = run()
        assert made == expected


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (("inner", -5, 5), ("left", -5, 5), "the how: inner before, left now, and nobody noted"),
        (("left", -5, 5), ("full", -5, 5), "the how: left before, full now"),
        (("left", -5, 5), ("right", -5, 5), "the how: left before, right now"),
        (("inner", -5, 5), ("inner", -5, 9), "the upper: 5 ms before, 9 ms now, and the rows that other bounds need"),
        (("inner", -5, 5), ("inner", -4, 5), "the lower: -5 ms before, -4 ms now"),
        (
            ("inner", -5, 5),
            ("inner", -5, 5, parse_schema("k string, t timestamp, z long")),
            "the left: k string, t timestamp, x bigint before, k string, t timestamp, z bigint now",
        ),
    ],
)
def test_joins_that_need_what_nobody_noted_are_refused(before: Any, now: Any, text: str) -> None:
    with pytest.raises(IncompatibleCheckpointError) as caught:
        changes_between(join(*before), join(*now))
    assert text in str(caught.value)


# --- states of user code -----------------------------------------------------------------------------


class First(KeyedProcessor):
    columns = "n int, s float, gone string"
    first: tuple[Any, ...] = (0, 0.0, "x")

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", self.columns)
        self.all = context.list_state("all", self.columns)
        self.by_x = context.map_state("by_x", "x long", self.columns)

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            self.total.update(self.added(self.total.get() or self.first, row.x))
            self.all.append_value(self.total.get())
            self.by_x.put(row.x, self.total.get())
        yield (repr((self.total.get(), list(self.all.get()), sorted(self.by_x.items()))),)

    def added(self, total: Any, x: int) -> Any:
        return (total[0] + 1, total[1] + x, total[2])


class Second(First):
    columns = "s double, more array<int>, n long"
    first = (0.0, None, 0)

    def added(self, total: Any, x: int) -> Any:
        return (total[0] + x, [*(total[1] or []), x], total[2] + 1)


class FirstOfSpark(StatefulProcessor):
    """The same, as it is written for Spark."""

    code: type[First] = First

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", self.code.columns)
        self.all = handle.getListState("all", self.code.columns)
        self.by_x = handle.getMapState("by_x", "x long", self.code.columns)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            self.total.update(self.code().added(self.total.get() or self.code.first, row.x))
            self.all.appendValue(self.total.get())
            self.by_x.updateValue((row.x,), self.total.get())
        pairs = sorted((x, value) for (x,), value in self.by_x.iterator())
        yield Row(value=repr((self.total.get(), list(self.all.get()), pairs)))

    def close(self) -> None: ...


class SecondOfSpark(FirstOfSpark):
    code = Second


def user_code(flavour: str, second: bool) -> Operator:
    struct, output = parse_schema("k string, x long"), parse_schema("value string")
    if flavour == "process":
        return ProcessOperator("s", Second() if second else First(), ["k"], struct, output)
    processor = SecondOfSpark() if second else FirstOfSpark()
    return SparkProcessorOperator("s", processor, ["k"], struct, output, rows="row")


@pytest.mark.parametrize("before", ["process", "spark"])
@pytest.mark.parametrize("now", ["process", "spark"])
def test_a_processor_reads_what_an_earlier_one_stored(tmp_path: Path, before: str, now: str) -> None:
    """Columns went, came, changed places and became wider, in a value, a list and a map."""
    slot = ClockedSlot(user_code(before, second=False), tmp_path)
    slot.at([("a", 2), ("a", 3)])
    new = user_code(now, second=True)
    carry_over(slot.operator, new, slot.backend, GROUPS)
    go_on(slot, new)
    one, two, three = (2.0, None, 1), (5.0, None, 2), (9.0, [4], 3)
    assert slot.at([("a", 4)]) == [(repr((three, [one, two, three], [(2, one), (3, two), (4, three)])),)]
