"""States of a checkpoint that a job declares otherwise: what is refused, and what stored entries become."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import DataType, DecimalType, StructField, StructType

from strandline.errors import DamagedFileError, IncompatibleCheckpointError
from strandline.operators.base import Operator
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.process.arrow_context import ArrowContext
from strandline.operators.process.arrow_operator import ArrowProcessOperator
from strandline.operators.process.arrow_processor import ArrowProcessor
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.schema_evolution import StateChanges, read_states, state_changes
from strandline.operators.spark.spark_operator import SparkProcessorOperator
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import BACKENDS, open_backend
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.conversion import conversion
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.timers import TIMERS, TIMES
from strandline.state.handles.ttl import stamp_of
from tests.examples import examples

GROUPS = range(2, 5)


def value(schema: str, name: str = "total", kind: Any = "value", **more: Any) -> StateDescriptor:
    return StateDescriptor(name, kind, parse_schema(schema).json(), **more)


def between(
    before: list[StateDescriptor], now: list[StateDescriptor], allow: bool = False, deleted: tuple[str, ...] = ()
) -> StateChanges:
    described = [msgspec.to_builtins(state) for state in before]
    return state_changes("sums", read_states("sums", described), now, lambda name: allow or name in deleted)


# --- what may differ ---------------------------------------------------------------------------------


def test_the_same_and_new_states_need_nothing_done() -> None:
    old = value("n long, s long")
    assert not between([old], [old])
    assert not between([old], [value("s string", "other"), old])
    assert not between([], [old])


@pytest.mark.parametrize("kind", ["value", "list", "map", "reducing", "aggregating", "columns"])
@pytest.mark.parametrize(
    "schema",
    [
        "n int, s float, x string",
        "x string, n int, s float",
        "s float, n int",
        "n int",
        "s double, n long",
        "y array<int>, s double, x string",
        "n double, s float",
    ],
)
def test_columns_may_come_go_change_places_and_become_wider(kind: Any, schema: str) -> None:
    keyed = {"key_schema": parse_schema("k int").json()} if kind == "map" else {}
    before, now = (value(one, kind=kind, **keyed) for one in ("n int, s float", schema))
    assert len(between([before], [now]).rewrites) == 1


def test_nullability_and_comments_of_what_is_stored_do_not_matter() -> None:
    said = StructType([StructField("k", kind_of("string"), False, {"comment": "x"})]).json()
    for kind in ("timers", "aggregate", "rows", "index"):
        assert not between([value("k string", kind=kind)], [StateDescriptor("total", kind, said)])
    assert not between([value("n long not null")], [value("n long")])


def test_how_long_values_live_may_change() -> None:
    assert not between([value("n long", ttl_ms=5)], [value("n long", ttl_ms=500)])
    assert between([value("n long", ttl_ms=5)], [value("n long, x int", ttl_ms=500)]).rewrites


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        (value("n long"), value("m long"), ["columns (n long)", "declares value state, columns (m long)"]),
        (value("n long, s long"), value("m long, t long"), ["none of the columns is left"]),
        (value("n int"), value("n float"), ["int cannot become float without loss"]),
        (value("n long"), value("n int"), ["bigint cannot become int without loss"]),
        (value("n int"), value("n string"), ["int cannot become string"]),
        (value("n date"), value("n timestamp"), ["date cannot become timestamp"]),
        (value("n decimal(8,2)"), value("n decimal(8,3)"), ["decimal(8,2) cannot become decimal(8,3)"]),
        (value("n decimal(8,2)"), value("n decimal(9,1)"), ["without loss"]),
        (value("n array<long>"), value("n array<int>"), ["'n': bigint cannot become int"]),
        (value("n map<int, int>"), value("n map<long, int>"), ["map<int,int> cannot become map<bigint,int>"]),
        (value("n long"), value("n double"), ["n double"]),
        (value("n long"), value("n long, x long not null"), ["x long not null", "nullable columns"]),
        (value("n long"), value("n long not null"), ["'n' was nullable and is not any more"]),
        (value("n struct<a: int>"), value("n struct<a: int, b: int not null>"), ["struct", "'b' is not nullable"]),
        (value("n long"), value("n long", kind="list"), ["value state", "list state"]),
        (value("n long"), value("n long", ttl_ms=10), ["a time-to-live of 10 ms"]),
        (value("n long", ttl_ms=10), value("n long, x int"), ["a time-to-live of 10 ms"]),
        (
            value("n long", kind="map", key_schema=parse_schema("a int").json()),
            value("n long", kind="map", key_schema=parse_schema("a int, b int").json()),
            ["keys (a integer)", "keys (a integer, b integer)"],
        ),
        (
            value("count long", kind="aggregate"),
            value("count long, max long", kind="aggregate"),
            ["Use the same aggregates as before"],
        ),
        (value("a int", kind="rows"), value("a int, b int", kind="rows"), ["Define the step as before"]),
        (value("a int", kind="rows", ttl_ms=5), value("a int", kind="rows", ttl_ms=6), ["another uid"]),
        (value("k string", TIMERS, "timers"), value("k string, j int", TIMERS, "timers"), ["timers state"]),
    ],
)
def test_anything_else_is_refused(old: StateDescriptor, new: StateDescriptor, texts: list[str]) -> None:
    for allow in (False, True):
        with pytest.raises(IncompatibleCheckpointError) as caught:
            between([old], [new], allow)
        for text in ["operator sums", repr(old.name), *texts]:
            assert text in str(caught.value)


def test_a_state_goes_only_with_leave_or_if_user_code_deletes_it() -> None:
    old, kept = value("n long", "old"), value("n long")
    with pytest.raises(IncompatibleCheckpointError, match=r"'old' \(value state, .*allow_non_restored_state=True"):
        between([kept, old], [kept])
    assert between([kept, old], [kept], allow=True).dropped == (old,)
    assert between([kept, old], [kept], deleted=("old",)).dropped == (old,)
    with pytest.raises(IncompatibleCheckpointError):
        between([kept, old], [kept], deleted=("other",))


# --- what entries become -----------------------------------------------------------------------------


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateBackend]:
    opened = open_backend(request.param, tmp_path / "db")
    yield opened
    opened.close()


def clear(backend: StateBackend) -> None:
    keys = [key for key, _ in backend.scan(b"")]
    backend.apply(keys, [None] * len(keys))


def test_the_entries_of_dropped_states_go_and_no_others(backend: StateBackend) -> None:
    names = ["old", "older", "ol", "total", TIMERS, TIMES]
    keys = [state_prefix(group, name) + bytes([n]) for group in range(1, 6) for name in names for n in (0, 7, 255)]
    backend.apply(keys, [b"x"] * len(keys))
    timers = value("k string", TIMERS, "timers")
    between([value("n long", "old"), timers, value("n long")], [value("n long")], allow=True).apply(backend, GROUPS)
    gone = {state_prefix(group, name) for group in GROUPS for name in ("old", TIMERS, TIMES)}
    assert [key for key, _ in backend.scan(b"")] == sorted(key for key in keys if key[:-1] not in gone)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "long": st.integers(-(1 << 63), (1 << 63) - 1),
    "int": st.integers(-9, 9),
    "string": st.text(max_size=5),
    "double": st.floats(),
    "boolean": st.booleans(),
    "binary": st.binary(max_size=4),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "array<int>": st.lists(st.none() | st.integers(-9, 9), max_size=3),
    "struct<a: int, b: string>": st.tuples(st.none() | st.integers(-9, 9), st.none() | st.text(max_size=3)),
    "map<string, float>": st.dictionaries(st.text(max_size=2), st.none() | st.floats(width=32), max_size=2),
    "short": st.integers(-(1 << 15), (1 << 15) - 1),
    "float": st.floats(width=32),
    "decimal(4,1)": st.decimals(-999, 999, places=1, allow_nan=False),
    "decimal(36,0)": st.sampled_from([Decimal(0), Decimal(10**36 - 1), Decimal(1 - 10**36)]),
}


def same(one: Any, other: Any) -> bool:
    """Equal, also where there are NaN."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or one == other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


