"""What happens around `DeltaSink`: other writers, maintenance of the table, tables that do not fit."""

from __future__ import annotations

import json
import shutil
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.schema import PrimitiveType

from strandline.errors import (
    ConfigError,
    DirectoryNotOursError,
    FencedError,
    IncompatibleCheckpointError,
    JobDefinitionError,
    MarkerMovedError,
    MetadataError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
    StrandlineError,
)
from strandline.sinks.base import SinkContext
from strandline.sinks.delta import target
from strandline.sinks.delta.access import delta_options
from strandline.sinks.delta.marker import application, commit_properties, read_marker
from strandline.sinks.delta.sink import DeltaSink
from strandline.sinks.delta.stager import FileFacts
from strandline.sinks.delta.target import DeltaTarget
from strandline.sinks.marked import Marker
from strandline.sinks.positions import with_positions
from strandline.testing.sink import SCHEMA, SinkDriver, SinkJob, a_context
from tests.sinks.delta import reader


def a_job(tmp_path: Path, schema: pa.Schema = SCHEMA, **options: Any) -> SinkJob:
    plain = a_context(tmp_path / "checkpoints")
    keys = tuple(name for name in plain.keys if name in schema.names)
    context = SinkContext(plain.job, schema, plain.checkpoint_dir, keys)
    return SinkJob(DeltaSink(str(tmp_path / "table"), **options).bound(context), context)


def stage(driver: SinkDriver, rows: pa.Table) -> None:
    """One batch, with one task, of any columns."""
    driver.batches += 1
    stager = driver.job.sink.stager(driver.job.context)
    driver.staged += stager.stage(iter(rows.to_batches()), driver.batch, 0)


def publish(driver: SinkDriver, rows: pa.Table) -> None:
    stage(driver, rows)
    driver.publish(driver.complete())


def marker_of(driver: SinkDriver) -> Marker:
    assert isinstance(driver.target, DeltaTarget)
    found = driver.target.committed()
    assert found is not None
    return found


def rows_in(table: Path) -> list[tuple[Any, ...]]:
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    return sorted((tuple(row.values()) for row in found), key=repr)


# --- the marker and other writers --------------------------------------------------------------------


@pytest.mark.parametrize("log_id", [None, "a", "1234567", "12345678", "ä" * 33, f"{'0f' * 16}-{'f0' * 16}"])
def test_a_marker_is_read_back_as_it_was_written(tmp_path: Path, log_id: str | None) -> None:
    marker = Marker("visits", log_id, 7, 3, (7 << 40) + 5)
    table = DeltaTable.create(tmp_path, schema=Schema.from_arrow(SCHEMA))
    assert read_marker(table, "visits", "here") is None
    for one in (msgspec.structs.replace(marker, log_id="longer" * 20), marker):
        table = DeltaTable(tmp_path)
        table.create_write_transaction([], "append", table.schema(), commit_properties=commit_properties(one))
        assert read_marker(DeltaTable(tmp_path), "visits", "here") == one
    assert read_marker(DeltaTable(tmp_path), "visit", "here") is None
    assert DeltaTable(tmp_path).history(1)[0]["strandline"] == msgspec.to_builtins(marker)


def test_a_commit_is_made_only_as_the_version_after_the_one_that_was_read(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, schema=Schema.from_arrow(SCHEMA))
    one, other = DeltaTable(tmp_path), DeltaTable(tmp_path)
    write_deltalake(one, pa.table({"user": ["x"], "n": [1]}, SCHEMA), mode="append")
    for marker in (Marker("visits", "l", 1), Marker("others", "l", 1)):
        with pytest.raises(CommitFailedError):
            other.create_write_transaction([], "append", other.schema(), commit_properties=commit_properties(marker))
        merge = other.merge(
            pa.table({"user": ["y"], "n": [1]}, SCHEMA),
            "s.n = t.n",
            "s",
            "t",
            commit_properties=commit_properties(marker),
        )
        with pytest.raises(CommitFailedError):
            merge.when_not_matched_insert_all().execute()
    assert DeltaTable(tmp_path).version() == 1


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_the_marker_outlives_what_others_do_to_the_table(tmp_path: Path, mode: str) -> None:
    job = a_job(tmp_path, mode=mode)
    table = tmp_path / "table"
    driver = job.start()
    driver.checkpoint([("a", 1)], [("b", 2)])
    driver.checkpoint([("c", 3)])
    marker = marker_of(driver)
    write_deltalake(table, pa.table({"user": ["x"], "n": [9]}, SCHEMA), mode="append")
    assert marker_of(driver) == marker
    DeltaTable(table).optimize.compact()
    assert marker_of(driver) == marker
    DeltaTable(table).alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 0 seconds", "delta.logRetentionDuration": "interval 0 days"}
    )
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    DeltaTable(table).create_checkpoint()
    DeltaTable(table).cleanup_metadata()
    newest = f"{DeltaTable(table).version():020d}.json"
    for file in (table / "_delta_log").glob("*.json"):
        if file.name < newest:
            file.unlink()  # whatever delta-rs has left
    assert len(DeltaTable(table).history()) == 1
    assert marker_of(driver) == marker
    driver.checkpoint([("d", 4)])
    job.start().checkpoint([("e", 5)])
    assert rows_in(table) == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("x", 9)]


