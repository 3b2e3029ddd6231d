"""`SQLiteSink`: rows of a checkpoint and the marker in one transaction."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from strandline.errors import (
    IncompatibleCheckpointError,
    JobDefinitionError,
    SinkError,
    SinkFilesMissingError,
    StorageFullError,
    StorageRefusedError,
)
from strandline.sinks import sqlite
from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.sqlite import SQLiteSink
from strandline.testing.sink import Row, SinkContract, SinkJob, a_context
from tests.sinks.values import check_staged, stage_table


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement).fetchall()


def read(path: Path, table: str = "visits") -> list[Row]:
    if not query(path, f"SELECT 1 FROM sqlite_master WHERE name = '{table}'"):
        return []
    return query(path, f'SELECT "user", n FROM "{table}"')


class TestAppend(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return SQLiteSink(tmp_path / "target.db", "visits")

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, SQLiteSink)
        return read(Path(sink.path))


class TestUpsert(TestAppend):
    upserts = True

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return SQLiteSink(tmp_path / "target.db", "visits", mode="upsert")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "target.db"


def a_job(path: Path, schema: pa.Schema | None = None, table: str = "visits", **options: Any) -> SinkJob:
    context = a_context(path.parent / "checkpoints")
    if schema is not None:
        context = replace(context, schema=schema, keys=())
    return SinkJob(SQLiteSink(path, table, **options).bound(context), context)


# --- values --------------------------------------------------------------------------------------

VALUES: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.bool_(), [True, False], [1, 0]),
    (pa.int64(), [2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
    (pa.float64(), [0.1, float("inf")], [0.1, float("inf")]),
    (pa.float64(), [float("nan")], [None]),
    (pa.string(), ["", "grüße, \"x\" 'y'\n\t\\ \0 🐘"], ["", "grüße, \"x\" 'y'\n\t\\ \0 🐘"]),
    (pa.binary(), [b"", b"\0\xff"], [b"", b"\0\xff"]),
    (pa.decimal128(38, 18), [Decimal("0"), Decimal("-12345678901234567890.5")], ["0." + "0" * 18, None]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)], ["0001-01-01", "9999-12-31"]),
    (pa.time64("us"), [time(1, 2, 3, 4)], ["01:02:03.000004"]),
    (pa.timestamp("us"), [datetime(2026, 3, 1, 12)], ["2026-03-01 12:00:00.000000"]),
    (
        pa.timestamp("us", "Europe/Berlin"),
        [datetime(2026, 7, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))],
        ["2026-07-01 12:00:00.000000+00:00", "2026-01-01 00:00:00.000000+00:00"],
    ),
    (pa.duration("us"), [timedelta(days=1, microseconds=-3)], [86_399_999_997]),
    (pa.list_(pa.string()), [["a", None], []], ['["a",null]', "[]"]),
    (pa.map_(pa.string(), pa.int32()), [[("a", 1)]], ['{"a":1}']),
    (pa.map_(pa.int32(), pa.string()), [[(1, "x")]], ['[[1,"x"]]']),
]


@pytest.mark.parametrize(("kind", "values", "stored"), VALUES, ids=[str(kind) for kind, *_ in VALUES])
def test_values_are_stored_as_the_guide_says(path: Path, kind: pa.DataType, values: list[Any], stored: Any) -> None:
    job = a_job(path, pa.schema([("v", kind)]))
    driver = job.start()
    stage_table(driver, pa.table({"v": pa.array([*values, None], kind)}))
    driver.publish(driver.complete())
    found = [value for (value,) in query(path, "SELECT v FROM visits ORDER BY rowid")]
    assert found[-1] is None
    assert [a for a, b in zip(found, stored, strict=False) if b is not None] == [b for b in stored if b is not None]
    if pa.types.is_decimal(kind):
        assert [Decimal(value) for value in found[:-1]] == values


def test_json_in_a_nested_value_can_be_read_by_the_database(path: Path) -> None:
    kind = pa.struct([("d", pa.decimal128(20, 2)), ("b", pa.binary()), ("t", pa.timestamp("us", "UTC"))])
    job = a_job(path, pa.schema([("v", kind)]))
    driver = job.start()
    value = {"d": Decimal("123456789012345678.90"), "b": b"\0\1", "t": datetime(2026, 1, 2, tzinfo=UTC)}
    stage_table(driver, pa.table({"v": pa.array([value], kind)}))
    driver.publish(driver.complete())
    [(text, inside)] = query(path, "SELECT v, json_extract(v, '$.t') FROM visits")
    assert json.loads(text, parse_float=Decimal) == {**value, "b": "AAE=", "t": "2026-01-02T00:00:00Z"}
    assert inside == "2026-01-02T00:00:00Z"


def test_awkward_names_of_columns_and_tables_are_taken_as_they_are(path: Path) -> None:
    names = ['a"b', "select", "x y", "ü", "?1", "%s"]
    job = a_job(path, pa.schema([(name, pa.int64()) for name in names]), 'my "table"; DROP', mode="upsert", keys=names)
    driver = job.start()
    for _ in range(2):
        stage_table(driver, pa.table({name: [1, 2] for name in names}))
        driver.publish(driver.complete())
    assert query(path, 'SELECT * FROM "my ""table""; DROP"') == [(1,) * 6, (2,) * 6]
    job.start()


def test_an_upsert_takes_null_as_a_key_like_any_other(path: Path) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int64()), ("n", pa.int64())])
    job = a_job(path, schema, mode="upsert", keys=["a", "b"])
    driver = job.start()
    rows = [(None, 1, 1), ("x", None, 2), (None, None, 3), ("x", 1, 4), (None, 1, 5)]
    for more in (0, 10):
        table = pa.Table.from_pylist([dict(zip("abn", (a, b, n + more), strict=True)) for a, b, n in rows], schema)
        stage_table(driver, table)
        driver.publish(driver.complete())
    found = query(path, "SELECT a, b, n FROM visits ORDER BY n")
    assert found == [("x", None, 12), (None, None, 13), ("x", 1, 14), (None, 1, 15)]


def test_a_text_that_is_no_utf8_is_refused_and_stays_staged(path: Path) -> None:
    job = a_job(path, pa.schema([("n", pa.int64()), ("v", pa.string())]))
    driver = job.start()
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    stage_table(driver, pa.table({"n": [1], "v": broken}))
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=r"column 'v' cannot be stored.*UTF"):
        driver.publish(metadata)
    check_staged(driver, metadata)
    assert query(path, "SELECT * FROM visits") == []


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ('CREATE TABLE visits ("user" TEXT)', "no column 'n'.*ALTER TABLE"),
        ('CREATE TABLE visits ("user" TEXT, n TEXT)', "column 'n' is of type TEXT.*INTEGER"),
        ('CREATE TABLE visits ("user" DECIMAL, n INT)', "column 'user' is of type NUMERIC"),
        ('CREATE TABLE visits ("user" TEXT, n REAL)', "column 'n' is of type REAL"),
        ('CREATE TABLE visits ("user" TEXT, n INT, at TEXT NOT NULL)', "'at' must not be null"),
        ("CREATE VIEW visits AS SELECT 'a' AS \"user\", 1 AS n", "no table, but a view"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_the_takeover(path: Path, statement: str, match: str) -> None:
    query(path, statement)
    job = a_job(path)
    with pytest.raises(IncompatibleCheckpointError, match=match):
        job.start()
    assert job.log.generation == 0
    assert query(path, "SELECT name FROM sqlite_master WHERE name = 'strandline_markers'") == []


@pytest.mark.parametrize(
    "statement",
    [
        'CREATE TABLE visits (id INTEGER PRIMARY KEY NOT NULL, "USER" VARCHAR(9), N BIGINT)',
        'CREATE TABLE visits ("user" TEXT, n NUMERIC, at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)',
        'CREATE TABLE visits ("user" TEXT, n INTEGER) STRICT',
        'CREATE TABLE visits ("user", n)',
    ],
)
def test_a_table_of_the_users_that_fits_is_taken(path: Path, statement: str) -> None:
    query(path, statement)
    driver = a_job(path).start()
    driver.checkpoint([("007", 1)])
    assert read(path) == [("007", 1)]


def test_a_table_is_found_whatever_letters_of_its_name_are_capital(path: Path) -> None:
    query(path, "CREATE TABLE Visits (x INTEGER)")
    with pytest.raises(IncompatibleCheckpointError, match="no column 'user'"):
        a_job(path).start()


def test_an_upsert_needs_a_unique_index(path: Path) -> None:
    query(path, 'CREATE TABLE visits (n INTEGER, "user" TEXT)')
    query(path, 'CREATE UNIQUE INDEX part ON visits ("user") WHERE n > 0')
    query(path, 'CREATE UNIQUE INDEX both ON visits ("user", n)')
    job = a_job(path, mode="upsert")
    with pytest.raises(IncompatibleCheckpointError, match=r"no unique index on \['user'\].*CREATE UNIQUE INDEX"):
        job.start()
    query(path, 'CREATE UNIQUE INDEX whole ON visits ("user")')
    job.start().checkpoint([("a", 1), ("a", 2)])
    assert read(path) == [("a", 2)]


def test_a_table_that_somebody_dropped_is_missed(path: Path) -> None:
    job = a_job(path)
    job.start().checkpoint([("a", 1)])
    query(path, "DROP TABLE visits")
    with pytest.raises(SinkFilesMissingError, match="table is gone"):
        job.start()


@pytest.mark.parametrize("given", ["", ":memory:", "file:x.db?mode=memory"])
def test_a_database_that_is_no_file_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(JobDefinitionError, match="no file that outlives the driver"):
        SQLiteSink(given, "visits").bound(a_context(tmp_path))


@pytest.mark.parametrize("table", ["", "a\0b", "strandline_markers", "SQLITE_x"])
def test_a_table_that_cannot_be_made_is_refused(table: str, tmp_path: Path) -> None:
    with pytest.raises(JobDefinitionError, match="no name for a table"):
        SQLiteSink(tmp_path / "x.db", table).bound(a_context(tmp_path))


def test_two_spellings_of_a_table_are_one_place(path: Path) -> None:
    assert SQLiteSink(path, "Visits").place == SQLiteSink(path, "visits").place
    assert SQLiteSink(path, "Ü").place != SQLiteSink(path, "ü").place, "SQLite knows them as two tables"


def test_columns_that_differ_in_capital_letters_only_are_refused(tmp_path: Path) -> None:
    context = replace(a_context(tmp_path), schema=pa.schema([("a", pa.int64()), ("A", pa.int64())]), keys=())
    with pytest.raises(JobDefinitionError, match="'A' would be there twice"):
        SQLiteSink(tmp_path / "x.db", "visits").bound(context)


# --- the file ------------------------------------------------------------------------------------


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    job = a_job(tmp_path / "checkpoints" / "missing" / "x.db")
    with pytest.raises(StorageRefusedError, match=r"no folder .*missing"):
        job.start()
    assert job.log.generation == 0


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_text("no database, but long enough to look into" * 50)
    with pytest.raises(StorageRefusedError, match="is no SQLite database, and is left as it is"):
        a_job(path).start()


def test_a_database_that_is_read_only_is_refused_before_the_takeover(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(path)
    job.start().checkpoint([("a", 1)])
    # Tests may run as root, to whom every file is open.
    opened = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda name, **options: opened(f"file:{name}?mode=ro", uri=True, **options))
    with pytest.raises(StorageRefusedError, match=r"may not write the database: .*readonly.* write access to"):
        job.start()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_write_waits_for_another_writer_and_readers_are_never_in_the_way(path: Path, journal: str) -> None:
    query(path, f"PRAGMA journal_mode = {journal}")
    job = a_job(path)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("INSERT INTO visits VALUES ('other', 0)")
        later = threading.Timer(0.3, other.execute, ["COMMIT"])
        later.start()
        driver.checkpoint([("b", 2)])
        later.join()
    assert sorted(read(path)) == [("a", 1), ("b", 2), ("other", 0)]
    assert query(path, "PRAGMA journal_mode") == [(journal,)]


def test_a_writer_that_does_not_end_is_an_error_that_may_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.05)
    job = a_job(path)
    driver = job.start()
    driver.stage([("a", 1)])
    metadata = driver.complete()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkError, match=r"locked.*stands still, end it"):
            driver.publish(metadata)
        check_staged(driver, metadata)
    driver.publish(metadata)
    assert read(path) == [("a", 1)]


@pytest.fixture
def small(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Databases of forty pages at most."""

    class Small(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.execute("PRAGMA max_page_count = 40")

    opened = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda name, **options: opened(name, factory=Small, **options))
    yield
    monkeypatch.setattr(sqlite3, "connect", opened)


