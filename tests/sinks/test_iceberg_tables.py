"""`IcebergSink` and the tables that people have: their types, partitions, other writers, and catalogues that fail."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField, StringType, TimestamptzType

from strandline.errors import (
    ConfigError,
    IncompatibleCheckpointError,
    JobDefinitionError,
    SinkError,
    SinkFilesMissingError,
    StorageError,
    StorageRefusedError,
)
from strandline.runtime.driver.restore.former_sinks import check_former_sinks
from strandline.sinks.base import SinkContext
from strandline.sinks.iceberg import catalogues
from strandline.sinks.iceberg.commits import MovedError, SnapshotCommit, marker_key
from strandline.sinks.iceberg.loading import matches
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.sinks.iceberg.target import IcebergTarget
from strandline.sinks.marked import Marker
from strandline.sinks.names import target_description
from strandline.storage import open_storage
from strandline.testing.sink import SinkDriver, SinkJob
from tests.iceberg_java import IcebergJava
from tests.s3 import BUCKET, KEYS
from tests.waiting import wait_until

NAME = "sales.visits"
VISITS = pa.schema([("user", pa.string()), ("n", pa.int64())])


@dataclass
class Visits:
    """A table in a catalogue of its own, and a job that writes into it."""

    folder: Path
    catalog: dict[str, str]
    schema: pa.Schema = VISITS
    name: str = NAME
    storage_options: dict[str, str] | None = None

    def catalogue(self) -> Catalog:
        properties = dict(self.catalog)
        return load_catalog(properties.pop("name", "default"), **properties)

    def table(self) -> Table:
        return self.catalogue().load_table(self.name)

    def make(self, columns: Schema | pa.Schema, **options: Any) -> Table:
        catalogue = self.catalogue()
        catalogue.create_namespace_if_not_exists(self.name.split(".", maxsplit=1)[0])
        return catalogue.create_table(self.name, columns, **options)

    def job(self, **options: Any) -> SinkJob:
        keys = tuple(options.get("keys", self.schema.names[:1]))
        given = self.storage_options or {}
        context = SinkContext("visits", self.schema, str(self.folder / "checkpoints"), keys, given)
        return SinkJob(IcebergSink(self.name, self.catalog, **options).bound(context), context)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table().scan().to_arrow().to_pylist()
        return sorted(found, key=repr)

    def files(self) -> list[str]:
        """All files in the warehouse."""
        return [path.name for path in (self.folder / "warehouse").rglob("*") if path.is_file()]


@pytest.fixture
def visits(tmp_path: Path) -> Visits:
    return Visits(tmp_path, sql(tmp_path))


@pytest.fixture
def rest_visits(tmp_path: Path, iceberg_java: IcebergJava) -> Visits:
    return Visits(tmp_path, iceberg_java.catalogue, name=f"ns{uuid4().hex[:8]}.visits")


def sql(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalogue.db", "warehouse": f"file://{folder}/warehouse"}


def stage(driver: SinkDriver, *rows: pa.Table) -> None:
    """One batch with a task for each of the tables."""
    driver.batches += 1
    stager = pickle.loads(pickle.dumps(driver.job.sink.stager(driver.job.context)))
    for partition, some in enumerate(rows):
        driver.staged += stager.stage(iter(some.to_batches()), driver.batch, partition)


def write(driver: SinkDriver, *rows: pa.Table) -> None:
    """One batch, and a checkpoint that covers it."""
    stage(driver, *rows)
    driver.publish(driver.complete())


def some(*rows: tuple[Any, ...], schema: pa.Schema = VISITS) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def as_dicts(*rows: tuple[Any, ...], schema: pa.Schema = VISITS) -> list[dict[str, Any]]:
    return sorted((dict(zip(schema.names, row, strict=True)) for row in rows), key=repr)


# --- types ----------------------------------------------------------------------------------------

ALL_TYPES = pa.schema(
    [
        ("long", pa.int64()),
        ("byte", pa.int8()),
        ("short", pa.int16()),
        ("int", pa.int32()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("instant", pa.timestamp("us", "UTC")),
        ("elsewhere", pa.timestamp("us", "Europe/Berlin")),
        ("local", pa.timestamp("us")),
        ("small", pa.decimal128(5, 2)),
        ("large", pa.decimal128(38, 18)),
        ("list", pa.list_(pa.string())),
        ("struct", pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.string())])))])),
        ("map", pa.map_(pa.string(), pa.list_(pa.int64()))),
        ("a.b", pa.int64()),
        ("ünï çode", pa.string()),
        ('quo"te', pa.string()),
        ("select", pa.string()),
        ("1st/2nd", pa.string()),
    ]
)
NOON = datetime(2026, 3, 1, 12, 0, 0, 123456)
FULL = (
    *(2**63 - 1, -128, 32767, -(2**31), 0.5, float("inf"), True, "", b"\x00\xff", date(1583, 1, 1)),
    *(NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=UTC), NOON, Decimal("-999.99"), Decimal("12345678901234567890.5")),
    *(["x", None, ""], {"a": 1, "b": [{"c": "d"}, None]}, [("k", [1, None]), ("l", None)]),
    *(5, "ü\n\U0001f600", "'\"", "from", "half"),
)


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_values_of_all_types_come_back(visits: Visits, iceberg_java: IcebergJava, mode: str) -> None:
    visits.schema = ALL_TYPES
    driver = visits.job(mode=mode).start()
    empty = tuple(None for _ in ALL_TYPES)
    write(driver, some(FULL, empty, schema=ALL_TYPES))
    if mode == "upsert":
        write(driver, some((3, *FULL[1:]), empty, schema=ALL_TYPES))
        write(driver, some(FULL, (3, *empty[1:]), schema=ALL_TYPES))
        visits.table().delete("long = 3")
    found = {row["long"]: row for row in visits.rows()}
    assert found == {row["long"]: row for row in some(FULL, empty, schema=ALL_TYPES).to_pylist()}
    columns = ["long", "text", "bytes", "day", "instant", "local", "large", "list", "struct", "map", "a.b", "ünï çode"]
    java = iceberg_java.rows(visits.table().metadata_location, *columns)
    java.sort(key=lambda row: row[0] is None)
    assert java[1:] == [(None,) * len(columns)]
    assert java[0][:2] == (2**63 - 1, "")
    assert java[0][2:7] == (
        "00ff",
        "1583-01-01",
        "2026-03-01T12:00:00.123456Z",
        "2026-03-01T12:00:00.123456",
        "12345678901234567890.500000000000000000",
    )
    assert java[0][7] == "[x, null, ]"
    assert java[0][10:] == (5, "ü\n\U0001f600")


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.month_day_nano_interval(), pa.null()])
def test_a_type_that_iceberg_does_not_have_is_refused_where_the_sink_is_put_into_the_job(
    visits: Visits, kind: pa.DataType
) -> None:
    visits.schema = pa.schema([("n", pa.int64()), ("odd", kind)])
    with pytest.raises(JobDefinitionError, match=r"odd.*cast it in a transform"):
        visits.job()


@pytest.mark.parametrize("kind", [pa.struct([("a", pa.int64())]), pa.list_(pa.int64())])
def test_an_upsert_by_a_nested_column_is_refused_where_the_sink_is_put_into_the_job(
    visits: Visits, kind: pa.DataType
) -> None:
    visits.schema = pa.schema([("k", kind), ("n", pa.int64())])
    with pytest.raises(JobDefinitionError, match=r"key column 'k' is of type .*cannot be the key of an upsert"):
        visits.job(mode="upsert")
    visits.job().start()


@pytest.mark.parametrize("kind", [pa.struct([("a", pa.int64())]), pa.list_(pa.int64())])
def test_a_partitioning_by_a_nested_column_is_refused_where_the_sink_is_put_into_the_job(
    visits: Visits, kind: pa.DataType
) -> None:
    visits.schema = pa.schema([("k", kind), ("n", pa.int64())])
    with pytest.raises(JobDefinitionError, match=r"partition_by=\['k'\]: 'k' is of type .*a plain type"):
        visits.job(partition_by=["k"])


def test_a_damaged_description_of_the_table_is_named_in_the_task_and_written_anew_at_the_next_start(
    visits: Visits,
) -> None:
    driver = visits.job().start()
    job = driver.job
    path = Path(job.context.checkpoint_dir, target_description(job.context.job, job.sink.place))
    path.write_text("{")
    with pytest.raises(StorageError, match=rf"{path}, where the driver describes the table of .* is damaged"):
        stage(driver, some(("a", 1)))
    again = job.start()
    write(again, some(("b", 2)))
    assert visits.rows() == as_dicts(("b", 2))


@pytest.mark.slow
def test_a_million_rows_and_a_large_value(visits: Visits) -> None:
    driver = visits.job().start()
    rows = pa.table({"user": pa.array([f"u{n % 1000}" for n in range(1_000_000)]), "n": range(1_000_000)})
    write(driver, rows.cast(VISITS))
    write(driver, some(("x" * (64 << 20), 1)))
    table = visits.table().scan().to_arrow()
    assert table.num_rows == 1_000_001
    assert max(len(user) for user in table["user"].to_pylist()) == 64 << 20


# --- tables that are there already ----------------------------------------------------------------


def columns(*fields: tuple[str, Any, bool]) -> Schema:
    return Schema(*(NestedField(at, name, kind, required) for at, (name, kind, required) in enumerate(fields, 1)))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (columns(("user", StringType(), False)), "there is no column 'n'"),
        (
            columns(("user", StringType(), False), ("n", IntegerType(), False)),
            "'n' is of type int.*the rows have int64",
        ),
        (columns(("user", LongType(), False), ("n", LongType(), False)), "'user' is of type long.*have string"),
        (
            columns(("user", StringType(), False), ("n", LongType(), False), ("at", LongType(), True)),
            "'at' is required, and the rows do not have it",
        ),
    ],
)
def test_a_table_that_cannot_take_the_rows_is_refused_before_the_takeover(
    visits: Visits, found: Schema, says: str
) -> None:
    visits.make(found)
    job = visits.job()
    with pytest.raises(IncompatibleCheckpointError, match=says):
        job.start()
    assert job.log.generation == 0
    assert visits.table().metadata.current_snapshot_id is None


def test_a_table_may_have_more_columns_and_wider_ones_in_another_order(
    visits: Visits, iceberg_java: IcebergJava
) -> None:
    visits.schema = pa.schema([("user", pa.string()), ("n", pa.int32()), ("x", pa.float32())])
    fields = (
        ("more", StringType(), False),
        ("x", DoubleType(), False),
        ("n", LongType(), True),
        ("user", StringType(), False),
    )
    visits.make(columns(*fields))
    driver = visits.job().start()
    write(driver, some(("a", 1, 0.5), schema=visits.schema))
    assert visits.rows() == [{"more": None, "x": 0.5, "n": 1, "user": "a"}]
    assert iceberg_java.rows(visits.table().metadata_location, "user", "n", "x", "more") == [("a", 1, 0.5, None)]
    with pytest.raises(StorageRefusedError, match=r"'n' is required, and 1 of 2 rows have null there"):
        write(driver, some(("b", 2, 0.5), ("c", None, 0.5), schema=visits.schema))


def test_a_column_that_is_renamed_while_rows_are_staged_gets_them(visits: Visits) -> None:
    driver = visits.job().start()
    write(driver, some(("a", 1)))
    stage(driver, some(("b", 2)))
    visits.table().update_schema().rename_column("n", "count").commit()
    driver.publish(driver.complete())
    assert visits.rows() == [{"user": "a", "count": 1}, {"user": "b", "count": 2}]
    with pytest.raises(IncompatibleCheckpointError, match="no column 'n'"):
        driver.job.start()


@pytest.mark.parametrize("column", ["user", "n"])
@pytest.mark.parametrize("renamed", [False, True])
def test_an_upsert_says_which_column_somebody_took_away(visits: Visits, column: str, renamed: bool) -> None:
    driver = visits.job(mode="upsert").start()
    write(driver, some(("a", 1)))
    update = visits.table().update_schema(allow_incompatible_changes=True)
    (update.rename_column(column, "other") if renamed else update.delete_column(column)).commit()
    stage(driver, some(("b", 2)))
    metadata = driver.complete()
    with pytest.raises(IncompatibleCheckpointError, match=f"there is no column '{column}'"):
        driver.publish(metadata)
    if renamed:
        visits.table().update_schema().rename_column("other", column).commit()
        driver.publish(metadata)
        assert visits.rows() == as_dicts(("a", 1), ("b", 2))


def test_rows_go_into_the_partitions_of_the_table(visits: Visits, iceberg_java: IcebergJava) -> None:
    visits.schema = pa.schema([("user", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    spec = PartitionSpec(
        PartitionField(3, 1000, DayTransform(), "day"),
        PartitionField(2, 1001, BucketTransform(4), "bucket"),
        PartitionField(1, 1002, TruncateTransform(1), "letter"),
    )
    at = TimestamptzType()
    visits.make(
        columns(("user", StringType(), False), ("n", LongType(), False), ("at", at, False)), partition_spec=spec
    )
    driver = visits.job().start()
    days = [datetime(2026, 3, day, 23, 59, tzinfo=UTC) for day in (1, 2)]
    rows = [(f"{letter}{n}", n, days[n % 2]) for letter in "ab" for n in range(20)] + [(None, None, None)]
    write(driver, some(*rows[:20], schema=visits.schema), some(*rows[20:], schema=visits.schema))
    assert visits.rows() == as_dicts(*rows, schema=visits.schema)
    table = visits.table()
    only = table.scan(row_filter="at >= '2026-03-02T00:00:00+00:00' and user = 'a3'")
    assert [row["n"] for row in only.to_arrow().to_pylist()] == [3]
    assert len(list(only.plan_files())) == 1
    assert len(iceberg_java.rows(table.metadata_location, "user", "n")) == 41
    partitions = {_values(task.file) for task in table.scan().plan_files()}
    assert (None, None, None) in partitions
    assert {day for day, _bucket, _letter in partitions} == {None, 20513, 20514}


def _values(file: DataFile) -> tuple[Any, ...]:
    return tuple(file.partition[at] for at in range(len(file.partition)))


def test_rows_that_are_staged_while_the_table_is_partitioned_anew_get_there(visits: Visits) -> None:
    driver = visits.job().start()
    write(driver, some(("a", 1)))
    stage(driver, some(("b", 2), ("c", 3)))
    visits.table().update_spec().add_field("user", IdentityTransform()).commit()
    driver.publish(driver.complete())
    write(driver, some(("d", 4), ("e", 5)))
    assert visits.rows() == as_dicts(("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5))
    specs = sorted(task.file.spec_id for task in visits.table().scan().plan_files())
    assert specs == [0, 1, 1, 1, 1]


def test_a_table_that_was_made_anew_does_not_get_rows_of_the_one_before(visits: Visits) -> None:
    driver = visits.job().start()
    stage(driver, some(("a", 1)))
    metadata = driver.complete()
    visits.catalogue().drop_table(NAME)
    with pytest.raises(SinkError, match="lost the marker"):
        driver.publish(metadata)
    visits.make(columns(("n", LongType(), False), ("user", StringType(), False)))
    with pytest.raises(SinkError, match="lost the marker"):
        driver.publish(metadata)


# --- other writers --------------------------------------------------------------------------------


def test_every_snapshot_names_its_job_and_its_checkpoint(visits: Visits) -> None:
    driver = visits.job().start()
    write(driver, some(("a", 1)))
    summary = visits.table().current_snapshot().summary  # type: ignore[union-attr]
    assert summary is not None
    assert (summary["strandline.job"], summary["strandline.checkpoint"]) == ("visits", "1")
    assert (summary["added-records"], summary["total-records"]) == ("1", "1")


def test_rows_of_others_and_of_other_jobs_stay(visits: Visits) -> None:
    driver = visits.job().start()
    other = visits.job()
    other.context = SinkContext("other", VISITS, str(visits.folder / "checkpoints"), ("user",))
    second = other.start()
    for n in range(3):
        write(driver, some(("ours", n)))
        visits.table().append(some(("theirs", n)))
        write(second, some(("other", n)))
    expected = as_dicts(*((user, n) for user in ("ours", "theirs", "other") for n in range(3)))
    assert visits.rows() == expected
    driver.job.start()
    other.start()
    assert visits.rows() == expected


def test_the_marker_outlives_its_snapshots(rest_visits: Visits, iceberg_java: IcebergJava) -> None:
    job = rest_visits.job()
    driver = job.start()
    write(driver, some(("a", 1)))
    write(driver, some(("b", 2)))
    rest_visits.table().append(some(("theirs", 3)))
    iceberg_java.keep_one_snapshot(*rest_visits.name.split("."))
    (left,) = rest_visits.table().snapshots()
    assert left.summary is not None
    assert left.summary.get(marker_key("visits")) is None
    write(driver, some(("c", 3)))
    again = job.start()
    write(again, some(("d", 4)))
    assert rest_visits.rows() == as_dicts(("a", 1), ("b", 2), ("theirs", 3), ("c", 3), ("d", 4))


def test_a_table_that_was_rolled_back_has_the_marker_of_that_time(visits: Visits) -> None:
    job = visits.job()
    driver = job.start()
    write(driver, some(("a", 1)))
    first = job.newest
    before = visits.table().metadata.current_snapshot_id
    assert before is not None
    write(driver, some(("b", 2)))
    write(driver, some(("c", 3)))
    visits.table().manage_snapshots().rollback_to_snapshot(before).commit()
    with pytest.raises(SinkFilesMissingError, match="had more rows"):
        job.start()
    assert first is not None
    again = job.start(first)
    write(again, some(("b", 2)))
    assert visits.rows() == as_dicts(("a", 1), ("b", 2))


def test_the_marker_outlives_snapshots_that_pyiceberg_expires(visits: Visits) -> None:
    """It leaves the oldest snapshot without a parent, as if the table began there."""
    job = visits.job()
    driver = job.start()
    write(driver, some(("a", 1)))
    visits.table().append(some(("theirs", 2)))
    table = visits.table()
    old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id != table.metadata.current_snapshot_id]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    (left,) = visits.table().snapshots()
    assert left.parent_snapshot_id is None
    write(driver, some(("b", 3)))
    write(job.start(), some(("c", 4)))
    assert visits.rows() == as_dicts(("a", 1), ("theirs", 2), ("b", 3), ("c", 4))


@pytest.mark.parametrize("expired", [False, True])
def test_a_table_that_was_rolled_back_to_a_snapshot_of_others_lacks_rows(
    rest_visits: Visits, iceberg_java: IcebergJava, expired: bool
) -> None:
    """The property of the table has the newest marker, whose rows are gone."""
    job = rest_visits.job()
    driver = job.start()
    write(driver, some(("a", 1)))
    rest_visits.table().append(some(("theirs", 2)))
    before = rest_visits.table().metadata.current_snapshot_id
    assert before is not None
    write(driver, some(("b", 3)))
    rest_visits.table().manage_snapshots().rollback_to_snapshot(before).commit()
    if expired:
        iceberg_java.keep_one_snapshot(*rest_visits.name.split("."))
    with pytest.raises((SinkError, SinkFilesMissingError), match=r"lost the marker|lost rows"):
        write(driver, some(("c", 4)))
    with pytest.raises(SinkFilesMissingError, match="had more rows"):
        job.start()
    assert rest_visits.rows() == as_dicts(("a", 1), ("theirs", 2))


def test_a_commit_on_an_old_state_of_the_table_changes_nothing(visits: Visits) -> None:
    driver = visits.job().start()
    target = driver.target
    assert isinstance(target, IcebergTarget)
    found = target.committed()
    assert found is not None
    old = visits.table()
    write(driver, some(("a", 1)))
    now = target.committed()
    commit = SnapshotCommit(old, Marker("visits", found.log_id, found.generation + 1))
    with pytest.raises(MovedError):
        commit.send(())
    assert target.committed() == now
    assert visits.table().snapshot_by_id(commit.attempt().snapshot) is None
    assert visits.rows() == as_dicts(("a", 1))


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_table_that_others_write_all_the_time_gets_all_rows(rest_visits: Visits, mode: str) -> None:
    job = rest_visits.job(mode=mode)
    driver = job.start()
    write(driver, some(("a", -1)))
    ended = threading.Event()
    theirs: list[tuple[str, int]] = []

    def disturb() -> None:
        while not ended.wait(0.2):
            rest_visits.table().append(some((f"theirs{len(theirs)}", len(theirs))))
            theirs.append((f"theirs{len(theirs)}", len(theirs)))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for n in range(6):
            stage(driver, some((f"k{n % 3}", n)))
            metadata = driver.complete()
            until_done(lambda metadata=metadata: driver.publish(metadata))  # type: ignore[misc]
            wait_until(lambda n=n: len(theirs) > n, what="a row of the other writer")  # type: ignore[misc]
    finally:
        ended.set()
        thread.join()
    ours: list[tuple[Any, ...]] = [("a", -1), *((f"k{n % 3}", n) for n in range(6))]
    expected = as_dicts(*(dict(ours).items() if mode == "upsert" else ours), *theirs)
    assert rest_visits.rows() == expected


# --- upserts --------------------------------------------------------------------------------------


def test_an_upsert_leaves_one_row_of_a_key_that_the_table_has_several_times(visits: Visits) -> None:
    visits.make(VISITS).append(some(("a", 1), ("a", 2), ("b", 3)))
    driver = visits.job(mode="upsert").start()
    driver.checkpoint([("a", 4)])
    assert visits.rows() == as_dicts(("a", 4), ("b", 3))


def test_upserts_replace_rows_by_several_keys_nulls_among_them(visits: Visits, iceberg_java: IcebergJava) -> None:
    visits.schema = pa.schema([("user", pa.string()), ("day", pa.date32()), ("n", pa.int64())])
    visits.make(visits.schema.append(pa.field("note", pa.string())))
    theirs = pa.table({"user": ["a", None], "day": [date(2026, 1, 1)] * 2, "n": [-1, -2], "note": ["kept", "kept"]})
    visits.table().append(theirs.cast(visits.table().schema().as_arrow()))
    driver = visits.job(mode="upsert", keys=["user", "day"]).start()
    chance = random.Random(3)
    users, days = ["a", "b", None], [date(2026, 1, day) for day in (1, 2, 3)] + [None]
    expected = {("a", date(2026, 1, 1)): (-1, "kept"), (None, date(2026, 1, 1)): (-2, "kept")}
    for checkpoint in range(6):
        rows = [(chance.choice(users), chance.choice(days), 100 * checkpoint + n) for n in range(5)]
        write(driver, some(*rows, schema=visits.schema))
        expected.update({(user, day): (n, None) for user, day, n in rows})  # type: ignore[misc]
    names = ["user", "day", "n", "note"]
    wanted = sorted(((user, day, n, note) for (user, day), (n, note) in expected.items()), key=repr)
    assert sorted((tuple(row[name] for name in names) for row in visits.rows()), key=repr) == wanted
    java = iceberg_java.rows(visits.table().metadata_location, "user", "n", "note")
    assert sorted(java, key=repr) == sorted(((user, n, note) for user, _day, n, note in wanted), key=repr)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_zeros_are_one_key_whatever_their_sign_and_so_are_all_nans(visits: Visits, kind: pa.DataType) -> None:
    visits.schema = pa.schema([("k", kind), ("n", pa.int64())])
    driver = visits.job(mode="upsert").start()
    other_nan = -np.float32("nan") if kind == pa.float32() else -np.float64("nan")
    for first in (0, 10):
        keys = pa.array(np.array([0.0, -0.0, np.nan, other_nan, 1.5], kind.to_pandas_dtype()))
        write(driver, pa.table({"k": keys, "n": range(first, first + 5)}).cast(visits.schema))
        write(driver, pa.table({"k": keys.slice(1, 1), "n": [first + 7]}).cast(visits.schema))
    assert sorted((repr(row["k"]), row["n"]) for row in visits.rows()) == [("-0.0", 17), ("1.5", 14), ("nan", 13)]


def test_an_upsert_leaves_files_without_its_keys_alone(visits: Visits) -> None:
    driver = visits.job(mode="upsert").start()
    write(driver, some(("a", 1), ("b", 1)))
    write(driver, some(("x", 1), ("y", 1)))
    before = {task.file.file_path for task in visits.table().scan().plan_files()}
    write(driver, some(("a", 2)))
    after = {task.file.file_path for task in visits.table().scan().plan_files()}
    assert len(before) == 2
    assert len(before & after) == 1
    assert visits.rows() == as_dicts(("a", 2), ("b", 1), ("x", 1), ("y", 1))


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_data_file_is_no_larger_than_the_table_says(visits: Visits, mode: str) -> None:
    driver = visits.job(mode=mode, properties={"write.target-file-size-bytes": "100000"}).start()
    chance = random.Random(1)
    rows = [(f"{chance.random()}", n) for n in range(150_000)]
    write(driver, some(*rows[:70_000]), some(*rows[70_000:]))
    sizes = [task.file.file_size_in_bytes for task in visits.table().scan().plan_files()]
    assert len(sizes) >= 2
    assert visits.rows() == as_dicts(*rows)


def test_keys_are_found_with_their_nulls() -> None:
    chance = random.Random(5)

    def table(rows: int) -> pa.Table:
        kinds = {"a": pa.string(), "b": pa.int64(), "c": pa.bool_()}
        values: dict[str, list[Any]] = {"a": ["x", "y", None], "b": [1, 2, None], "c": [True, False, None]}
        return pa.table({key: pa.array([chance.choice(values[key]) for _ in range(rows)], kinds[key]) for key in kinds})

    for _ in range(50):
        wanted, rows = table(chance.randrange(1, 12)), table(40)
        keys = ["a", "b", "c"][: chance.randrange(1, 4)]
        known = {tuple(row[key] for key in keys) for row in wanted.to_pylist()}
        expected = [tuple(row[key] for key in keys) in known for row in rows.to_pylist()]
        assert matches(rows, wanted, keys).to_pylist() == expected


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_commit_that_took_effect_and_is_reported_as_failed_keeps_its_files(
    visits: Visits, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A proxy, or a client of HTTP, repeats a request whose answer it has lost; the second time it is refused."""
    driver = visits.job(mode=mode).start()
    write(driver, some(("a", 1), ("b", 1)))
    lost: list[object] = []
    commit = SqlCatalog.commit_table

    def repeated(self: SqlCatalog, table: Table, *arguments: Any) -> Any:
        answer = commit(self, table, *arguments)
        if not lost:
            lost.append(answer)
            return commit(self, table, *arguments)
        return answer

    monkeypatch.setattr(SqlCatalog, "commit_table", repeated)
    write(driver, some(("b", 2)))
    assert lost
    kept = [("b", 1)] if mode == "append" else []
    assert visits.rows() == as_dicts(("a", 1), *kept, ("b", 2))
    write(driver.job.start(), some(("c", 3)))
    assert visits.rows() == as_dicts(("a", 1), *kept, ("b", 2), ("c", 3))


