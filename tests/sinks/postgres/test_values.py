"""Values of every type arrive in PostgreSQL as they were, in tables of ours and of the users."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import JobDefinitionError, StorageRefusedError
from strandline.sinks.postgres.sink import PostgresSink
from strandline.sinks.tables import quoted
from strandline.testing.sink import SinkJob, a_context
from strandline_bench.servers.postgres import Schema
from tests.sinks.values import check_staged, stage_table


def a_job(schema: Schema, folder: Path, columns: pa.Schema, table: str = "visits", **options: Any) -> SinkJob:
    context = replace(a_context(folder / "checkpoints"), schema=columns, keys=())
    options = {"schema": schema.name, **options}
    return SinkJob(PostgresSink(schema.uri, table, **options).bound(context), context)


def write(job: SinkJob, table: pa.Table, rows: int = 100_000) -> None:
    driver = job.start()
    stage_table(driver, table, rows)
    driver.publish(driver.complete())


TEXTS = ["", " ", "NULL", "\\N", "\\.", "a\n\\.\nb", 'a"b""', ",", "\r\n", "\t\\t", "'", "grüße 🐘", "\x01", "\ufeff"]
VALUES: list[tuple[pa.DataType, list[Any], str]] = [
    (pa.bool_(), [True, False], "boolean"),
    (pa.int8(), [127, -128], "smallint"),
    (pa.int16(), [2**15 - 1, -(2**15)], "smallint"),
    (pa.int32(), [2**31 - 1, -(2**31)], "integer"),
    (pa.int64(), [2**63 - 1, -(2**63)], "bigint"),
    (pa.uint64(), [2**64 - 1, 0], "numeric(20,0)"),
    (pa.float32(), [0.5, -0.0, float("inf")], "real"),
    (pa.float64(), [0.1, 1e-300, 5e-324, 1.7976931348623157e308, float("-inf")], "double precision"),
    (pa.string(), TEXTS, "text"),
    (pa.large_string(), TEXTS, "text"),
    (pa.binary(), [b"", b"\0\xff\\x", bytes(range(256))], "bytea"),
    (pa.decimal128(10, 2), [Decimal("12345678.90"), Decimal("-0.01")], "numeric(10,2)"),
    (
        pa.decimal128(38, 18),
        [Decimal("0"), Decimal("1e-18"), Decimal("-9876543210.5")],
        "numeric(38,18)",
    ),
    (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)], "date"),
    (pa.time64("us"), [time(0), time(23, 59, 59, 999_999)], "time without time zone"),
    (pa.timestamp("us"), [datetime(1, 1, 1), datetime(2026, 3, 29, 2, 30)], "timestamp without time zone"),
    (
        pa.timestamp("us", "Europe/Berlin"),
        [
            datetime(1900, 1, 1, tzinfo=UTC),
            datetime(2026, 10, 25, 0, 30, 0, 1, UTC),
            datetime(9999, 1, 1, tzinfo=UTC),
        ],
        "timestamp with time zone",
    ),
    (pa.duration("us"), [timedelta(hours=-30, microseconds=1), timedelta(0)], "interval"),
    (pa.list_(pa.int64()), [[1, None], []], "jsonb"),
    (pa.struct([("a", pa.string()), ("b", pa.list_(pa.float64()))]), [{"a": 'x"\n', "b": [0.5]}], "jsonb"),
    (pa.map_(pa.string(), pa.bool_()), [[("a", True), ("b", None)]], "jsonb"),
]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(("kind", "values", "type_"), VALUES, ids=[f"{kind}" for kind, *_ in VALUES])
def test_values_arrive_as_they_were(
    postgres_schema: Schema, tmp_path: Path, kind: pa.DataType, values: list[Any], type_: str, mode: str
) -> None:
    options: dict[str, Any] = {"mode": mode, "keys": ["n"]} if mode == "upsert" else {}
    job = a_job(postgres_schema, tmp_path, pa.schema([("n", pa.int64()), ("v", kind)]), **options)
    values = [None, *values, None]
    write(job, pa.table({"n": range(len(values)), "v": pa.array(values, kind)}), rows=2)
    assert postgres_schema.query(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'visits'::regclass AND attname = 'v'"
    ) == [(type_,)]
    found = [value for (value,) in postgres_schema.query("SELECT v FROM visits ORDER BY n")]
    expected = [dict(value) if pa.types.is_map(kind) and value else value for value in values]
    assert [*map(repr, found)] == [*map(repr, expected)] if pa.types.is_floating(kind) else found == expected
    job.start()


def test_what_python_compares_unlike_postgres(postgres_schema: Schema, tmp_path: Path) -> None:
    """NaN, values inside JSON, and a table with one column, whose NULL is an empty line."""
    job = a_job(postgres_schema, tmp_path, pa.schema([("v", pa.float64())]), "floats")
    write(job, pa.table({"v": pa.array([None, float("nan"), None])}))
    assert postgres_schema.query("SELECT v::text FROM floats") == [(None,), ("NaN",), (None,)]
    kind = pa.struct([("d", pa.decimal128(38, 18)), ("t", pa.timestamp("us", "UTC")), ("b", pa.binary())])
    value = {"d": Decimal("1" * 20 + "." + "1" * 18), "t": datetime(2026, 1, 2, tzinfo=UTC), "b": b"\0\1"}
    job = a_job(postgres_schema, tmp_path, pa.schema([("v", kind)]), "nested")
    write(job, pa.table({"v": pa.array([value], kind)}))
    [(digits, when, binary)] = postgres_schema.query(
        "SELECT (v ->> 'd')::numeric, (v ->> 't')::timestamptz, decode(v ->> 'b', 'base64') FROM nested"
    )
    assert (digits, when, binary) == tuple(value.values())


def test_the_ends_of_time_inside_of_a_value_are_written_in_utc(postgres_schema: Schema, tmp_path: Path) -> None:
    """Python has no dates for them in the time zone of the session."""
    kinds = [pa.timestamp("us", zone) for zone in ("Asia/Tokyo", "America/New_York")]
    inner = pa.struct([("at", pa.list_(kinds[0])), ("by", pa.map_(pa.string(), kinds[1]))])
    job = a_job(postgres_schema, tmp_path, pa.schema([("v", inner)]))
    at = pa.array([[253_402_300_799_999_999, None]], pa.list_(pa.int64())).cast(inner.field("at").type)
    first = pa.array([-62_135_596_800_000_000]).cast(kinds[1])
    by = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a"]), first)
    write(job, pa.table({"v": pa.StructArray.from_arrays([at, by], fields=list(inner))}))
    expected = {"at": ["9999-12-31T23:59:59.999999Z", None], "by": {"a": "0001-01-01T00:00:00Z"}}
    assert postgres_schema.query("SELECT v FROM visits") == [(expected,)]


@pytest.mark.parametrize(
    "value",
    [
        pa.array([[253_402_300_800_000_000]], pa.list_(pa.int64())).cast(pa.list_(pa.timestamp("us"))),
        pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
    ],
)
def test_a_value_that_json_cannot_hold_ends_the_run(postgres_schema: Schema, tmp_path: Path, value: pa.Array) -> None:
    """The year 10000, and a map with a key twice."""
    driver = a_job(postgres_schema, tmp_path, pa.schema([("v", value.type)])).start()
    stage_table(driver, pa.table({"v": value}))
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=r"column 'v' has a value that cannot be written as JSON.*restore="):
        driver.publish(metadata)
    check_staged(driver, metadata)


def test_texts_go_into_columns_of_other_types_that_users_made(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query(
        """CREATE TYPE colour AS ENUM ('red', 'blue'); CREATE DOMAIN few AS numeric(12, 1);
        CREATE TABLE visits (u uuid, j jsonb, e colour, i inet, c char(3), n few, b numeric(30), d text[] DEFAULT '{}');
        SELECT 1""",
    )
    schema = pa.schema([*((name, pa.string()) for name in "ujeic"), ("n", pa.decimal128(5, 1)), ("b", pa.int64())])
    job = a_job(postgres_schema, tmp_path, schema)
    key = "6a2f41a3-c54c-fce8-32d2-0324e1c32e22"
    row = dict(zip("ujeicnb", (key, '{"a": [1]}', "red", "10.0.0.1", "ab", Decimal("1.5"), 7), strict=True))
    write(job, pa.Table.from_pylist([row], schema))
    found = postgres_schema.query("SELECT u, j, e::text, host(i), c, n, b, d FROM visits")
    assert found == [(UUID(key), {"a": [1]}, "red", "10.0.0.1", "ab ", Decimal("1.5"), 7, [])]


def test_awkward_names_are_taken_as_they_are(postgres_schema: Schema, tmp_path: Path) -> None:
    names = ['a"b', "select", "x y", "ü", "%s", "number", "number_", "$1", "{}", "A", "a", "n" * 63]
    awkward = replace(postgres_schema, name=f'my %s "{postgres_schema.name}"')
    postgres_schema.query(f"CREATE SCHEMA {quoted(awkward.name)}")
    columns = pa.schema([(name, pa.int64()) for name in names])
    for mode, keys in (("append", []), ("upsert", names[:5])):
        table = f'my %(x)s "table"; DROP {mode}'
        job = a_job(awkward, tmp_path / mode, columns, table, mode=mode, keys=keys)
        for _ in range(2):
            write(job, pa.table({name: [1, 2] for name in names}))
        found = postgres_schema.query(f"SELECT * FROM {quoted(awkward.name)}.{quoted(table)}")
        assert sorted(found) == sorted([(1,) * 12, (2,) * 12] * (2 if mode == "append" else 1))


def test_null_is_a_key_like_any_other(postgres_schema: Schema, tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int64()), ("n", pa.int64())])
    job = a_job(postgres_schema, tmp_path, schema, mode="upsert", keys=["b", "a"])
    rows = [(None, 1, 1), ("x", None, 2), (None, None, 3), ("x", 1, 4), (None, 1, 5)]
    for more in (0, 10):
        driver = job.start()
        records = [dict(zip("abn", (a, b, n + more), strict=True)) for a, b, n in rows]
        stage_table(driver, pa.Table.from_pylist(records, schema))
        driver.publish(driver.complete())
    found = postgres_schema.query("SELECT a, b, n FROM visits ORDER BY n")
    assert found == [("x", None, 12), (None, None, 13), ("x", 1, 14), (None, 1, 15)]


def test_an_upsert_of_keys_alone_keeps_each_once(postgres_schema: Schema, tmp_path: Path) -> None:
    job = a_job(postgres_schema, tmp_path, pa.schema([("a", pa.string())]), mode="upsert", keys=["a"])
    write(job, pa.table({"a": ["x", "y", "x"]}))
    write(job, pa.table({"a": ["y", "z"]}))
    assert sorted(postgres_schema.query("SELECT a FROM visits")) == [("x",), ("y",), ("z",)]


def test_an_upsert_leaves_other_columns_and_rows_alone(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query(
        """CREATE TABLE visits
        (id int GENERATED ALWAYS AS IDENTITY, k text PRIMARY KEY, n int, note text DEFAULT '-');
        INSERT INTO visits (k, n, note) VALUES ('a', 1, 'mine'), ('z', 9, 'theirs')"""
    )
    schema = pa.schema([("n", pa.int32()), ("k", pa.string())])
    job = a_job(postgres_schema, tmp_path, schema, mode="upsert", keys=["k"])
    write(job, pa.table({"n": pa.array([2, 3], pa.int32()), "k": ["a", "b"]}))
    found = postgres_schema.query("SELECT k, n, note FROM visits ORDER BY k")
    assert found == [("a", 2, "mine"), ("b", 3, "-"), ("z", 9, "theirs")]


@pytest.mark.parametrize(
    ("kind", "value", "column", "match"),
    [
        (pa.string(), "a\0b", "text", r"column 'v' holds the character NUL.*restore="),
        (pa.list_(pa.string()), ["a\0b"], "jsonb", r"unsupported Unicode escape sequence"),
        (pa.string(), "abcd", "varchar(3)", r"too long for type character varying\(3\); column v\."),
        (pa.string(), "no uuid", "uuid", r"invalid input syntax for type uuid.*column v\."),
        (pa.string(), "x", "text CHECK (v <> 'x')", r"violates check constraint"),
        (pa.string(), None, "text NOT NULL", r"null value in column"),
        (pa.int64(), 1, "bigint REFERENCES known (id)", r"violates foreign key constraint"),
        (pa.date32(), -(10**6), "date", r"\"-0768-.*column v\."),  # before Christ: Spark has no such dates
    ],
)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_value_that_the_database_refuses_ends_the_run_and_stays_staged(
    postgres_schema: Schema, tmp_path: Path, kind: pa.DataType, value: Any, column: str, match: str, mode: str
) -> None:
    postgres_schema.query(
        f"CREATE TABLE known (id int8 PRIMARY KEY);CREATE TABLE visits (n int8 UNIQUE NOT NULL, v {column})"
    )
    schema = pa.schema([("n", pa.int64()), ("v", kind)])
    driver = a_job(postgres_schema, tmp_path, schema, mode=mode, keys=["n"] if mode == "upsert" else ()).start()
    stage_table(driver, pa.table({"n": [1], "v": pa.array([value], kind)}))
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=match):
        driver.publish(metadata)
    check_staged(driver, metadata)
    assert postgres_schema.query("SELECT * FROM visits") == []


def test_a_text_that_is_no_utf8_is_refused(postgres_schema: Schema, tmp_path: Path) -> None:
    driver = a_job(postgres_schema, tmp_path, pa.schema([("v", pa.string())])).start()
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    stage_table(driver, pa.table({"v": broken}))
    with pytest.raises(StorageRefusedError, match="column 'v' cannot be stored"):
        driver.publish(driver.complete())


def test_a_huge_value_arrives(postgres_schema: Schema, tmp_path: Path) -> None:
    schema = pa.schema([("t", pa.string()), ("b", pa.binary())])
    size = 20_000_000
    write(a_job(postgres_schema, tmp_path, schema), pa.table({"t": ['"x\n,' * (size // 4)], "b": [b"\0" * size]}))
    assert postgres_schema.query("SELECT length(t), length(b) FROM visits") == [(size, size)]


def test_a_type_without_a_column_is_refused_with_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobDefinitionError, match=r"no type for the column 'v' \(duration\[ns\]\); cast it"):
        a_job(Schema("public", "postgresql://u@host/db"), tmp_path, pa.schema([("v", pa.duration("ns"))]))
