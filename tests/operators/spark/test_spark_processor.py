"""Spark's own processors on Strandline: what they are given, what becomes of what they yield, state, time, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, IntegerType, MapType, Row, StringType, StructField, StructType

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SubtaskInfo
from strandline.operators.spark.errors import SparkCallError, SparkValueError
from strandline.operators.spark.spark_operator import SparkProcessorOperator, SparkRows
from strandline.runtime.protocol.failures import Failure
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.testing.harness import ProcessorHarness
from tests.examples import examples

VALUE = StructType([StructField("value", IntegerType(), True)])
FLAVOURS: list[SparkRows] = ["row", "pandas"]


def nameless(*values: Any) -> Row:
    """A row of values without names; PySpark's stubs know only `Row("name", ...)`, which has names alone."""
    return Row(*values)


class Base(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return iter(())


class RowCount(Base):
    """Counts rows and sums values; in the style of Spark's documentation."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.count = handle.getValueState("count", VALUE)
        self.seen = 0

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.seen += 1
        (count,) = self.count.get() or (0,)
        for row in rows:
            count += row.v
        self.count.update((count,))
        yield Row(n=count, k=key[0], seen=self.seen)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        old = self.count.get()
        self.count.update((initialState.start + (old[0] if old else 0),))


class PandasCount(RowCount):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.seen += 1
        (count,) = self.count.get() or (0,)
        for frame in rows:
            assert frame.index.tolist() == list(range(len(frame)))
            count += frame["v"].sum()
        self.count.update((count,))
        yield pd.DataFrame({"n": [count], "k": key, "other": 1})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert initialState.at[0, "k"] == key[0]
        self.count.update((initialState["start"].sum(),))


def counting(rows: SparkRows, **more: Any) -> ProcessorHarness:
    return ProcessorHarness(
        RowCount() if rows == "row" else PandasCount(),
        input_schema="k string, v int",
        key="k",
        output_schema="k string, n long",
        rows=rows,
        **more,
    )


@pytest.mark.parametrize("rows", FLAVOURS)
def test_counts_over_batches_restarts_and_lost_batches(rows: SparkRows) -> None:
    with counting(rows) as h:
        assert h.process([("a", 1), ("b", 2), ("a", 3)]) == [("a", 4), ("b", 2)]
        assert h.process([("a", 10)], commit=False) == [("a", 14)]
        assert h.process([]) == []
        h.restart()
        assert h.process([("b", 1), ("a", 1), (None, 7)]) == [("b", 3), ("a", 5), (None, 7)]
        assert h.state("count", "a") == 5


def test_every_batch_has_a_processor_of_its_own() -> None:
    with ProcessorHarness(RowCount(), input_schema="k string, v int", key="k", output_schema="k string, seen int") as h:
        assert [row.seen for row in h.process([("a", 1), ("b", 1)])] == [1, 2]
        assert [row.seen for row in h.process([("a", 1)])] == [1]


class Lifecycle(Base):
    calls: ClassVar[list[str]] = []

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.calls.append("init")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.calls.append("rows")
        return iter(())

    def close(self) -> None:
        self.calls.append("close")


def test_init_and_close_frame_every_batch() -> None:
    Lifecycle.calls.clear()
    with ProcessorHarness(Lifecycle(), input_schema="k string", key="k", output_schema="k string") as h:
        h.process([("a",), ("b",)])
    assert Lifecycle.calls == ["init", "close", "init", "rows", "rows", "close"]


# --- what user code is given ---------------------------------------------------------------------

KEYS = "s string, l long, i int, d date, t timestamp, x decimal(10,2), b boolean, f double, y binary"
KEY = ("a", 5, 6, date(2024, 5, 6), datetime(2024, 1, 1, 12, tzinfo=UTC), Decimal("1.50"), True, 0.5, b"\0z")


class Echo(Base):
    """Shows what it is given."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.handle.registerTimer(7)
        for item in rows:
            yield Row(text=repr(key), more=repr(item))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        assert isinstance(key, Row)
        yield Row(text=repr(tuple(key)), more=f"{key.s} {expiredTimerInfo.getExpiryTimeInMs()}")


def test_keys_of_many_types_with_rows_and_with_timers() -> None:
    names = [part.split()[0] for part in KEYS.split(", ")]
    with ProcessorHarness(
        Echo(), input_schema=KEYS, key=names, output_schema="text string, more string", time_mode="processingTime"
    ) as h:
        ((text, _),) = h.process([KEY])
        assert eval(text, {"datetime": __import__("datetime"), "Decimal": Decimal}) == KEY
        h.restart()
        ((text, more),) = h.advance_processing_time(7)
        local = KEY[4].astimezone().replace(tzinfo=None)
        assert eval(text, {"datetime": __import__("datetime"), "Decimal": Decimal}) == (*KEY[:4], local, *KEY[5:])
        assert more == "a 7"
        assert h.advance_processing_time(7) == []


class FrameEcho(Base):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.handle.registerTimer(0)
        for frame in rows:
            types = ",".join(f"{name}:{kind}" for name, kind in frame.dtypes.items())
            frame["n"] = len(frame)  # user code may change its frame
            yield pd.DataFrame({"text": [repr(key)], "more": [types]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield pd.DataFrame({"text": [repr(key)], "more": ["timer"]})


def test_frames_have_the_types_that_spark_gives_them() -> None:
    with ProcessorHarness(
        FrameEcho(),
        input_schema="k string, t timestamp, i int, f float, b boolean, d date, n short",
        key=["k", "t"],
        output_schema="text string, more string",
        time_mode="event",
        rows="pandas",
        time_zone="Europe/Berlin",
    ) as h:
        at = datetime(2024, 1, 1, 12, tzinfo=UTC)
        made = h.process([("a", at, 1, 1.0, True, date(2024, 1, 1), 1), ("b", at, 1, None, None, None, None)])
        assert made[0].text == "('a', Timestamp('2024-01-01 13:00:00'))"
        assert made[0].more == "k:object,t:datetime64[ns],i:int64,f:float64,b:bool,d:object,n:float64"
        assert "b:object" in made[1].more
        assert {row.more for row in made[2:]} == {"timer"}


def test_a_timer_without_a_clock_names_the_parameter_of_spark() -> None:
    with (
        ProcessorHarness(Echo(), input_schema=KEYS, key="s", output_schema="text string, more string") as h,
        pytest.raises(
            StrandlineError, match=r'has no clock for timers; pass timeMode="ProcessingTime" or timeMode="Ev'
        ),
    ):
        h.process([KEY])


class Nested(Base):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        (row,) = rows
        assert isinstance(row, Row)
        assert row.asDict()["k"] == row["k"] == row.k == "a"
        assert row.s == {"x": 1}
        assert row.m == [("p", 2)]
        assert row.t.hour == 13
        yield Row(s=Row(x=2), m={"q": 3}, l=[Row(x=4)], unknown=1)
        yield Row(s={"x": 5}, m=None)


def test_nested_values_come_and_go_as_in_spark() -> None:
    with ProcessorHarness(
        Nested(),
        input_schema="k string, s struct<x:int>, m map<string,int>, t timestamp",
        key="k",
        output_schema="s struct<x:int>, m map<string,int>, l array<struct<x:int>>",
        time_zone="Europe/Berlin",
    ) as h:
        made = h.process([("a", (1,), {"p": 2}, datetime(2024, 1, 1, 12, tzinfo=UTC))])
        assert made == [((2,), {"q": 3}, [(4,)]), ((5,), None, None)]


# --- states --------------------------------------------------------------------------------------


class Address(NamedTuple):
    road: int
    city: str


class Composite(Base):
    """Values of every shape, written in the many ways that Spark allows, and read back."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        place = StructType([StructField("road", IntegerType()), StructField("city", StringType())])
        self.value = handle.getValueState(
            "value",
            StructType(
                [
                    StructField("ids", ArrayType(IntegerType())),
                    StructField("places", ArrayType(place)),
                    StructField("confs", MapType(StringType(), MapType(StringType(), IntegerType()))),
                ]
            ),
        )
        self.times = handle.getListState("times", "t timestamp, d date, n timestamp_ntz")
        self.scalars = handle.getValueState(
            "scalars", "l long, i int, f double, s string, b boolean, x decimal(10,2), y binary, z string"
        )
        self.map = handle.getMapState("a map", "k int, t string", "v string, n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        assert self.value.get() is None
        assert not self.value.exists()
        places = [{"road": 1, "city": "Rome"}, Address(np.int64(2), "Bern"), Row(road=3, city="Oslo")]  # type: ignore[arg-type]
        self.value.update(([np.int64(1), 2], places, {"a": {"b": np.int32(3)}}))
        ids, got, confs = self.value.get() or ()
        assert (ids, confs) == ([1, 2], {"a": {"b": 3}})
        assert got == [Row(road=1, city="Rome"), Row(road=2, city="Bern"), Row(road=3, city="Oslo")]
        assert got[2].city == "Oslo"

        now = datetime(2024, 5, 1, 10, 30)
        self.times.put([(now, now, now), (pd.Timestamp(now), now.date(), pd.Timestamp(now))])
        self.times.appendValue([now.astimezone(UTC), now.date(), None])  # type: ignore[arg-type]  # lists do, too
        self.times.appendList([(None, None, None)])
        assert list(self.times.get()) == [
            (now, now.date(), now),
            (now, now.date(), now),
            (now, now.date(), None),
            (None, None, None),
        ]

        array: Any = np.array([1, 2, 3.5, "x", True, Decimal("1.005"), b"q", 7], object)
        self.scalars.update(array)
        assert self.scalars.get() == (1, 2, 3.5, "x", True, Decimal("1.01"), b"q", "7")
        values = (np.int64(4), np.int16(5), np.float32(0.5), np.str_("y"), np.bool_(False), None, None, True)
        self.scalars.update(nameless(*values))
        assert self.scalars.get() == (4, 5, 0.5, "y", False, None, None, "true")
        assert type(self.scalars.get()) is tuple

        assert self.map.getValue((1, "a")) is None
        assert not self.map.containsKey((1, "a"))
        self.map.updateValue((np.int64(1), "a"), ("x", np.int64(1)))
        self.map.updateValue([2, "b"], ["y", None])  # type: ignore[arg-type]  # lists do, too
        assert self.map.getValue((1, "a")) == ("x", 1)
        assert self.map.getValue((1, "a")).v == "x"  # type: ignore[union-attr]  # a Row, as in Spark
        assert self.map.containsKey((2, "b"))
        assert sorted(self.map.keys()) == [(1, "a"), (2, "b")]
        assert sorted(self.map.values(), key=str) == [("x", 1), ("y", None)]
        assert dict(self.map.iterator()) == {(1, "a"): ("x", 1), (2, "b"): ("y", None)}
        self.map.removeKey((1, "a"))
        self.map.removeKey((9, "none"))
        assert list(self.map.keys()) == [(2, "b")]
        self.map.clear()
        assert not self.map.exists()
        yield Row(ok=True)


def test_values_of_every_shape() -> None:
    with ProcessorHarness(Composite(), input_schema="k string", key="k", output_schema="ok boolean") as h:
        assert h.process([("a",)]) == [(True,)]


class OneColumn(Base):
    """A row of one null is a value, too."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "v int")
        self.list = handle.getListState("list", "v array<int>")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield Row(text=f"{self.value.exists()} {self.value.get()} {list(self.list.get())}")
        self.value.update((None,))
        self.list.appendValue(([1],))


def test_one_column_states_hold_tuples() -> None:
    with ProcessorHarness(OneColumn(), input_schema="k string", key="k", output_schema="text string") as h:
        assert h.process([("a",)]) == [("False None []",)]
        assert h.process([("a",)]) == [("True (None,) [([1],)]",)]


class Iterators(Base):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.list = handle.getListState("list", VALUE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.list.put([(120,), (20,)])
        self.list.appendValue((111,))
        first = self.list.get()
        assert next(first) == (120,)
        second = self.list.get()
        assert [next(second), next(first), next(second)] == [(120,), (20,), (20,)]
        self.list.clear()
        assert not self.list.exists()
        yield Row(left=len(list(self.list.get())))


def test_list_iterators_do_not_disturb_each_other() -> None:
    with ProcessorHarness(Iterators(), input_schema="k string", key="k", output_schema="left int") as h:
        assert h.process([("a",), ("a",)]) == [(0,)]


class Model(Base):
    """Runs commands on the three kinds of state; the test runs them on dicts and lists."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "n long")
        self.list = handle.getListState("list", "n long")
        self.map = handle.getMapState("map", "k long", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            match row.cmd:
                case "set":
                    self.value.update((row.n,))
                case "unset":
                    self.value.clear()
                case "append":
                    self.list.appendValue((row.n,))
                case "put":
                    self.list.put([(row.n,), (row.n + 1,)])
                case "map":
                    self.map.updateValue((row.n,), (row.n * 2,))
                case "unmap":
                    self.map.removeKey((row.n,))
        mapped = dict(self.map.iterator())
        yield Row(text=repr((self.value.get(), list(self.list.get()), sorted(mapped.items()))), k=key[0])


class FrameModel(Model):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        plain = (row for frame in rows for row in frame.itertuples())
        for row in super().handleInputRows(key, plain, timerValues):
            yield pd.DataFrame([row.asDict()])


def expected(model: dict[int, Any], rows: list[tuple[int, str, int]]) -> dict[int, str]:
    for k, cmd, n in rows:
        value, items, mapped = model.setdefault(k, (None, [], {}))
        match cmd:
            case "set":
                value = (n,)
            case "unset":
                value = None
            case "append":
                items = [*items, (n,)]
            case "put":
                items = [(n,), (n + 1,)]
            case "map":
                mapped = {**mapped, (n,): (n * 2,)}
            case "unmap":
                mapped = {key: item for key, item in mapped.items() if key != (n,)}
        model[k] = value, items, mapped
    return {k: repr((*model[k][:2], sorted(model[k][2].items()))) for k, _, _ in rows}


COMMANDS = st.sampled_from(["set", "unset", "append", "put", "map", "unmap"])
BATCH = st.lists(st.tuples(st.integers(0, 3), COMMANDS, st.integers(0, 4)), max_size=8)


@pytest.mark.parametrize("rows", FLAVOURS)
@settings(max_examples=examples(25), deadline=None)
@given(batches=st.lists(st.tuples(BATCH, st.booleans(), st.booleans()), max_size=5))
def test_states_are_as_the_model_says(
    rows: SparkRows, batches: list[tuple[list[tuple[int, str, int]], bool, bool]]
) -> None:
    model: dict[int, Any] = {}
    with ProcessorHarness(
        Model() if rows == "row" else FrameModel(),
        input_schema="k int, cmd string, n long",
        key="k",
        output_schema="k int, text string",
        rows=rows,
    ) as h:
        for batch, lost, restart in batches:
            if lost:
                h.process(batch, commit=False)
            if restart:
                h.restart()
            assert dict(map(tuple, h.process(batch))) == expected(model, batch)


def test_many_keys_and_keys_that_span_chunks() -> None:
    for rows in FLAVOURS:
        with counting(rows) as h:
            made = h.process([(f"k{at % 300}", 1) for at in range(900)] + [("big", 1)] * 2500)
            assert made == [(f"k{at}", 3) for at in range(300)] + [("big", 2500)]


# --- deleteIfExists ------------------------------------------------------------------------------


class Migrating(Base):
    version = 1

    def init(self, handle: StatefulProcessorHandle) -> None:
        if Migrating.version == 1:
            self.old = handle.getValueState("old", VALUE)
        else:
            handle.deleteIfExists("old")
            handle.deleteIfExists("never there")
        if Migrating.version == 3:
            self.old = handle.getValueState("old", VALUE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        if Migrating.version != 2:
            yield Row(old=(self.old.get() or (None,))[0])
            self.old.update((1,))


def test_delete_if_exists_removes_a_state_of_all_keys() -> None:
    try:
        with ProcessorHarness(Migrating(), input_schema="k string", key="k", output_schema="old int") as h:
            h.process([("a",), ("b",)])
            assert h.process([("a",)]) == [(1,)]
            Migrating.version = 2
            h.restart()
            assert h.process([("c",)]) == []
            Migrating.version = 3
            h.restart()
            assert h.process([("a",), ("b",)]) == [(None,), (None,)]
            assert h.process([("a",)]) == [(None,)]  # init deletes it in every batch
    finally:
        Migrating.version = 1


class Deleting(Base):
    """Deletes a state that it has declared: in Spark, the state cannot be used any more."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.states: list[Any] = [
            handle.getValueState("gone", VALUE),
            handle.getListState("gone list", VALUE),
            handle.getMapState("gone map", VALUE, VALUE),
        ]
        for name in ("gone", "gone list", "gone map"):
            handle.deleteIfExists(name)
        try:
            handle.getValueState("gone", VALUE)
        except PySparkRuntimeError as error:
            self.again = str(error)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        value, many, mapped = self.states
        calls: list[Callable[[], Any]] = [
            value.exists,
            value.get,
            value.clear,
            lambda: value.update((1,)),
            many.exists,
            many.get,
            lambda: many.put([(1,)]),
            lambda: many.appendValue((1,)),
            lambda: many.appendList([(1,)]),
            mapped.exists,
            mapped.iterator,
            lambda: mapped.getValue((1,)),
            lambda: mapped.updateValue((1,), (1,)),
            lambda: mapped.removeKey((1,)),
        ]
        for call in calls:
            with pytest.raises(PySparkRuntimeError, match="deleted it with deleteIfExists"):
                call()
        yield Row(text=self.again)


def test_a_state_that_init_deletes_is_dead() -> None:
    with ProcessorHarness(Deleting(), input_schema="k string", key="k", output_schema="text string") as h:
        for _ in range(2):
            ((text,),) = h.process([("a",)])
            assert "declares the state 'gone' twice" in text


# --- time ----------------------------------------------------------------------------------------


class Expiring(Base):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", VALUE, 1000)
        self.list = handle.getListState("list", VALUE, 1000)
        self.map = handle.getMapState("map", "k string", VALUE, 1000)
        self.forever = handle.getValueState("forever", VALUE, 0)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        (row,) = rows
        yield Row(text=repr((self.value.get(), list(self.list.get()), list(self.map.iterator()), self.forever.get())))
        if row.write:
            at = (timerValues.getCurrentProcessingTimeInMs(),)
            self.value.update(at)
            self.list.appendValue(at)
            self.map.updateValue((f"{at[0]}",), at)
            self.forever.update(at)


def test_time_to_live_begins_with_every_write() -> None:
    with ProcessorHarness(
        Expiring(),
        input_schema="k string, write boolean",
        key="k",
        output_schema="text string",
        time_mode="ProcessingTime",
    ) as h:
        h.process([("a", True)])
        h.advance_processing_time(600)
        assert h.process([("a", True)]) == [("((0,), [(0,)], [(('0',), (0,))], (0,))",)]
        h.advance_processing_time(400)
        assert h.process([("a", False)]) == [("((600,), [(600,)], [(('600',), (600,))], (600,))",)]
        h.advance_processing_time(600)
        assert h.process([("a", False)]) == [("(None, [], [], (600,))",)]


class Clock(Base):
    """Registers the timers that its rows name, and tells the time."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        times = [time for row in rows for time in row.timers]
        for time in times:
            self.handle.registerTimer(time)
        yield Row(text=f"{key[0]} {timerValues.getCurrentProcessingTimeInMs()} {timerValues.getCurrentWatermarkInMs()}")

    # The arguments come by name, so their order is free.
    def handleExpiredTimer(self, key: Any, expiredTimerInfo: Any, timerValues: Any) -> Iterator[Any]:  # type: ignore[override]
        time = expiredTimerInfo.getExpiryTimeInMs()
        listed = list(self.handle.listTimers())
        if time % 10 == 1:
            self.handle.deleteTimer(time + 1)
        if time % 10 == 3:
            self.handle.registerTimer(time + 1)
        yield Row(text=f"{key[0]}@{time} {listed} {timerValues.getCurrentWatermarkInMs()}")


def clock(mode: str, **more: Any) -> ProcessorHarness:
    return ProcessorHarness(
        Clock(),
        input_schema="k string, ts timestamp, timers array<long>",
        key="k",
        output_schema="text string",
        time_mode=mode,
        **more,
    )


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def texts(rows: list[Any]) -> list[str]:
    return [row.text for row in rows]


@pytest.mark.parametrize("service", ["heap", "rocksdb"])
def test_event_time_is_as_spark_has_it(service: Any) -> None:
    with clock("EventTime", event_time="ts", timer_service=service) as h:
        assert texts(h.process([("a", at(10), [0, 5000])])) == ["a 0 0", "a@0 [0, 5000] 0"]
        h.watermark_ms = 10_000
        assert texts(h.process([("a", at(20), [9001, 9002, 9003, 10_000])])) == [
            "a 0 10000",
            "a@5000 [5000, 9001, 9002, 9003, 10000] 10000",
            "a@9001 [9001, 9002, 9003, 10000] 10000",
            "a@9002 [9003, 10000] 10000",  # deleted by the one before, too late
            "a@9003 [9003, 10000] 10000",
            "a@10000 [9004, 10000] 10000",
        ]
        h.watermark_ms = 20_000
        made = texts(h.process([("a", at(20), [4000]), ("b", at(15), []), ("c", at(10), [])]))
        assert made == ["a 0 20000", "b 0 20000", "a@4000 [4000, 9004] 20000", "a@9004 [9004] 20000"]
        assert h.late_rows == 1
        assert h.timers("a") == []
        h.process([("a", at(50), [30_000])])
        h.restart()
        assert h.process([], commit=False) == []
        assert texts(h.advance_watermark(30_000, commit=False)) == ["a@30000 [30000] 30000"]
        assert texts(h.advance_watermark(30_000)) == ["a@30000 [30000] 30000"]


def test_the_clocks_of_the_other_modes() -> None:
    with clock("none") as h:
        assert h.process([("a", at(0), [])]) == [("a -1 -1",)]
        with pytest.raises(StrandlineError, match="no clock for timers"):
            h.process([("a", at(0), [1])])
    with clock("PROCESSINGTIME", event_time="ts") as h:
        h.advance_processing_time(5)
        assert h.process([("a", at(-5), [5, 6])]) == [("a 5 0",), ("a@5 [5, 6] 0",)]
        assert h.next_timer_ms == 6


# --- initial state -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", FLAVOURS)
def test_initial_state_comes_before_the_first_rows(rows: SparkRows) -> None:
    with counting(rows, initial_schema="start int, k string") as h:
        h.process_initial([(100, "a"), (200, "b"), (11, "a")])
        assert h.process([("a", 1), ("c", 1)]) == [("a", 112), ("c", 1)]
        h.restart()
        assert h.process([("b", 1)]) == [("b", 201)]


class Remembers(Base):
    """Keeps attributes between the initial state and the first rows."""

    plain: ClassVar[bool]

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", VALUE)
        self.seen: dict[str, list[int]] = {}
        self.closed = False

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert not self.closed
        first = initialState.v if isinstance(initialState, Row) else int(initialState.v[0])
        self.seen.setdefault("initial", []).append(first)
        self.value.update((first,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for _ in rows:
            self.seen.setdefault("rows", []).append((self.value.get() or (0,))[0])
        text = f"{key[0]} {self.seen}"
        yield Row(text=text) if self.plain else pd.DataFrame({"text": [text]})

    def close(self) -> None:
        self.closed = True


class RemembersRows(Remembers):
    plain = True


class RemembersFrames(Remembers):
    plain = False


@pytest.mark.parametrize("rows", FLAVOURS)
def test_the_first_rows_come_to_the_processor_that_got_the_initial_state(rows: SparkRows) -> None:
    schema = "k string, v int"
    with ProcessorHarness(
        RemembersRows() if rows == "row" else RemembersFrames(),
        input_schema=schema,
        key="k",
        output_schema="text string",
        initial_schema=schema,
        rows=rows,
    ) as h:
        h.process_initial([("a", 1), ("b", 2)])
        first = ["a {'initial': [1, 2], 'rows': [1]}", "c {'initial': [1, 2], 'rows': [1, 0]}"]
        for commit in (False, True):  # another try of the batch begins with the same attributes
            assert texts(h.process([("a", 0), ("c", 0)], commit)) == first
        assert texts(h.process([("b", 0)])) == ["b {'rows': [2]}"]
        h.restart()
        assert texts(h.process([("a", 0)])) == ["a {'rows': [1]}"]


class InitialTimers(Base):
    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.list = handle.getListState("list", VALUE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.list.appendList([(row.v,) for row in rows])
        yield Row(text=repr(list(self.list.get())))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.list.appendValue((initialState.v,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() - 1)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(text=f"{key[0]}@{expiredTimerInfo.getExpiryTimeInMs()}")


def test_timers_of_the_initial_state_fire_in_the_first_batch() -> None:
    with ProcessorHarness(
        InitialTimers(),
        input_schema="k string, v int",
        key="k",
        output_schema="text string",
        time_mode="processing",
        initial_schema="k string, v int",
    ) as h:
        h.process_initial([("a", 1), ("a", 2)])
        assert h.next_timer_ms == -1
        assert h.process([("a", 3)]) == [("[(1,), (2,), (3,)]",), ("a@-1",)]
        assert h.process([]) == []


@pytest.mark.parametrize("service", ["heap", "rocksdb"])
def test_the_initial_state_may_share_the_first_batch(service: Any, tmp_path: Path) -> None:
    schema = parse_schema("k string, v int")
    operator = SparkProcessorOperator(
        "visits",
        InitialTimers(),
        ["k"],
        schema,
        parse_schema("text string"),
        rows="row",
        time_mode="processing",
        timer_service=service,
        initial_schema=schema,
    )
    operator.open(SubtaskInfo("job", "visits", 0, 1, 4))
    names = ["k", "v", KEY_GROUP_COLUMN]
    batch = BatchInfo(7, 1000)
    for _ in range(2):  # the second is another try of the same batch
        changes = ChangeSet(HeapBackend(), 1 << 20, tmp_path)
        initial, rows = (
            pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array([v], pa.int32()), pa.array([1], pa.int32())], names)
            for v in (1, 2)
        )
        assert list(operator.run_initial(iter([initial]), changes, batch)) == []
        made = [text for out in operator.run(iter([rows]), changes, batch) for text in out.column(0).to_pylist()]  # type: ignore[union-attr]
        assert made == ["[(1,), (2,)]", "a@999"]
        changes.discard()


# --- output --------------------------------------------------------------------------------------


class Yields(Base):
    what: ClassVar[Any] = None

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from Yields.what


def yielding(rows: SparkRows, *what: Any, output_schema: str = "k string, n long", **conf: bool) -> list[Any]:
    Yields.what = what
    with ProcessorHarness(
        Yields(),
        input_schema="k string",
        key="k",
        output_schema=output_schema,
        rows=rows,
        spark_conf={CONFS[name]: str(value).lower() for name, value in conf.items()},
    ) as h:
        return h.process([("a",)])


CONFS = {
    "safe": "spark.sql.execution.pandas.convertToArrowArraySafely",
    "coercion": "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled",
    "by_name": "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName",
    "extension": "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype",
}


def test_the_settings_of_the_session_apply_to_frames() -> None:
    large = pd.DataFrame({"n": [300]})
    assert yielding("pandas", large, output_schema="n byte") == [(44,)]
    with pytest.raises(
        SchemaError, match=r"'n' does not fit tinyint: Failed to convert .* (?s:.*)convertToArrowArrayS"
    ):
        yielding("pandas", large, output_schema="n byte", safe=True)
    with pytest.raises(SchemaError, match=r"'n' does not fit decimal\(1,0\)"):
        yielding("pandas", pd.DataFrame({"n": [3]}), output_schema="n decimal(1,0)")
    made = yielding("pandas", pd.DataFrame({"n": [3]}), output_schema="n decimal(1,0)", coercion=True)
    assert made == [(Decimal(3),)]
    turned = pd.DataFrame({"b": [1], "a": [2]})
    assert yielding("pandas", turned, output_schema="a int, b int") == [(2, 1)]
    assert yielding("pandas", turned, output_schema="a int, b int", by_name=False) == [(1, 2)]


class Dtypes(Base):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            yield pd.DataFrame({"text": [f"{key[0]} {frame.n.dtype} {frame.n.tolist()}"]})


def test_integers_with_nulls_may_stay_integers() -> None:
    found = {}
    for extension in (False, True):
        with ProcessorHarness(
            Dtypes(),
            input_schema="k string, n int",
            key="k",
            output_schema="text string",
            rows="pandas",
            spark_conf={CONFS["extension"]: str(extension).lower()},
        ) as h:
            found[extension] = texts(h.process([("a", 1), ("a", None), ("b", 2)]))
    assert found[False] == ["a float64 [1.0, nan]", "b float64 [2.0]"]
    assert found[True] == ["a object [1, <NA>]", "b int64 [2]"]


def test_frames_are_taken_by_name_or_by_position() -> None:
    by_name, by_place = pd.DataFrame({"n": [1], "k": ["x"]}), pd.DataFrame([["y", 2]])
    assert yielding("pandas", by_name, by_place, pd.DataFrame()) == [("x", 1), ("y", 2)]
    mixed = [pd.DataFrame({"k": ["x"], "n": [n]}) for n in (2**60 + 1, None, np.int32(3), 4.0)]
    assert [row.n for row in yielding("pandas", *mixed)] == [2**60 + 1, None, 3, 4]
    tagged = pd.DataFrame({"k": pd.Series(["x", "y"], dtype="category"), "n": pd.Series([1, None], dtype="Int64")})
    assert yielding("pandas", tagged, tagged) == [("x", 1), ("y", None)] * 2
    assert yielding("pandas", pd.DataFrame({"t": [pd.Timestamp(5)]}), output_schema="t timestamp_ntz")


class Reuses(Base):
    """Changes what it has yielded, and yields it again."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.frame = pd.DataFrame({"l": [[0]], "n": [0]})
        self.list: list[int] = []

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for n in (1, 2):
            self.list.append(n)
            self.frame.loc[0, "n"] = n
            yield Row(l=self.list, n=n) if key[0] == "row" else self.frame


@pytest.mark.parametrize("rows", FLAVOURS)
def test_output_is_taken_when_it_is_yielded(rows: SparkRows) -> None:
    with ProcessorHarness(
        Reuses(), input_schema="k string", key="k", output_schema="l array<int>, n int", rows=rows
    ) as h:
        assert h.process([(rows,)]) == ([([1], 1), ([1, 2], 2)] if rows == "row" else [([0], 1), ([0], 2)])


def test_rows_need_not_have_the_same_columns() -> None:
    made = yielding("row", Row(n=1, k="x"), Row(k="y"), Row("k", "n", "more")("z", np.int64(3), None))
    assert made == [("x", 1), ("y", None), ("z", 3)]
    with pytest.raises(SchemaError, match=r"key \('a',\): an output row must be a pyspark.sql.Row"):
        yielding("row", Row(k="x"), Row(n=1), ("x", 1))
    with pytest.raises(SchemaError, match=r"key \('a',\).*: an output row must be a pyspark.sql.Row"):
        yielding("row", ("x", 1), output_schema="l array<int>")


@pytest.mark.parametrize(
    ("rows", "what", "message"),
    [
        ("row", ("x", 1), r"key \('a',\).*must be a pyspark.sql.Row"),
        ("row", nameless("x", 1), r"must be a pyspark.sql.Row with the names of its columns"),
        ("row", Row(k="x", n="many"), r"key \('a',\): output column 'n' does not fit bigint"),
        ("row", Row(k=1, n=1), r"output column 'k' does not fit string"),
        ("pandas", Row(k="x", n=1), r"must yield a pandas.DataFrame"),
        ("pandas", pd.DataFrame({"k": ["x"]}), r"key \('a',\).*must have the columns k, n; it has k"),
        ("pandas", pd.DataFrame([["x"]]), r"must have the columns"),
        ("pandas", pd.DataFrame({"k": ["x"], "n": ["many"]}), r"key \('a',\): output column 'n' does not fit bigint"),
    ],
)
def test_output_that_does_not_fit(rows: SparkRows, what: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        yielding(rows, what)


def test_null_in_a_column_that_is_declared_not_null() -> None:
    for rows, what in (("row", Row(k="x")), ("pandas", pd.DataFrame({"n": [None]}))):
        with pytest.raises(SchemaError, match="declared not null"):
            yielding(rows, what, output_schema="n long not null")  # type: ignore[arg-type]


# --- errors --------------------------------------------------------------------------------------


class Failing(Base):
    where: ClassVar[str] = ""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", VALUE)
        self.list = handle.getListState("list", VALUE)
        self.fail("init")

    def fail(self, here: str) -> None:
        if Failing.where == here:
            raise ValueError(f"in {here}")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.fail("handleInputRows")
        match Failing.where:
            case "late state":
                self.handle.getValueState("more", VALUE)
            case "late delete":
                self.handle.deleteIfExists("value")
            case "misfit":
                self.value.update(("x",))
            case "too long":
                self.value.update((1, 2))
            case "empty":
                self.list.put([])
        self.handle.registerTimer(0)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self.fail("handleExpiredTimer")
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.fail("handleInitialState")

    def close(self) -> None:
        self.fail("close")


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("init", UserCodeError, r"batch 1: init\(\) failed: ValueError: in init\n"),
        (
            "handleInputRows",
            UserCodeError,
            r"key \('a',\), batch 1: handleInputRows\(\) failed: ValueError: in handleInputRows\n(?s:.*)test_spark",
        ),
        ("handleExpiredTimer", UserCodeError, r"key \('a',\), batch 1: handleExpiredTimer\(\) failed"),
        ("close", UserCodeError, r"batch 1: close\(\) failed"),
        ("late state", StrandlineError, r"key \('a',\), batch 1: state 'more' was declared outside of init"),
        ("late delete", StrandlineError, r"outside of init"),
        ("misfit", SchemaError, r"state 'value'.*column 'value': expected int"),
        ("too long", SchemaError, r"expected 1 values"),
        ("empty", SchemaError, r"refuse an empty list"),
    ],
)
def test_errors_say_where_they_come_from(where: str, kind: type[Exception], message: str) -> None:
    Failing.where = ""
    with ProcessorHarness(
        Failing(), input_schema="k string", key="k", output_schema="k string", time_mode="processing"
    ) as h:
        Failing.where = where
        with pytest.raises(kind, match=message):
            h.process([("a",)])
        Failing.where = ""
        assert h.process([("a",)]) == []


class Catching(Base):
    """Expects Spark's class for everything that goes wrong in a call of Spark's interface."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", VALUE)
        self.list = handle.getListState("list", VALUE)
        self.map = handle.getMapState("map", VALUE, VALUE)
        for use in (self.value.get, self.list.exists, self.map.exists):  # there is no key yet
            with pytest.raises(PySparkRuntimeError):
                use()
        for name, ttl in (("value", None), ("ttl", 5), (" ", None)):
            with pytest.raises(PySparkRuntimeError):
                handle.getValueState(name, VALUE, ttl)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        bad: Any = ("x",)
        wrong: list[Callable[[], Any]] = [
            lambda: self.handle.getValueState("more", VALUE),
            lambda: self.handle.deleteIfExists("value"),
            lambda: self.handle.registerTimer(1),
            lambda: self.value.update(bad),
            lambda: self.value.update((1, 2)),
            lambda: self.list.put([]),
            lambda: self.list.appendList([]),
            lambda: self.list.appendValue(bad),
            lambda: self.map.updateValue((1,), bad),
            lambda: self.map.getValue(bad),
            lambda: self.map.containsKey(bad),
        ]
        for call in wrong:
            with pytest.raises(PySparkRuntimeError) as caught:
                call()
            assert isinstance(caught.value, StrandlineError)
            assert str(caught.value) in caught.value.getMessage()
        yield Row(k="fine")


def test_errors_of_calls_are_ours_and_sparks() -> None:
    with ProcessorHarness(Catching(), input_schema="k string", key="k", output_schema="k string") as h:
        assert h.process([("a",)]) == [("fine",)]
    for kind, base in ((SparkCallError, StrandlineError), (SparkValueError, SchemaError)):
        assert type(Failure.of(kind("wrong")).error()) is base


def test_an_error_in_the_initial_state() -> None:
    Failing.where = ""
    with ProcessorHarness(
        Failing(), input_schema="k string", key="k", output_schema="k string", initial_schema="k string"
    ) as h:
        Failing.where = "handleInitialState"
        with pytest.raises(UserCodeError, match=r"key \('a',\), batch 0: handleInitialState\(\) failed"):
            h.process_initial([("a",)])
    Failing.where = ""


class Declares(Base):
    what: ClassVar[Any] = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        Declares.what(handle)


def checked(what: Any, **more: Any) -> list[str]:
    Declares.what = what
    schema = parse_schema("k string")
    operator = SparkProcessorOperator("visits", Declares(), ["k"], schema, schema, rows="row", **more)
    return [state.name for state in operator.check()]


def test_check_finds_in_the_driver_what_init_declares() -> None:
    assert checked(lambda handle: handle.getValueState("n", "n long")) == ["n"]
    spaced = checked(lambda handle: handle.getListState("my state", VALUE))[0]
    assert spaced.startswith("my-state-")
    twice = lambda handle: [handle.getValueState("n", VALUE), handle.getListState("n", VALUE)]  # noqa: E731
    with pytest.raises(JobDefinitionError, match=r"'visits': init\(\):.*'n' twice"):
        checked(twice)
    for mode in ("none", "EventTime"):
        with pytest.raises(JobDefinitionError, match="needs the time mode ProcessingTime"):
            checked(lambda handle: handle.getValueState("n", VALUE, 10), time_mode=mode)
    with pytest.raises(JobDefinitionError, match="not a number of milliseconds above 0"):
        checked(lambda handle: handle.getValueState("n", VALUE, -1), time_mode="processing")
    with pytest.raises(UserCodeError, match=r"init\(\) failed in the driver"):
        checked(lambda handle: 1 / 0)


def test_wrong_arguments_are_refused_when_the_job_is_built() -> None:
    schema = parse_schema("k string")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": "arrow"}, "rows='arrow' is not valid"),
        ({"rows": "row", "time_mode": "later"}, "time_mode='later' is not valid"),
        ({"rows": "row", "initial_schema": parse_schema("n int")}, "initial state must have the key column 'k'"),
        ({"rows": "row", "event_time": "ts"}, "no column 'ts'"),
    ]
    for wrong, message in cases:
        with pytest.raises(JobDefinitionError, match=message):
            SparkProcessorOperator("visits", Base(), ["k"], schema, schema, **wrong)


class Old(Base):
    """Yields the same time in every batch."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            moment = datetime(1970, 1, 1, 0, 0, 10)
            pandas = isinstance(row, pd.DataFrame)
            yield pd.DataFrame({"k": key, "seen": [moment]}) if pandas else Row(k=key[0], seen=moment)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_output_row_behind_the_watermark_is_sparks_error(flavour: SparkRows) -> None:
    with ProcessorHarness(
        Old(),
        input_schema="k string, ts timestamp",
        key="k",
        output_schema="k string, seen timestamp",
        time_mode="EventTime",
        event_time="ts",
        output_time="seen",
        rows=flavour,
    ) as h:
        rows = [("a", datetime(2026, 1, 1, tzinfo=UTC))]
        h.advance_watermark(9_999)
        assert len(h.process(rows)) == 1
        h.advance_watermark(10_000)
        with pytest.raises(UserCodeError, match=r"subtask 0, batch 4, key \('a',\): the processor yielded") as caught:
            h.process(rows)
        assert str(caught.value).startswith("[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] operator 'test'")