WIDER: dict[str, dict[str, Any]] = {
    "short": {"int": int, "long": int, "float": float, "double": float},
    "int": {"long": int, "double": float},
    "float": {"double": float},
    "decimal(4,1)": {"decimal(4,1)": Decimal, "decimal(6,1)": Decimal, "decimal(6,3)": Decimal},
    "decimal(36,0)": {"decimal(38,0)": Decimal, "decimal(38,2)": Decimal},
    "array<int>": {"array<long>": list},
    "struct<a: int, b: string>": {
        "struct<b: string, a: long>": lambda item: (item[1], item[0]),
        "struct<a: double>": lambda item: (None if item[0] is None else float(item[0]),),
        "struct<c: date, b: string>": lambda item: (None, item[1]),
    },
    "map<string, float>": {"map<string, double>": dict},
}
"""The types that a type may become, and what a value becomes then."""
KINDS = ["value", "list", "map", "reducing", "aggregating", "columns"]


def test_decimals_of_more_digits_than_pythons_own_context_become_wider() -> None:
    most = Decimal(10**36 - 1)
    convert = conversion(DecimalType(36, 0), DecimalType(38, 2))
    assert convert is not None
    converted = bytes(convert(msgspec.Raw(msgspec.msgpack.encode(most))))
    assert msgspec.msgpack.decode(converted, type=Decimal).as_tuple() == Decimal(f"{most}.00").as_tuple()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_of_changed_columns_are_the_old_ones(backend: StateBackend, data: st.DataObject) -> None:
    """Columns come, go, change places and become wider: stored rows become what the step itself would write."""
    clear(backend)
    kind: Any = data.draw(st.sampled_from(KINDS), "kind")
    ttl = None if kind == "columns" else data.draw(st.none() | st.just(1000), "ttl")
    columns = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4), "old columns")
    old = StructType(
        [StructField(f"c{at}", kind_of(text), data.draw(st.booleans())) for at, text in enumerate(columns)]
    )
    changes: dict[str, Any] = {}
    fields = []
    for field, text in zip(old.fields, columns, strict=True):
        wider = data.draw(st.none() | st.sampled_from(sorted(WIDER.get(text, ()))) if text in WIDER else st.none())
        changes[field.name] = WIDER[text][wider] if wider else lambda item: item
        nullable = field.nullable or data.draw(st.booleans())
        fields.append(StructField(field.name, kind_of(wider or text), nullable))
    fields = data.draw(st.permutations(fields), "order")[: data.draw(st.integers(1, len(fields)), "kept")]
    for number in range(data.draw(st.integers(0, 2), "new columns")):
        added = StructField(f"new{number}", kind_of(data.draw(st.sampled_from(sorted(VALUES)))))
        fields.insert(data.draw(st.integers(0, len(fields))), added)
    new = StructType(fields)
    row = st.tuples(
        *(st.none() | VALUES[t] if f.nullable else VALUES[t] for f, t in zip(old.fields, columns, strict=True))
    )
    keys = sorted(
        state_prefix(group, "total") + bytes([n])
        for group in GROUPS
        for n in data.draw(st.sets(st.integers(0, 255), max_size=3))
    )
    stored = data.draw(st.lists(st.lists(row, min_size=1, max_size=3), min_size=len(keys), max_size=len(keys)), "rows")

    other = {state_prefix(group, name): b"?" for group in range(1, 6) for name in ("tota", "total2")}
    outside = {state_prefix(group, "total") + b"k": b"?" for group in (1, 5)}
    backend.apply(list(keys), [encoded(kind, old, rows, ttl) for rows in stored])
    backend.apply(list(other | outside), list((other | outside).values()))
    keyed = parse_schema("k int").json() if kind == "map" else None
    before, now = (StateDescriptor("total", kind, one.json(), keyed, ttl) for one in (old, new))
    between([before], [now]).apply(backend, GROUPS)

    found = dict(backend.scan(b""))
    assert found.keys() == {*keys, *other, *outside}
    assert all(found[key] == b"?" for key in (*other, *outside))
    for key, rows in zip(keys, stored, strict=True):
        wanted = []
        for one in rows if kind == "list" else rows[:1]:
            known = dict(zip(old.fieldNames(), one, strict=True))
            known = {name: None if item is None else changes[name](item) for name, item in known.items()}
            wanted.append(tuple(known.get(field.name) for field in fields))
        if ttl is not None:
            assert found[key][:8] == stamp_of(77)
        assert same(decoded(kind, new, found[key], ttl), wanted)
        # And they are what the step itself would write.
        if kind != "list":
            assert found[key] == encoded(kind, new, wanted, ttl)


