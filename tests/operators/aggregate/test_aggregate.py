"""Running aggregates equal those of plain Python over all rows so far, under Spark's rules for nulls, NaN, overflow."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits
from strandline.operators.base import Operator, SubtaskInfo
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples

Make = Callable[[Operator], Any]
moments = st.datetimes(min_value=datetime(1960, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))

# Sums of these do not depend on the order.
exact_floats = st.integers(-1000, 1000).map(lambda n: n / 4) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])

KEY_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "long": st.integers(-2, 2),
    "string": st.text("a\0", max_size=2),
    "double": st.sampled_from([0.0, -0.0, 1.5, math.nan]),
    "boolean": st.booleans(),
    "date": st.dates(date(1969, 12, 30), date(1970, 1, 2)),
    "timestamp": st.sampled_from([datetime(1960, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)]),
    "decimal(5,2)": st.sampled_from([Decimal("-1.50"), Decimal("0.00"), Decimal("2.25")]),
    "array<int>": st.lists(st.integers(0, 1), max_size=2),
    "struct<p:double,q:string>": st.builds(
        lambda p, q: {"p": p, "q": q}, st.sampled_from([0.0, -0.0]), st.sampled_from("xy")
    ),
}
VALUE_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "byte": st.integers(-128, 127),
    "long": st.integers(-(2**40), 2**40),
    "float": exact_floats,
    "double": exact_floats,
    "decimal(10,2)": st.decimals(-(10**7), 10**7, places=2),
    "decimal(38,2)": st.decimals(-(10**7), 10**7, places=2),
    "string": st.text("ab\0", max_size=3),
    "binary": st.binary(max_size=3),
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": moments,
}


def same(key: Any) -> Any:
    if isinstance(key, float):
        return "nan" if math.isnan(key) else key + 0.0
    if isinstance(key, dict):
        return tuple(map(same, key.values()))
    if isinstance(key, list | tuple):
        return tuple(map(same, key))
    return key


def spark_order(value: Any) -> Any:
    return (math.isnan(value), value) if isinstance(value, float) else value


def expected_of(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if name == "count":
        return len(known)
    if not known:
        return None
    match name:
        case "min":
            return min(known, key=spark_order)
        case "max":
            return max(known, key=spark_order)
        case "sum":
            return sum(known)
        case _:
            return sum(map(float, known)) / len(known)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return type(one) is type(other) and one == other


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_running_values_follow_a_plain_model(slot: Make, data: st.DataObject) -> None:
    key_types = data.draw(st.lists(st.sampled_from(sorted(KEY_TYPES)), min_size=1, max_size=2))
    value_type = data.draw(st.sampled_from(sorted(VALUE_TYPES)))
    names = [f"k{at}" for at in range(len(key_types))]
    schema = parse_schema(", ".join([*(f"{n} {t}" for n, t in zip(names, key_types, strict=True)), f"x {value_type}"]))
    functions = ["count", "min", "max"]
    if value_type not in ("string", "binary", "boolean", "date", "timestamp"):
        functions += ["sum"] if value_type.startswith("decimal") else ["sum", "avg"]
    aggregates = {f"a_{name}": getattr(agg, name)("x") for name in functions}
    small = data.draw(st.booleans(), "small limits")
    limits = GroupingLimits(gather_rows=2, held_groups=3, slice_rows=2) if small else DEFAULT_LIMITS
    mini = slot(AggregateOperator("a", names, schema, {"n": agg.count(), **aggregates}, limits))
    keys = st.tuples(*(st.none() | KEY_TYPES[name] for name in key_types))
    row = st.tuples(keys, st.none() | VALUE_TYPES[value_type]).map(lambda drawn: (*drawn[0], drawn[1]))
    model: dict[Any, list[Any]] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.lists(row, max_size=15))
        now = {key: list(values) for key, values in model.items()}
        for *key, value in rows:
            now.setdefault(same(key), []).append(value)
        commit = data.draw(st.booleans())
        made = mini.run(rows, data.draw(st.lists(st.integers(0, 15))), commit)
        assert Counter(same(out[: len(names)]) for out in made) == Counter({same(key) for *key, _ in rows})
        for out in made:
            values = now[same(out[: len(names)])]
            want = [len(values), *(expected_of(name, values) for name in functions)]
            assert all(map(alike, out[len(names) :], want)), (out, want)
        model = now if commit else model


def test_result_types_are_sparks() -> None:
    schema = parse_schema("k string not null, b byte, f float, d decimal(10,2), w decimal(35,3), s string, t timestamp")
    operator = AggregateOperator(
        "a",
        ["k"],
        schema,
        {
            "n": agg.count(),
            "m": agg.count("s"),
            "sb": agg.sum("b"),
            "sf": agg.sum("f"),
            "sd": agg.sum("d"),
            "sw": agg.sum("w"),
            "ab": agg.avg("b"),
            "af": agg.avg("f"),
            "ls": agg.min("s"),
            "gt": agg.max("t"),
        },
    )
    assert operator.output_struct.simpleString() == (
        "struct<k:string,n:bigint,m:bigint,sb:bigint,sf:double,sd:decimal(20,2),sw:decimal(38,3),ab:double,af:double,"
        "ls:string,gt:timestamp>"
    )
    assert not operator.output_struct["k"].nullable
    assert operator.output_schema.field("gt").type == pa.timestamp("us", "UTC")


INPUT = parse_schema("user string, x long, d decimal(38,0), f double")


@pytest.mark.parametrize(
    ("aggregates", "told"),
    [
        ({"n": agg.sum("user")}, "sum of column 'user' of type string"),
        ({"n": agg.avg("user")}, "avg of column 'user' of type string"),
        ({"n": agg.avg("d")}, r"avg of column 'd' of type decimal\(38,0\).*cast the column to double"),
        ({"n": agg.sum("usr")}, "no column 'usr'; did you mean 'user'"),
        ({"n": agg.min("zzz")}, "no column 'zzz'; the columns are user, x, d, f"),
        ({"user": agg.count()}, r"'user' is a key column; give count\(\) another name"),
        ({}, "there is no aggregate; give at least one"),
        ({"n": "count"}, "is not an aggregate"),
        ({"n": agg.Aggregate("sum")}, "needs a column"),
    ],
)
def test_a_wrong_aggregate_is_refused_when_the_job_is_built(aggregates: Any, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=told) as caught:
        AggregateOperator("totals", ["user"], INPUT, aggregates)
    assert "operator 'totals'" in str(caught.value)


def test_min_of_a_nested_column_and_unknown_keys_are_refused() -> None:
    with pytest.raises(JobDefinitionError, match="min or max of column 'a'"):
        AggregateOperator("t", ["k"], parse_schema("k long, a array<int>"), {"m": agg.min("a")})
    with pytest.raises(JobDefinitionError, match="no column 'usr'; did you mean 'user'"):
        AggregateOperator("t", ["usr"], INPUT, {"n": agg.count()})


@pytest.mark.parametrize("limits", [DEFAULT_LIMITS, GroupingLimits(gather_rows=1)])
@pytest.mark.parametrize("cuts", [(), (1, 2)])
def test_a_long_sum_that_overflows_is_an_error_and_never_a_wrong_number(
    slot: Make, cuts: Any, limits: GroupingLimits
) -> None:
    big = 2**63 - 1
    mini = slot(AggregateOperator("totals", ["user"], INPUT, {"s": agg.sum("x")}))
    # Beyond the range on the way, within it at the end.
    assert mini.run([("a", big, None, None), ("a", 5, None, None), ("a", -6, None, None)], cuts) == [("a", big - 1)]
    mini.operator = AggregateOperator("totals", ["user"], INPUT, {"s": agg.sum("x")}, limits)
    mini.operator.open(SubtaskInfo("job", "totals", 3, 4, 128))
    for rows in ([("b", 1, None, None), ("a", 2, None, None)], [("b", big, None, None), ("b", 1, None, None)]):
        with pytest.raises(SchemaError, match=r"operator 'totals', subtask 3, key \('[ab]',\): sum\('x'\) no longer"):
            mini.run(rows, cuts)
    assert mini.run([("a", 1, None, None)]) == [("a", big)]


def test_a_decimal_sum_that_overflows_is_an_error(slot: Make) -> None:
    mini = slot(AggregateOperator("totals", ["user"], INPUT, {"s": agg.sum("d")}))
    most = Decimal(10**38 - 1)
    assert mini.run([("a", None, most, None)]) == [("a", most)]
    for rows in ([("a", None, Decimal(1), None)], [("b", None, most, None)] * 4):
        with pytest.raises(SchemaError, match=r"key \('[ab]',\): sum\('d'\) no longer fits decimal128"):
            mini.run(rows)


def test_a_batch_that_folds_often_still_emits_each_key_once(slot: Make) -> None:
    limits = GroupingLimits(gather_rows=10, held_groups=15)
    mini = slot(AggregateOperator("a", ["user"], INPUT, {"n": agg.count(), "s": agg.sum("x")}, limits))
    rows = [(f"u{at % 37}", at, None, None) for at in range(500)]
    made = mini.run(rows, cuts=range(0, 500, 7))
    assert sorted(made) == sorted(
        (f"u{user}", len(range(user, 500, 37)), sum(range(user, 500, 37))) for user in range(37)
    )


def test_an_empty_batch_emits_nothing(slot: Make) -> None:
    mini = slot(AggregateOperator("a", ["user"], INPUT, {"n": agg.count()}))
    assert mini.run([]) == []
    assert mini.run(part.slice(0, 0) for part in mini.batches([("a", 1, None, None)])) == []


def test_the_operator_travels_and_describes_its_state() -> None:
    operator = pickle.loads(
        pickle.dumps(AggregateOperator("a", ["user"], INPUT, {"n": agg.count(), "m": agg.avg("x")}))
    )
    (state,) = operator.states()
    assert state.kind == "aggregate"
    assert parse_schema(state.schema).fieldNames() == ["count", "double:x", "count:x"]


def test_timestamps_may_come_in_any_time_zone(slot: Make) -> None:
    mini = slot(AggregateOperator("a", ["t"], parse_schema("t timestamp, x long"), {"last": agg.max("t")}))
    moment = datetime(2024, 6, 1, 12, tzinfo=UTC)
    (sent,) = mini.batches([(moment, 1)])
    elsewhere = sent.set_column(0, "t", sent.column(0).cast(pa.timestamp("us", "Asia/Tokyo")))
    assert mini.run(iter([elsewhere])) == [(moment, moment)]


def test_columns_may_be_named_like_the_operators_own(slot: Make) -> None:
    schema = parse_schema("count string, count_count long, `sum:x` long, x long")
    operator = AggregateOperator(
        "a", ["count", "count_count", "sum:x"], schema, {"n": agg.count(), "x_sum": agg.sum("x"), "k": agg.sum("sum:x")}
    )
    assert slot(operator).run([("a", 1, 2, 3), ("a", 1, 2, 4)]) == [("a", 1, 2, 2, 7, 4)]