def test_staged_rows_outlive_a_vacuum(tmp_path: Path) -> None:
    driver = a_job(tmp_path).start()
    driver.stage([("a", 1)])
    DeltaTable(tmp_path / "table").vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    driver.publish(driver.complete())
    assert rows_in(tmp_path / "table") == [("a", 1)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_writers_beside_us_lose_nothing_and_stop_nothing(tmp_path: Path, mode: str) -> None:
    job = a_job(tmp_path, mode=mode)
    table = tmp_path / "table"
    driver = job.start()
    done = threading.Event()
    written: list[int] = []

    def write() -> None:
        for number in range(40):
            write_deltalake(table, pa.table({"user": [f"x{number}"], "n": [number]}, SCHEMA), mode="append")
            written.append(number)
            if done.is_set():
                return

    other = threading.Thread(target=write)
    other.start()
    try:
        for number in range(8):
            driver.checkpoint([(f"u{number}", number)])
    finally:
        done.set()
        other.join()
    ours = [(f"u{number}", number) for number in range(8)]
    assert rows_in(table) == sorted([*ours, *((f"x{number}", number) for number in written)], key=repr)
    assert marker_of(driver).checkpoint == 8


def test_other_engines_see_the_job_as_an_application(tmp_path: Path) -> None:
    driver = a_job(tmp_path).start()
    driver.checkpoint([("a", 1)])
    assert DeltaTable(tmp_path / "table").transaction_version(application("visits")) == driver.batch
    assert reader.transactions(tmp_path / "table")["strandline/visits"] == driver.batch


def test_a_damaged_marker_stops_the_job(tmp_path: Path) -> None:
    driver = a_job(tmp_path).start()
    table = DeltaTable(tmp_path / "table")
    damaged = commit_properties(msgspec.structs.replace(marker_of(driver), generation=-1))
    table.create_write_transaction([], "append", table.schema(), commit_properties=damaged)
    with pytest.raises(DirectoryNotOursError, match="damaged marker"):
        driver.job.start()


def test_a_table_that_is_gone_is_missed(tmp_path: Path) -> None:
    driver = a_job(tmp_path).start()
    driver.checkpoint([("a", 1)])
    seen = marker_of(driver)
    shutil.rmtree(tmp_path / "table")
    driver.stage([("b", 2)])
    with pytest.raises(SinkError, match="lost the marker"):
        driver.publish(driver.complete())
    assert isinstance(driver.target, DeltaTarget)
    with pytest.raises(SinkError, match="not there any more"):
        driver.target.commit((), msgspec.structs.replace(seen, checkpoint=9), seen)


def test_two_drivers_write_at_the_same_time_and_one_stops(tmp_path: Path) -> None:
    job = a_job(tmp_path, mode="upsert")
    old = job.start()
    log = job.log
    new = job.start()
    failures: list[StrandlineError] = []

    def write(driver: SinkDriver) -> None:
        for _ in range(5):
            seen = marker_of(driver)
            try:
                driver.target.check_still_ours(driver.log)
                driver.target.commit((), msgspec.structs.replace(seen, batch=seen.batch + 1), seen)  # type: ignore[attr-defined]
            except (FencedError, MarkerMovedError) as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(driver,)) for driver in (old, new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.generation < job.log.generation
    assert sum(isinstance(one, FencedError) for one in failures) == 5
    assert len(failures) == 5


# --- what the table holds ---------------------------------------------------------------------------

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False, None]),
    "tiny": (pa.int8(), [-128, 127, None]),
    "small": (pa.int16(), [-(2**15), 2**15 - 1, None]),
    "whole": (pa.int32(), [-(2**31), 2**31 - 1, None]),
    "big": (pa.int64(), [-(2**63), 2**63 - 1, None]),
    "single": (pa.float32(), [-0.5, float("inf"), None]),
    "double": (pa.float64(), [1e300, float("nan"), None]),
    "text": (pa.string(), ["", "ä\n\"'\\" + "z" * 100, None]),
    "bytes": (pa.binary(), [b"", b"\x00\xff", None]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
    "at": (
        pa.timestamp("us", "UTC"),
        [datetime(1, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), None],
    ),
    "local": (pa.timestamp("us"), [datetime(1969, 12, 31), datetime(9999, 12, 31, 23, 59, 59, 999999), None]),
    "money": (pa.decimal128(38, 10), [Decimal("-0.0000000001"), Decimal("9" * 28 + "." + "9" * 10), None]),
    "list": (pa.list_(pa.int32()), [[], [1, None, 3], None]),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", 1), ("", None)], None]),
    "struct": (
        pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("z", pa.string())])))]),
        [{"x": None, "y": None}, {"x": 1, "y": [{"z": "q"}, None]}, None],
    ),
    "select": (pa.string(), ["'", '"', None]),
    "a.b": (pa.string(), ["1", "2", None]),
    "Größe_%20/ü": (pa.string(), ["1", "2", None]),
}
ALL_TYPES = pa.schema([("user", pa.string()), *((name, kind) for name, (kind, _values) in TYPES.items())])