def kind_of(text: str) -> DataType:
    return parse_schema(f"c {text}")["c"].dataType


def encoded(kind: str, schema: StructType, rows: list[Any], ttl: int | None) -> bytes:
    if kind == "columns":
        codec = RowCodec(schema, "test")
        arrays = [
            pa.array([_arrow(rows[0][at], field.dataType)], codec.schema.field(at).type)
            for at, field in enumerate(schema.fields)
        ]
        return codec.encode(pa.RecordBatch.from_arrays(arrays, names=schema.fieldNames()))[0]
    values = ValueCodec(schema, "test")
    values.as_rows()
    data = values.join([values.encode(row) for row in rows]) if kind == "list" else values.encode(rows[0])
    return data if ttl is None else stamp_of(77) + data


def _arrow(item: Any, kind: Any) -> Any:
    """A struct as Arrow takes it."""
    if not isinstance(kind, StructType) or item is None:
        return item
    return dict(zip(kind.fieldNames(), item, strict=True))


def decoded(kind: str, schema: StructType, data: bytes, ttl: int | None) -> list[Any]:
    if kind == "columns":
        columns = RowCodec(schema, "test").decode([data]).columns
        return [tuple(plain(column[0].as_py()) for column in columns)]
    values = ValueCodec(schema, "test")
    values.as_rows()
    data = data if ttl is None else data[8:]
    return values.decode_list(data) if kind == "list" else [values.decode(data)]