# --- storage and catalogues -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_table_in_an_object_store(tmp_path: Path, s3_endpoint: str, mode: str) -> None:
    catalog = {**sql(tmp_path), "warehouse": f"s3://{BUCKET}/{tmp_path.name}-{mode}"}
    options = {**KEYS, "endpoint": s3_endpoint}
    files = {
        "s3.endpoint": s3_endpoint,
        "s3.access-key-id": KEYS["access_key_id"],
        "s3.secret-access-key": KEYS["secret_access_key"],
        "s3.region": KEYS["region"],
    }
    visits = Visits(tmp_path, {**catalog, **files})
    driver = visits.job(mode=mode).start()  # the settings of the catalogue are those of the files
    write(driver, some(("a", 1), ("b", 2)))
    write(driver, some(("a", 3)))
    expected = as_dicts(("b", 2), ("a", 3), *([("a", 1)] if mode == "append" else []))
    assert visits.rows() == expected
    write(
        Visits(tmp_path, catalog).job(mode=mode, storage_options=options).start(restore=driver.job.newest),
        some(("c", 4)),
    )
    assert visits.rows() == sorted([*expected, {"user": "c", "n": 4}], key=repr)


def test_a_catalogue_that_is_down_or_frozen_is_waited_for(
    rest_visits: Visits, iceberg_java: IcebergJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = rest_visits.job().start()
    write(driver, some(("a", 1)))
    monkeypatch.setattr(catalogues, "ANSWER_SECONDS", 1.0)
    stage(driver, some(("b", 2)))
    metadata = driver.complete()
    iceberg_java.freeze()
    with pytest.raises(SinkError, match="Timeout"):
        driver.publish(metadata)
    with pytest.raises(SinkError, match="Timeout"):
        rest_visits.job().sink.target(driver.job.context).check_still_ours(driver.log)
    monkeypatch.setattr(catalogues, "ANSWER_SECONDS", 30.0)  # a server that wakes up or starts may be slow
    iceberg_java.thaw()
    driver.publish(metadata)
    stage(driver, some(("c", 3)))
    metadata = driver.complete()
    iceberg_java.kill()
    with pytest.raises(SinkError, match="Connection"):
        driver.publish(metadata)
    iceberg_java.start()
    driver.publish(metadata)
    assert rest_visits.rows() == as_dicts(("a", 1), ("b", 2), ("c", 3))


def test_a_catalogue_that_is_frozen_in_the_middle_of_commits_gets_every_row_once(
    rest_visits: Visits, iceberg_java: IcebergJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogues, "ANSWER_SECONDS", 0.5)
    chance = random.Random(9)
    driver = rest_visits.job().start()
    for n in range(6):
        stage(driver, some((f"u{n}", n)))
        metadata = driver.complete()
        frozen = threading.Timer(chance.uniform(0, 0.15), iceberg_java.freeze)
        thawed = threading.Timer(1.0, iceberg_java.thaw)
        frozen.start()
        thawed.start()
        until_done(lambda metadata=metadata: driver.publish(metadata))  # type: ignore[misc]
        frozen.join()
        thawed.join()
    assert rest_visits.rows() == as_dicts(*((f"u{n}", n) for n in range(6)))


def until_done(publish: Callable[[], None]) -> None:
    for _ in range(20):
        try:
            return publish()
        except SinkError:
            continue
    raise AssertionError("the commit never came through")


def test_a_metadata_file_that_is_cut_off_is_an_error_that_may_pass(visits: Visits) -> None:
    driver = visits.job().start()
    write(driver, some(("a", 1)))
    stage(driver, some(("b", 2)))
    metadata = driver.complete()
    file = Path(visits.table().metadata_location.removeprefix("file://"))
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(SinkError, match="ValidationError"):
        driver.publish(metadata)
    file.write_bytes(whole)
    driver.publish(metadata)
    assert visits.rows() == as_dicts(("a", 1), ("b", 2))


def test_rows_that_are_staged_for_a_sink_that_was_taken_out_of_the_job_are_missed(visits: Visits) -> None:
    driver = visits.job().start()
    stage(driver, some(("a", 1)))
    metadata = driver.complete()
    storage = open_storage(driver.job.context.checkpoint_dir)
    with pytest.raises(IncompatibleCheckpointError, match=r"1 rows for iceberg:default/sales\.visits"):
        check_former_sinks(metadata, {}, storage, {})
    driver.publish(metadata)
    check_former_sinks(metadata, {}, storage, {})


def test_secrets_are_neither_shown_nor_sent_to_tasks(visits: Visits) -> None:
    visits.catalog["s3.secret-access-key"] = "hunter2hunter2"
    visits.catalog["password"] = "swordfish42"
    job = visits.job()
    for thing in (job.sink, job.sink.place, job.sink.stager(job.context)):
        assert "hunter2" not in repr(thing)
        assert "swordfish" not in repr(thing)
    assert b"swordfish" not in pickle.dumps(job.sink.stager(job.context))
    assert b"sqlite:" not in pickle.dumps(job.sink.stager(job.context))


def test_a_warehouse_with_a_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visits = Visits(tmp_path, {**sql(tmp_path), "warehouse": "warehouse"})
    with pytest.raises(IncompatibleCheckpointError, match="absolute path or a URL"):
        visits.job().start()


def test_a_catalogue_that_nobody_configured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    context = SinkContext("visits", VISITS, str(tmp_path / "checkpoints"), ("user",))
    job = SinkJob(IcebergSink(NAME, "nowhere").bound(context), context)
    with pytest.raises(ConfigError, match=r"no catalogue 'nowhere'.*pyiceberg\.yaml"):
        job.start()


def test_a_configured_catalogue_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warehouse").mkdir()
    for key, value in sql(tmp_path).items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAPTOP__{key.upper()}", value)
    context = SinkContext("visits", VISITS, str(tmp_path / "checkpoints"), ("user",))
    sink = IcebergSink(NAME, "laptop").bound(context)
    assert sink.place == "iceberg:laptop/sales.visits"
    write(SinkJob(sink, context).start(), some(("a", 1)))
    assert load_catalog("laptop", **sql(tmp_path)).load_table(NAME).scan().to_arrow().num_rows == 1


@pytest.mark.parametrize(
    ("table", "options", "says"),
    [
        ("visits", {}, "with its namespace"),
        ("sales.", {}, "with its namespace"),
        (NAME, {"partition_by": ["day"]}, "partition_by"),
        (NAME, {"keys": ["user"]}, "keys= is for mode='upsert'"),
    ],
)
def test_wrong_options_are_refused(visits: Visits, table: str, options: dict[str, Any], says: str) -> None:
    visits.name = table
    context = SinkContext("visits", VISITS, str(visits.folder), ("user",))
    with pytest.raises(JobDefinitionError, match=says):
        IcebergSink(table, visits.catalog, **options).bound(context)


def test_without_its_library_the_sink_names_the_extra(visits: Visits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    with pytest.raises(ConfigError, match=r"strandline\[iceberg\]"):
        visits.job()


def test_nothing_is_left_of_commits_that_were_too_late(visits: Visits) -> None:
    driver = visits.job().start()
    write(driver, some(("a", 1)))
    snapshots: Iterator[int] = iter(range(3))
    for n in snapshots:
        visits.table().append(some(("theirs", n)))
        write(driver, some(("b", n)))
    staged = [name for name in visits.files() if name.endswith(".staged")]
    assert staged == []
    lists = [name for name in visits.files() if name.startswith("snap-")]
    assert len(lists) == len(visits.table().snapshots())