def all_types() -> pa.Table:
    columns = [pa.array(["a", "b", None]), *(pa.array(values, kind) for kind, values in TYPES.values())]
    return pa.Table.from_arrays(columns, schema=ALL_TYPES)


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_values_of_all_types_come_back(tmp_path: Path, mode: str) -> None:
    driver = a_job(tmp_path, ALL_TYPES, mode=mode).start()
    rows = all_types()
    publish(driver, rows)
    if mode == "upsert":
        publish(driver, rows)
    expected = sorted(map(repr, rows.to_pylist()))
    assert sorted(map(repr, DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist())) == expected
    assert sorted(map(repr, reader.read(tmp_path / "table").to_pylist())) == expected
    # The same types again are no other types.
    driver.job.start()


def test_times_of_another_zone_are_the_same_moments(tmp_path: Path) -> None:
    schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "Europe/Berlin"))])
    driver = a_job(tmp_path, schema).start()
    moment = datetime(2026, 7, 1, 12, tzinfo=UTC)
    publish(driver, pa.table({"user": ["a"], "at": [moment]}, schema))
    assert DeltaTable(tmp_path / "table").to_pyarrow_table()["at"].to_pylist() == [moment]


@pytest.mark.parametrize(
    "kind", [pa.time64("us"), pa.duration("us"), pa.uint64(), pa.null(), pa.list_(pa.time64("us")), pa.struct([])]
)
def test_types_that_delta_has_not_are_refused_in_the_definition(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(JobDefinitionError, match="cast it"):
        a_job(tmp_path, pa.schema([("user", pa.string()), ("x", kind)]))


@pytest.mark.parametrize("name", ["", "a b", "a`b", "a,b", "a=b", "a\nb", "USER"])
def test_names_that_delta_has_not_are_refused_in_the_definition(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobDefinitionError, match=r"[Rr]ename"):
        a_job(tmp_path, pa.schema([("user", pa.string()), (name, pa.int64())]))


def test_statistics_hide_no_row(tmp_path: Path) -> None:
    """Every value is found by a filter for it, and statistics do leave out files."""
    driver = a_job(tmp_path, ALL_TYPES).start()
    rows = all_types()
    for at in range(3):
        publish(driver, rows.slice(at, 1))
    publish(driver, rows)
    dataset = DeltaTable(tmp_path / "table").to_pyarrow_dataset()
    for name, (kind, values) in TYPES.items():
        if pa.types.is_nested(kind):
            continue
        for value in values:
            wanted = pc.field(name) == pa.scalar(value, kind) if value is not None else pc.field(name).is_null()
            if value != value:  # only NaN
                wanted = pc.is_nan(pc.field(name))
            assert dataset.to_table(filter=wanted).num_rows == 2, (name, value)
    kept = list(dataset.get_fragments(filter=pc.field("big") > 0))
    assert len(kept) == 2
    for add in reader.files(tmp_path / "table").values():
        assert set(json.loads(add["stats"])["nullCount"]) == set(rows.column_names) - {"list", "map", "struct"}


def test_partition_columns_are_in_the_log_and_not_in_the_files(tmp_path: Path) -> None:
    schema = pa.schema(
        [("user", pa.string()), ("day", pa.date32()), ("flag", pa.bool_()), ("n", pa.int32()), ("x", pa.int64())]
    )
    users = ["a", "ä/=%20 'x'", "", None]
    rows = [
        {"user": user, "day": day, "flag": flag, "n": n, "x": x}
        for x, (user, day, flag, n) in enumerate(
            (user, day, flag, n)
            for user in users
            for day in (date(1969, 12, 31), None)
            for flag in (True, False, None)
            for n in (-1, None)
        )
    ]
    driver = a_job(tmp_path, schema, partition_by=["user", "day", "flag", "n"]).start()
    publish(driver, pa.Table.from_pylist(rows, schema))
    expected = sorted(repr({**row, "user": row["user"] or None}) for row in rows)
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(schema.names).to_pylist()
    assert sorted(map(repr, found)) == expected
    files = reader.files(tmp_path / "table")
    assert len(files) == 3 * 2 * 3 * 2
    assert {"user": "ä/=%20 'x'", "day": "1969-12-31", "flag": "false", "n": "-1"} in [
        add["partitionValues"] for add in files.values()
    ]
    DeltaTable(tmp_path / "table").optimize.compact()
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(schema.names).to_pylist()
    assert sorted(map(repr, found)) == expected


def test_an_upsert_moves_a_row_to_another_partition_and_takes_null_for_a_key(tmp_path: Path) -> None:
    schema = pa.schema([("user", pa.string()), ("day", pa.string()), ("n", pa.int64())])
    driver = a_job(tmp_path, schema, mode="upsert", partition_by=["day"]).start()
    publish(driver, pa.table({"user": ["a", "b", None, "a"], "day": ["1", "1", "", "2"], "n": [1, 2, 3, 4]}, schema))
    publish(driver, pa.table({"user": ["b", None], "day": ["2", "1"], "n": [5, 6]}, schema))
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(schema.names)
    assert sorted(map(repr, found.to_pylist())) == sorted(
        map(repr, pa.table({"user": ["a", "b", None], "day": ["2", "2", "1"], "n": [4, 5, 6]}, schema).to_pylist())
    )


def test_columns_of_others_are_kept(tmp_path: Path) -> None:
    schema = Schema.from_arrow(pa.schema([*SCHEMA, ("more", pa.string())]))
    table = tmp_path / "table"
    DeltaTable.create(table, schema=schema)
    write_deltalake(table, pa.table({"user": ["a"], "n": [0], "more": ["kept"]}), mode="append")
    a_job(tmp_path, mode="upsert").start().checkpoint([("a", 1), ("b", 2)])
    assert rows_in(table) == [("a", 1, "kept"), ("b", 2, None)]


# --- tables that do not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ([("user", pa.string())], "no column 'n'.*add_columns"),
        ([("user", pa.string()), ("N", pa.int64())], "it has 'N'"),
        ([("user", pa.string()), ("n", pa.int32())], "int32, and job 'visits' writes int64"),
        ([*SCHEMA, pa.field("z", pa.string(), nullable=False)], "'z' must not be null"),
    ],
)
def test_a_table_of_other_columns_is_refused_before_the_takeover(tmp_path: Path, columns: list[Any], says: str) -> None:
    DeltaTable.create(tmp_path / "table", schema=Schema.from_arrow(pa.schema(columns)))
    job = a_job(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match=says):
        job.start()
    assert job.log.generation == 0
    assert DeltaTable(tmp_path / "table").version() == 0


