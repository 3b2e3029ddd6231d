"""Values come back as they were stored, and what does not fit its schema is refused with a name."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import LongType, StructType

from strandline.errors import JobDefinitionError, SchemaError
from strandline.state.coding.codec import ColumnCodec, ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor

aware = st.datetimes(min_value=datetime(1, 1, 3), max_value=datetime(9999, 12, 29), timezones=st.just(UTC))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "byte": st.integers(-128, 127),
    "short": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "string": st.text(),
    "binary": st.binary(),
    "date": st.dates(),
    "timestamp": aware,
    "timestamp_ntz": st.datetimes(),
    "decimal(12,3)": st.decimals(-(10**8), 10**8, places=3),
    "interval day to second": st.timedeltas(timedelta(days=-10000), timedelta(days=10000)),
    "array<int>": st.lists(st.none() | st.integers(0, 9)),
    "map<string,long>": st.dictionaries(st.text(), st.none() | st.integers(0, 9)),
    "map<int,array<string>>": st.dictionaries(st.integers(0, 99), st.lists(st.text())),
    "struct<a:int,b:struct<c:string,d:decimal(4,1)>>": st.tuples(
        st.integers(0, 9), st.tuples(st.text(), st.decimals(-99, 99, places=1))
    ),
}


@st.composite
def typed_rows(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    types = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=4))
    row = draw(st.tuples(*(st.none() | VALUES[name] for name in types)))
    return ", ".join(f"c{at} {name}" for at, name in enumerate(types)), row


@settings(deadline=None)
@given(typed_rows())
def test_a_row_of_any_types_comes_back(drawn: tuple[str, tuple[Any, ...]]) -> None:
    schema, row = drawn
    codec = ValueCodec(parse_schema(schema), "state 's'")
    back = codec.decode(codec.encode(row))
    assert back == row
    assert list(map(type, back)) == list(map(type, row))
    assert codec.decode_list(codec.join([codec.encode(row)] * 3)) == [row] * 3


@settings(deadline=None)
@given(st.data())
def test_one_column_takes_a_plain_value_as_well_as_a_tuple(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(VALUES)))
    value = data.draw(VALUES[kind])
    codec = ValueCodec(parse_schema(f"c {kind}"), "state 's'")
    assert codec.decode(codec.encode(value)) == value
    assert codec.decode(codec.encode((value,))) == value
    assert codec.decode(codec.encode((None,))) is None


@pytest.mark.parametrize(
    ("schema", "value", "told"),
    [
        ("n long, s string", (1, 2), r"column 's': expected string, got 2 \(int\)"),
        ("n long, s string", ("1", "x"), r"column 'n': expected bigint, got '1' \(str\)"),
        ("n long, s string", (True, "x"), r"column 'n': expected bigint, got True \(bool\)"),
        ("n long, s string", (1.0, "x"), r"column 'n': expected bigint, got 1.0"),
        ("n long, s string", (2**63, "x"), r"column 'n': expected bigint \(64 bit\)"),
        ("n int, s string", (2**31, "x"), r"column 'n': expected int \(32 bit\)"),
        ("n byte", 128, r"column 'n': expected tinyint \(8 bit\)"),
        ("n long, s string", (1,), r"expected 2 values \(n, s\), got 1"),
        ("n long, s string", 7, r"expected a tuple of 2 values \(n, s\)"),
        ("n long, s string", {"n": 1, "t": "x"}, "no column 't'"),
        ("n long, s string", (1, date(2020, 1, 1)), "column 's': expected string"),
        ("n long, s string", (1, "\ud800"), "cannot store"),
        ("n long not null, s string", (None, "x"), r"column 'n': expected bigint \(not null\), got None"),
        ("d date", datetime(2020, 1, 1), "column 'd': expected date"),
        ("d date", "2020-01-01", "column 'd': expected date"),
        ("t timestamp_ntz", datetime(2020, 1, 1, tzinfo=UTC), "without a time zone"),
        ("d decimal(4,2)", Decimal("1.234"), "without rounding"),
        ("d decimal(4,2)", Decimal("123.4"), r"expected decimal\(4,2\)"),
        ("d decimal(4,2)", Decimal("NaN"), r"expected decimal\(4,2\)"),
        ("d decimal(4,2)", 1.5, r"expected decimal\(4,2\)"),
        ("x float", 1e300, r"float \(32 bit\)"),
        ("a array<int>", [1, "x"], r"column 'a\[1\]': expected int, got 'x'"),
        ("s struct<a:int,b:array<string>>", (1, ["x", 3]), r"column 's\.b\[1\]': expected string, got 3"),
        ("m map<string,int>", {"k": "v"}, r"column \"m\['k'\]\": expected int"),
        ("b boolean", 1, "expected boolean"),
        ("b binary", "text", "expected binary"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(schema: str, value: Any, told: str) -> None:
    codec = ValueCodec(parse_schema(schema), "state 'total' of operator 'visits'")
    with pytest.raises(SchemaError, match=told) as caught:
        codec.encode(value)
    assert str(caught.value).startswith("state 'total' of operator 'visits': ")


def test_values_that_lose_nothing_are_taken() -> None:
    def through(schema: str, value: Any) -> Any:
        codec = ValueCodec(parse_schema(schema), "state 's'")
        return codec.decode(codec.encode(value))

    assert through("n long, x double", (np.int64(3), np.float32(0.5))) == (3, 0.5)
    assert through("n long, x double", [1, 2]) == (1, 2.0)
    assert through("n long, x double", Row(n=1, x=2.0)) == (1, 2.0)
    assert through("n long, x double", {"n": 1}) == (1, None)
    assert through("n long", Row(n=1)) == 1
    assert math.isnan(through("x double", math.nan))
    assert through("x float", 0.1) == float(np.float32(0.1))
    assert through("d decimal(6,2)", 3) == Decimal("3.00")
    assert through("b binary", bytearray(b"x")) == b"x"
    assert through("s struct<a:int,b:string>", {"a": 1, "b": "x"}) == (1, "x")
    assert through("a array<double>", np.array([1.0, 2.0])) == [1.0, 2.0]
    elsewhere = datetime(2020, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert through("t timestamp", elsewhere) == datetime(2020, 1, 1, 10, tzinfo=UTC)
    naive = datetime(2020, 1, 1, 12)
    assert through("t timestamp", naive) == naive.astimezone(UTC)


def test_canonical_bytes_are_equal_for_equal_values() -> None:
    codec = ValueCodec(parse_schema("x double, d decimal(5,2)"), "state 's'", canonical=True)
    assert (
        codec.encode((0.0, Decimal("1.5")))
        == codec.encode((-0.0, Decimal("1.50")))
        == codec.encode((0, Decimal("1.5")))
    )
    assert codec.encode((math.nan, 1)) == codec.encode((-math.nan, 1))
    with pytest.raises(SchemaError, match="not null"):
        codec.encode((None, 1))


def test_bytes_of_another_schema_are_an_error_that_says_what_to_do() -> None:
    written = ValueCodec(parse_schema("n long, s string"), "state 's'").encode((1, "x"))
    with pytest.raises(SchemaError, match="declare the schema that it was written with"):
        ValueCodec(parse_schema("n long, m long"), "state 's'").decode(written)


def test_a_schema_without_columns_or_of_an_unsupported_type_is_refused() -> None:
    with pytest.raises(SchemaError, match="no column"):
        ValueCodec(StructType([]), "state 's'")


COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(38, 4), st.decimals(-(10**20), 10**20, places=4)),
    (pa.date32(), st.dates()),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
]


@settings(deadline=None)
@given(st.data())
def test_columns_come_back_row_by_row(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    rows = data.draw(st.lists(st.tuples(*(st.none() | values for _, values in chosen)), max_size=8))
    schema = pa.schema([(f"c{at}", kind) for at, (kind, _) in enumerate(chosen)])
    arrays = [pa.array([row[at] for row in rows], kind) for at, (kind, _) in enumerate(chosen)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    codec = ColumnCodec(schema)
    encoded = codec.encode(batch)
    assert len(encoded) == len(rows)
    assert codec.decode(encoded) == batch
    assert codec.decode(encoded[::-1]).to_pylist() == batch.to_pylist()[::-1]
    assert codec.encode(batch.slice(1)) == encoded[1:]


def test_columns_of_another_shape_are_refused() -> None:
    longs = ColumnCodec(pa.schema([("a", pa.int64())]))
    texts = ColumnCodec(pa.schema([("a", pa.string())]))
    written = longs.encode(pa.RecordBatch.from_pydict({"a": [1, 2]}))
    for codec in (texts, ColumnCodec(pa.schema([("a", pa.int64()), ("b", pa.int64())]))):
        with pytest.raises(SchemaError, match="another schema"):
            codec.decode(written)
    with pytest.raises(SchemaError, match="cannot be stored"):
        ColumnCodec(pa.schema([("a", pa.list_(pa.int64()))]))


@pytest.mark.parametrize(
    ("ddl", "simple"),
    [
        ("n long, s string", "struct<n:bigint,s:string>"),
        ("n: int NOT NULL, `odd name` BIGINT COMMENT 'x, y'", "struct<n:int,odd name:bigint>"),
        ("long", "struct<value:bigint>"),
        (
            "a array<map<string,struct<x:int,y:decimal(10,2)>>>",
            "struct<a:array<map<string,struct<x:int,y:decimal(10,2)>>>>",
        ),
        ("decimal(5,2)", "struct<value:decimal(5,2)>"),
        ("v varchar(10), c char(3), t timestamp_ntz", "struct<v:string,c:string,t:timestamp_ntz>"),
        ("struct<a:int>", "struct<a:int>"),
    ],
)
def test_ddl_is_read_without_a_jvm(ddl: str, simple: str) -> None:
    parsed = parse_schema(ddl)
    assert parsed.simpleString() == simple
    assert parse_schema(parsed.json()) == parsed
    assert parse_schema(parsed) is parsed


def test_a_single_type_makes_one_column() -> None:
    assert parse_schema(LongType()).simpleString() == "struct<value:bigint>"


@pytest.mark.parametrize(
    "ddl", ["", "n lng", "n long,", "a<", "n long s", "n long, n int", "d decimal(50,2)", "{}", "a array<int"]
)
def test_unreadable_ddl_is_an_error_of_ours(ddl: str) -> None:
    with pytest.raises(SchemaError, match=r"schema|decimal"):
        parse_schema(ddl)


def test_descriptors_go_through_metadata() -> None:
    descriptor = StateDescriptor("seen-by.user_1", "map", "n long", key_schema="k string")
    assert msgspec.json.decode(msgspec.json.encode(descriptor), type=StateDescriptor) == descriptor


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", "a/b", "a\0"])
def test_a_state_name_must_be_plain(name: str) -> None:
    with pytest.raises(JobDefinitionError, match="cannot be the name of a state"):
        StateDescriptor(name, "value", "n long")


def test_a_key_schema_belongs_to_a_map() -> None:
    with pytest.raises(JobDefinitionError, match="map state"):
        StateDescriptor("s", "value", "n long", key_schema="k long")


def test_a_tuple_given_to_a_single_array_column_is_always_a_row() -> None:
    codec = ValueCodec(parse_schema("a array<int>"), "state 's'")
    assert codec.decode(codec.encode(([1, 2],))) == [1, 2]
    for refused in ((1,), (1, 2)):
        with pytest.raises(SchemaError):
            codec.encode(refused)
