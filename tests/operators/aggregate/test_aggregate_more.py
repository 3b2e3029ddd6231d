"""first, last, collect_list, approx_count_distinct and the user's own aggregates, against plain Python."""

from __future__ import annotations

import math
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from strandline.errors import JobDefinitionError, SchemaError, UserCodeError
from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.accumulators import Groups
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
from strandline.operators.aggregate.hyperloglog import ApproxDistinct, hash_column
from strandline.operators.aggregate.limits import DEFAULT_LIMITS, GroupingLimits
from strandline.operators.base import Operator
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.windows.window_slot import at

Make = Callable[[Operator], Any]

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "long": st.integers(-3, 3),
    "byte": st.integers(-128, 127),
    "double": st.sampled_from([0.5, -1.25, 1e300]),
    "float": st.sampled_from([0.5, -1.25]),
    "boolean": st.booleans(),
    "string": st.text("aé\0", max_size=3),
    "binary": st.binary(max_size=3),
    "date": st.dates(date(1969, 1, 1), date(1971, 1, 1)),
    "timestamp": st.integers(-(10**12), 10**12).map(at),
    "decimal(20,2)": st.decimals(-(10**7), 10**7, places=2),
}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (agg.first("x", ignore_nulls=True), agg.first("x:known")),
        (agg.last("x:known"), agg.last("x", ignore_nulls=True)),
        (agg.first("x"), agg.first("x:batch")),
        (agg.last("x", ignore_nulls=True), agg.last("x:known:row")),
        (agg.collect_list("y"), agg.collect_list("y:lengths")),
    ],
)
def test_columns_with_the_names_of_stored_ones_are_refused(one: agg.Aggregate, other: agg.Aggregate) -> None:
    names = ["x", "x:known", "x:batch", "x:known:row"]
    schema = StructType(
        [StructField(name, LongType()) for name in names]
        + [StructField(name, StringType()) for name in ("k", "y", "y:lengths")]
    )
    for single in (one, other):
        AggregateOperator("s", ["k"], schema, {"a": single, "again": single})
    with pytest.raises(JobDefinitionError, match=r"columns '\S+' and '\S+' are too similar.*rename"):
        AggregateOperator("s", ["k"], schema, {"a": one, "b": other})


class Vwap(ArrowAggregate):
    """The example of the class's own documentation, with whole numbers."""

    state_schema = pa.schema([("amount", pa.int64()), ("volume", pa.int64())])
    result_type = "double"

    def partial(self, rows: pa.Table) -> pa.Table:
        amount = pc.multiply(rows["price"], rows["size"])
        return self.merge(pa.table({"group_id": rows["group_id"], "amount": amount, "volume": rows["size"]}))

    def merge(self, states: pa.Table) -> pa.Table:
        sums = states.group_by("group_id").aggregate([("amount", "sum"), ("volume", "sum")])
        return sums.rename_columns({"amount_sum": "amount", "volume_sum": "volume"})

    def result(self, states: pa.Table) -> Any:
        return pc.divide(states["amount"].cast(pa.float64()), states["volume"].cast(pa.float64()))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(sorted(VALUES)), small=st.booleans())
def test_values_and_lists_follow_the_order_of_arrival(slot: Make, data: st.DataObject, kind: str, small: bool) -> None:
    aggregates = {
        "first": agg.first("x"),
        "known_first": agg.first("x", ignore_nulls=True),
        "last": agg.last("x"),
        "known_last": agg.last("x", ignore_nulls=True),
        "all": agg.collect_list("x"),
        "different": agg.approx_count_distinct("x"),
    }
    limits = GroupingLimits(gather_rows=2, held_groups=3, slice_rows=2, sketch_bytes=4) if small else DEFAULT_LIMITS
    mini = slot(AggregateOperator("a", ["k"], parse_schema(f"k long, x {kind}"), aggregates, limits))
    row = st.tuples(st.integers(0, 3), st.none() | VALUES[kind])
    model: dict[int, list[Any]] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.lists(row, max_size=12))
        now = {key: list(values) for key, values in model.items()}
        for key, value in rows:
            now.setdefault(key, []).append(value)
        commit = data.draw(st.booleans())
        made = mini.run(rows, data.draw(st.lists(st.integers(0, 12), max_size=3)), commit)
        assert sorted(out[0] for out in made) == sorted({key for key, _ in rows})
        for key, first, known_first, last, known_last, every, different in made:
            values = now[key]
            known = [value for value in values if value is not None]
            assert (first, last) == (values[0], values[-1])
            assert (known_first, known_last) == ((known[0], known[-1]) if known else (None, None))
            assert every == known
            assert abs(different - len(set(known))) <= 1
        model = now if commit else model