def test_a_full_disk_is_an_error_of_its_own_and_loses_nothing(path: Path, small: None) -> None:
    job = a_job(path)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    driver.stage([("x" * 1000, n) for n in range(1000)])
    metadata = driver.complete()
    with pytest.raises(StorageFullError, match="free some"):
        driver.publish(metadata)
    check_staged(driver, metadata)
    assert read(path) == [("a", 1)]


def test_a_row_that_a_constraint_refuses_stays_staged(path: Path) -> None:
    query(path, 'CREATE TABLE visits ("user" TEXT NOT NULL, n INTEGER CHECK (n < 10))')
    driver = a_job(path).start()
    driver.stage([("a", 1), ("b", 10)])
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=r"CHECK constraint failed.*stay staged"):
        driver.publish(metadata)
    check_staged(driver, metadata)
    assert read(path) == []


def test_two_jobs_write_to_one_table_and_each_has_its_marker(path: Path) -> None:
    context = a_context(path.parent / "other", job="other")
    other = SinkJob(SQLiteSink(path, "visits").bound(context), context)
    one = a_job(path).start()
    two = other.start()
    for number in range(3):
        one.checkpoint([("one", number)])
        two.checkpoint([("two", number)])
    assert sorted(read(path)) == sorted((name, number) for name in ("one", "two") for number in range(3))