def test_a_column_that_was_added_to_the_table_lets_the_job_go_on(tmp_path: Path) -> None:
    a_job(tmp_path).start().checkpoint([("a", 1)])
    wider = pa.schema([*SCHEMA, ("more", pa.string())])
    job = a_job(tmp_path, wider)
    with pytest.raises(IncompatibleCheckpointError, match="no column 'more'"):
        job.start()
    DeltaTable(tmp_path / "table").alter.add_columns(Field("more", PrimitiveType("string")))
    taken = a_job(tmp_path, wider)
    taken.log = job.log
    with pytest.raises(DirectoryNotOursError):  # the columns fit; the rest is a log of another job
        taken.start()


def test_other_partitions_are_refused_before_the_takeover(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "table", schema=Schema.from_arrow(SCHEMA), partition_by=["user"])
    with pytest.raises(IncompatibleCheckpointError, match=r"partitioned by \['user'\], but the sink says"):
        a_job(tmp_path).start()
    a_job(tmp_path, partition_by=["user"]).start()


def test_what_files_would_not_be_checked_for_is_refused(tmp_path: Path) -> None:
    table = DeltaTable.create(tmp_path / "table", schema=Schema.from_arrow(SCHEMA))
    table.alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(IncompatibleCheckpointError, match=r"delta\.constraints\.positive"):
        a_job(tmp_path).start()
    driver = a_job(tmp_path, mode="upsert").start()
    driver.checkpoint([("a", 1)])
    driver.stage([("b", -1)])
    with pytest.raises(StorageRefusedError, match="1 rows failed validation"):
        driver.publish(driver.complete())
    assert rows_in(tmp_path / "table") == [("a", 1)]