def test_result_types_are_sparks() -> None:
    schema = parse_schema("k long, s string, d decimal(10,2)")
    aggregates = {"f": agg.first("d"), "c": agg.collect_list("s"), "n": agg.approx_count_distinct("s")}
    operator = AggregateOperator("a", ["k"], schema, aggregates)
    assert operator.output_struct.simpleString() == "struct<k:bigint,f:decimal(10,2),c:array<string>,n:bigint>"
    assert not operator.output_struct["n"].nullable
    assert operator.needed_columns == ("k", "d", "s")


@pytest.mark.parametrize("kind", ["long", "string", "decimal(38,0)"])
@pytest.mark.parametrize("many", [1, 100, 3_000, 20_000, 200_000])
def test_about_how_many_values_differ(slot: Make, kind: str, many: int) -> None:
    mini = slot(AggregateOperator("a", ["k"], parse_schema(f"k long, x {kind}"), {"n": agg.approx_count_distinct("x")}))
    schema = pa.schema([("k", pa.int64()), ("x", mini.operator._input.field("x").type), ("__sl_key_group", pa.int32())])
    numbers = np.arange(many, dtype=np.int64)
    for part in np.array_split(np.concatenate((numbers, numbers, numbers)), 3):
        values = pa.array(part)
        values = pc.binary_join_element_wise("user-", values.cast(pa.string()), "") if kind == "string" else values
        columns = [pa.array(np.zeros(len(part), np.int64)), values.cast(schema.field("x").type)]
        columns.append(pa.array(np.zeros(len(part), np.int32)))
        made = mini.run(iter([pa.RecordBatch.from_arrays(columns, schema=schema)]))
    assert abs(made[0][1] - many) <= max(1, 0.05 * many)
    (value,) = (value for _, value in mini.backend.scan(b""))
    assert len(value) <= min(4096, 3 * many) + 5


def test_equal_values_count_once_as_spark_sees_them(slot: Make) -> None:
    mini = slot(AggregateOperator("a", ["k"], parse_schema("k long, x double"), {"n": agg.approx_count_distinct("x")}))
    values = [0.0, -0.0, float("nan"), -float("nan"), 1.0, None]
    assert mini.run([(1, value) for value in values]) == [(1, 3)]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_aggregate_of_the_users_own_is_called_with_whole_columns(slot: Make, data: st.DataObject) -> None:
    operator = AggregateOperator(
        "a", ["k"], parse_schema("k long, price long, size long"), {"v": Vwap()("price", "size")}
    )
    mini = slot(pickle.loads(pickle.dumps(operator)))
    sums: dict[int, tuple[int, int]] = {}
    for _ in range(3):
        row = st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9))
        rows = data.draw(st.lists(row, max_size=10))
        for key, price, size in rows:
            amount, volume = sums.get(key, (0, 0))
            sums[key] = amount + price * size, volume + size
        made = dict(mini.run(rows, data.draw(st.lists(st.integers(0, 10), max_size=2))))
        assert made == {key: sums[key][0] / sums[key][1] for key, *_ in rows}


def broken(**methods: Any) -> ArrowAggregate:
    made: ArrowAggregate = type("Broken", (Vwap,), methods)()
    return made


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (broken(partial=lambda self, rows: 1 / 0), UserCodeError, r"'user:v' \(Broken\): <lambda>\(\) failed"),
        (broken(partial=lambda self, rows: sys.exit(1)), UserCodeError, r"(?s)<lambda>\(\) failed.*SystemExit"),
        (broken(partial=lambda self, rows: rows), SchemaError, "columns group_id, amount, volume, not group_id, price"),
        (
            broken(merge=lambda self, rows: rows.slice(0, 1)),
            SchemaError,
            "one row for each of the 2 values of group_id",
        ),
        (broken(result=lambda self, states: pa.array([1.0])), SchemaError, "a column of 2 values"),
        (broken(result=lambda self, states: pa.array(["x", "y"])), SchemaError, "is string, not double"),
    ],
)
def test_a_users_mistake_is_told(slot: Make, code: ArrowAggregate, error: type[Exception], told: str) -> None:
    schema = parse_schema("k long, price long, size long")
    mini = slot(AggregateOperator("a", ["k"], schema, {"v": code("price", "size")}))
    with pytest.raises(error, match=told):
        mini.run([(1, 2, 3), (2, 3, 4)])