def plain(item: Any) -> Any:
    """What Arrow gives for a struct or a map, as states have it."""
    if isinstance(item, dict):
        return tuple(item.values())
    return dict(item) if isinstance(item, list) and item and isinstance(item[0], tuple) else item


def test_a_value_of_other_columns_is_damage(backend: StateBackend) -> None:
    codec = ValueCodec(parse_schema("a int, b int, c int"), "test")
    backend.apply([state_prefix(2, "total") + b"k"], [codec.encode((1, 2, 3))])
    with pytest.raises(DamagedFileError, match="state 'total'"):
        between([value("n long")], [value("n long, x int")]).apply(backend, GROUPS)


# --- what the driver knows -----------------------------------------------------------------------------

INPUT = parse_schema("k string, t timestamp, x long")
RIGHT = parse_schema("k string, u timestamp, y long")


class Keeps(KeyedProcessor):
    def open(self, context: ProcessContext) -> None:
        context.value_state("total", "n long")


class KeepsColumns(ArrowProcessor):
    def open(self, context: ArrowContext) -> None:
        context.value_state("total", "n long")


def operators() -> list[Operator]:
    return [
        ProcessOperator("p", Keeps(), ["k"], INPUT, INPUT),
        ProcessOperator("p", Keeps(), ["k"], INPUT, INPUT, time_mode="processing"),
        ArrowProcessOperator("p", KeepsColumns(), ["k"], INPUT, INPUT),
        ArrowProcessOperator("p", lambda table, context: None, ["k"], INPUT, INPUT),
        DeduplicateOperator("p", ["k"], INPUT, None),
        DeduplicateOperator("p", ["k"], INPUT, 1000),
        JoinOperator("p", ["k"], ["k"], INPUT, RIGHT),
        JoinOperator("p", ["k"], ["k"], INPUT, RIGHT, "inner", "t", "u", -5, 5),
    ]


@pytest.mark.parametrize("at", range(len(operators())))
def test_the_driver_knows_the_states_before_anything_is_opened(at: int) -> None:
    from strandline.operators.base import SubtaskInfo

    operator = operators()[at]
    known = operator.check()
    operator.open(SubtaskInfo("job", "p", 0, 1, 8))
    assert known == operator.states()


def test_what_a_processor_of_spark_deletes_may_go() -> None:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Shrinks(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", "n long")
            handle.deleteIfExists("old one")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return iter(())

        def close(self) -> None: ...

    operator = SparkProcessorOperator("p", Shrinks(), ["k"], INPUT, INPUT, rows="row")
    assert [state.name for state in operator.check()] == ["total"]
    (deleted,) = operator.deleted_states
    assert deleted.startswith("old-one-")


@pytest.mark.parametrize(
    "described",
    [{}, {"name": "total"}, {"name": "../x", "kind": "value", "schema": "long"}, {"name": 1, "kind": [], "schema": {}}],
)
def test_a_state_that_cannot_exist_is_an_incompatible_checkpoint(described: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="cannot exist"):
        read_states("sums", [described])