def test_a_table_that_only_grows_takes_no_upserts(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "table", schema=Schema.from_arrow(SCHEMA), configuration={"delta.appendOnly": "true"})
    with pytest.raises(IncompatibleCheckpointError, match="appendOnly"):
        a_job(tmp_path, mode="upsert").start()
    a_job(tmp_path).start().checkpoint([("a", 1)])


@pytest.mark.parametrize("options", [{}, {"mode": "upsert"}, {"partition_by": ["user"]}], ids=repr)
def test_nulls_where_none_may_be_stay_staged(tmp_path: Path, options: dict[str, Any]) -> None:
    schema = pa.schema([pa.field("user", pa.string(), nullable=False), ("n", pa.int64())])
    DeltaTable.create(
        tmp_path / "table", schema=Schema.from_arrow(schema), partition_by=options.get("partition_by", [])
    )
    driver = a_job(tmp_path, **options).start()
    driver.checkpoint([("a", 1)])
    stage(driver, pa.table({"user": ["b", None], "n": [2, 3]}, SCHEMA))
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match="'user' must not be null"):
        driver.publish(metadata)
    assert len(rows_in(tmp_path / "table")) == 1
    DeltaTable(tmp_path / "table").alter.drop_column_not_null("user")
    driver.publish(metadata)
    assert len(rows_in(tmp_path / "table")) == 3


def test_a_table_with_several_rows_of_a_key_takes_no_upserts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = pa.Table.from_pylist([{"user": "a", "n": 1}, {"user": None, "n": 2}, {"user": None, "n": 3}], SCHEMA)
    write_deltalake(tmp_path / "table", before)
    job = a_job(tmp_path, mode="upsert")
    find = r'SELECT "user", count\(\*\) FROM ".*/table" GROUP BY "user" HAVING count\(\*\) > 1'
    with pytest.raises(IncompatibleCheckpointError, match=rf"several rows of a key in \['user'\].*{find}.*all but one"):
        job.start()
    assert job.log.generation == 0
    # A table that is too large to be looked through: its merge notices.
    monkeypatch.setattr(target, "_MOST_LOOKED_THROUGH", 2)
    driver = job.start()
    assert "has 3 rows: whether it has several rows of a key is only noticed when" in caplog.text
    publish(driver, pa.Table.from_pylist([{"user": "a", "n": 4}, {"user": "b", "n": 5}], SCHEMA))
    with pytest.raises(
        StorageRefusedError, match=rf"met 1 rows too many: .* in \['user'\].*{find}.*start the job again"
    ):
        publish(driver, pa.Table.from_pylist([{"user": None, "n": 6}, {"user": "c", "n": 7}], SCHEMA))
    # The commit counts: nothing is written again.
    assert marker_of(driver).batch == driver.batch
    again = job.start()
    assert rows_in(tmp_path / "table") == [("a", 4), ("b", 5), ("c", 7), (None, 6), (None, 6)]
    DeltaTable(tmp_path / "table").delete('"user" IS NULL')
    publish(again, pa.Table.from_pylist([{"user": None, "n": 8}], SCHEMA))
    assert rows_in(tmp_path / "table") == [("a", 4), ("b", 5), ("c", 7), (None, 8)]