@pytest.mark.parametrize(
    ("aggregate", "told"),
    [
        (agg.first("a"), "first of column 'a' of type array<int>"),
        (agg.collect_list("a"), "collect_list of column 'a'"),
        (agg.approx_count_distinct("a"), "approx_count_distinct of column 'a'"),
        (agg.last("xx"), "no column 'xx'; did you mean 'x'"),
        (Vwap()(), r"Vwap\(\)\(\) needs a column"),
        (Vwap()("x", "group_id"), "must not be called 'group_id'; rename it"),
        (broken(state_schema=pa.schema([("l", pa.list_(pa.int64()))]))("x"), "cannot be stored"),
        (broken(result_type="doubel")("x"), "Broken: .*doubel"),
        (broken(state_schema=pa.schema([("group_id", pa.int64())]))("x"), "must not be called 'group_id'; rename it"),
    ],
)
def test_a_wrong_aggregate_is_refused_when_the_job_is_built(aggregate: Any, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=told):
        AggregateOperator(
            "totals", ["k"], parse_schema("k long, x long, a array<int>, group_id long"), {"v": aggregate}
        )


def test_decimals_are_collected_exactly(slot: Make) -> None:
    mini = slot(AggregateOperator("a", ["k"], parse_schema("k long, x decimal(38,2)"), {"l": agg.collect_list("x")}))
    values = [Decimal("12345678901234567890.12"), Decimal("-0.01")]
    assert mini.run([(1, value) for value in values]) == [(1, values)]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.none() | st.binary(max_size=4) | st.integers(0, 70_000).map(lambda n: b"ab\xff" * n), max_size=6))
def test_strings_are_hashed_in_pieces_as_if_they_were_one(values: list[bytes | None]) -> None:
    column = pa.array([b"\0", *values], pa.binary()).slice(1)
    assert hash_column(column).tolist() == [hash_of(value or b"") for value in values]


def hash_of(text: bytes) -> int:
    """The polynomial in one piece. Stored sketches depend on it, so it must never change."""
    base = 0x9E3779B97F4A7C15
    powers = np.cumprod(np.full(max(1, len(text)), base, np.uint64))
    total = int((mixed(np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)) * powers[: len(text)]).sum())
    return int(mixed(np.array([total ^ len(text)], np.uint64))[0])


def mixed(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def test_counting_distinct_strings_takes_less_memory_than_the_strings() -> None:
    columns = [pa.array(["x" * 4_000_000]), pa.array([f"{n:0400d}" for n in range(10_000)])]
    tracemalloc.start()
    for column in columns:
        count = len(column)
        ApproxDistinct("n", "x").partial([column], Groups(np.arange(count), np.array([0, count])))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < columns[0].nbytes


def test_least_and_greatest_keep_the_sign_of_zero(slot: Make) -> None:
    for kind in ("double", "float"):
        operator = AggregateOperator(
            "a", ["k"], parse_schema(f"k long, x {kind}"), {"low": agg.min("x"), "high": agg.max("x")}
        )
        made = slot(operator).run([(1, -0.0), (2, 0.0), (3, 0.0), (3, -0.0), (4, -0.0), (4, float("nan"))])
        signs = {key: (math.copysign(1, low), math.copysign(1, high)) for key, low, high in made}
        assert signs == {1: (-1, -1), 2: (1, 1), 3: (-1, 1), 4: (-1, 1)}
        assert all(low == 0 and (high == 0 or key == 4) for key, low, high in made)


@pytest.mark.parametrize("function", [agg.min, agg.max, agg.approx_count_distinct])
def test_collated_texts_are_not_compared_by_their_bytes(function: Any) -> None:
    schema = StructType([StructField("k", LongType()), StructField("x", StringType("UTF8_LCASE"))])
    with pytest.raises(JobDefinitionError, match=r"'x' of type string collate UTF8_LCASE.*collate\(x, 'UTF8_BINARY'\)"):
        AggregateOperator("a", ["k"], schema, {"n": function("x")})


@pytest.mark.parametrize("name", ["a.b", "c`d", ".x", "[1]", "", "two words"])
def test_a_key_may_have_any_name(slot: Make, name: str) -> None:
    schema = StructType([StructField("v", LongType()), StructField(name, LongType())])
    mini = slot(AggregateOperator("a", [name], schema, {"n": agg.count(), "s": agg.sum("v")}))
    mini.run([(1, 7), (2, 7), (1, 8)])
    assert sorted(mini.run([(4, 7), (4, 8)], cuts=[1])) == [(7, 3, 7), (8, 2, 5)]