def test_a_folder_with_other_files_is_not_made_a_table(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "mine.csv").write_text("a,b")
    with pytest.raises(DirectoryNotOursError, match=r"mine\.csv"):
        a_job(tmp_path).start()
    assert [file.name for file in (tmp_path / "table").iterdir()] == ["mine.csv"]


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition_by": "user"}, r"partition_by=\['user'\]"),
        ({"partition_by": ["nobody"]}, "'nobody' is no column"),
        ({"partition_by": ["user", "user"]}, "twice"),
        ({"partition_by": ["user", "n"]}, "all columns"),
        ({"mode": "merge"}, "'append' or 'upsert'"),
    ],
)
def test_wrong_options_are_refused_in_the_definition(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(JobDefinitionError, match=says):
        a_job(tmp_path, **options)


def test_partitions_by_times_are_refused_in_the_definition(tmp_path: Path) -> None:
    with pytest.raises(JobDefinitionError, match="booleans or dates"):
        a_job(tmp_path, pa.schema([*SCHEMA, ("at", pa.timestamp("us", "UTC"))]), partition_by=["at"])


@pytest.mark.parametrize("path", ["hdfs://host/table", "/tmp/a%20b", "s3://bucket/a[b"])
def test_places_where_no_table_can_be_are_refused_in_the_definition(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is local, or in s3|another folder|hdfs"):
        DeltaSink(path).bound(a_context(tmp_path))


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "{}",
        '{"partition": {"day": "1"}, "nulls": {}, "least": {}, "greatest": {}}',
        '{"partition": {}, "nulls": {"n": 2}, "least": {}, "greatest": {}}',
        '{"partition": {}, "nulls": {}, "least": {"other": 1}, "greatest": {}}',
        '{"partition": {}, "nulls": {}, "least": {"n": [1]}, "greatest": {}}',
    ],
)
def test_crafted_facts_about_a_file_are_refused(tmp_path: Path, handle: str) -> None:
    driver = a_job(tmp_path).start()
    (file,) = driver.stage([("a", 1)])
    assert FileFacts.of(file, SCHEMA, ()).nulls == {"user": 0, "n": 0}
    driver.staged = [msgspec.structs.replace(file, handle=handle)]
    with pytest.raises(MetadataError, match="Restore another checkpoint"):
        driver.publish(driver.complete())
    assert rows_in(tmp_path / "table") == []


def test_options_of_an_object_store_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    given = {"endpoint": "http://127.0.0.1:1", "Access_Key_Id": "x", "timeout": "5s"}
    assert delta_options("s3://bucket/table", given) == {
        "endpoint": "http://127.0.0.1:1",
        "access_key_id": "x",
        "timeout": "5s",
        "allow_http": "true",
        "aws_conditional_put": "etag",
        "aws_s3_allow_unsafe_rename": "false",
        "max_retries": "3",
        "retry_timeout": "30s",
    }
    assert delta_options("/tmp/table", given) == {}
    assert "aws_conditional_put" not in delta_options("gs://bucket/table", {})


def test_a_store_that_is_down_or_refuses_shows_no_secret(tmp_path: Path, s3_endpoint: str) -> None:
    secret = "very-secret-key"
    options = {"access_key_id": "id", "secret_access_key": secret, "region": "us-east-1"}
    context = SinkContext("visits", SCHEMA, str(tmp_path), ("user",), {**options, "endpoint": "http://127.0.0.1:1"})
    sink = DeltaSink("s3://bucket/delta-down").bound(context)
    assert secret not in repr(sink) + repr(sink.stager(context)) + repr(context)
    target = sink.target(context)
    assert isinstance(target, DeltaTarget)
    with pytest.raises(SinkError, match="delta:s3://bucket/delta-down") as failed:
        target.committed()
    assert secret not in str(failed.value)
    assert "\x1b" not in str(failed.value)
    context = SinkContext("visits", SCHEMA, str(tmp_path), ("user",), {**options, "endpoint": s3_endpoint})
    missing = DeltaSink("s3://no-such-bucket/table").bound(context).target(context)
    assert isinstance(missing, DeltaTarget)
    with pytest.raises(StrandlineError, match="no-such-bucket"):
        missing.check_target()


def test_a_table_that_was_deleted_is_told_with_the_ways_on(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    first = job.start().checkpoint([("a", 1)])
    shutil.rmtree(tmp_path / "table")
    place = f"delta:{tmp_path / 'table'}"
    job.newest = msgspec.structs.replace(first, properties=with_positions({}, {place: first.batch_id}))
    with pytest.raises(
        SinkFilesMissingError, match=r"the job's marker is gone.* deleted it or the target.*checkpoint_dir"
    ):
        job.start()
