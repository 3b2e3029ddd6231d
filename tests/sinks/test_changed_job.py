"""Targets with a marker: the job was changed while rows were staged, or somebody else is at the same target."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.metadata import HIGHEST_KNOWN_GENERATION, CheckpointMetadata
from strandline.errors import (
    DirectoryNotOursError,
    FencedError,
    IncompatibleCheckpointError,
    MetadataError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
)
from strandline.sinks import Marker, SinkContext, SinkTarget
from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.dropped import KEPT, DroppedRows
from strandline.sinks.positions import position_in, with_positions
from strandline.sinks.sqlite import SQLiteTarget
from strandline.testing.sink import SinkDriver, SinkJob, a_checkpoint, a_context
from tests.sinks.values import stage_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    RacingTarget.meanwhile.clear()  # a test that failed may have left something
    return tmp_path / "target.db"


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement).fetchall()


def a_job(sink: ExactlyOnceSink, folder: Path, columns: str = "") -> SinkJob:
    """A job with the schema of the contract, or with columns of whole numbers."""
    context = a_context(folder / "checkpoints")
    if columns:
        schema = pa.schema([(name, pa.int64()) for name in columns])
        context = SinkContext(context.job, schema, context.checkpoint_dir, ("m",))
    return SinkJob(sink.bound(context), context)


def change(before: SinkJob, after: SinkJob) -> SinkDriver:
    """The changed job starts."""
    after.log, after.newest = before.log, before.newest
    return after.start()


# --- a changed job -------------------------------------------------------------------------------


def a_sqlite_table(folder: Path) -> tuple[ExactlyOnceSink, Callable[[], list[Any]]]:
    path = folder / "target.db"
    query(path, "CREATE TABLE visits (m INTEGER UNIQUE, n INTEGER, o INTEGER)")
    return sl.SQLiteSink(path, "visits", mode="upsert"), lambda: query(path, "SELECT m, n, o FROM visits")


def a_delta_table(folder: Path) -> tuple[ExactlyOnceSink, Callable[[], list[Any]]]:
    path = str(folder / "table")
    DeltaTable.create(path, pa.schema([(name, pa.int64()) for name in "mno"]))

    def rows() -> list[Any]:
        return [(row["m"], row["n"], row["o"]) for row in DeltaTable(path).to_pyarrow_table().to_pylist()]

    return sl.DeltaSink(path, mode="upsert"), rows


TABLES = [a_sqlite_table, a_delta_table]


@pytest.mark.parametrize("table", TABLES)
def test_staged_rows_keep_their_values_if_the_job_has_its_columns_in_another_order(table: Any, tmp_path: Path) -> None:
    sink, rows = table(tmp_path)
    before = a_job(sink, tmp_path, "mn")
    driver = before.start()
    stage_table(driver, pa.table({"m": [1], "n": [2]}))
    driver.complete()
    again = change(before, a_job(sink, tmp_path, "onm"))
    assert rows() == [(1, 2, None)]
    stage_table(again, pa.table({"o": [5], "n": [4], "m": [3]}))
    again.publish(again.complete())
    assert sorted(rows()) == [(1, 2, None), (3, 4, 5)]


@pytest.mark.parametrize("table", TABLES)
def test_staged_rows_with_a_column_that_the_job_writes_no_more_stay_staged(table: Any, tmp_path: Path) -> None:
    sink, rows = table(tmp_path)
    before = a_job(sink, tmp_path, "mn")
    driver = before.start()
    stage_table(driver, pa.table({"m": [1], "n": [2]}))
    driver.complete()
    with pytest.raises(StorageRefusedError, match=r"column 'n', which the job writes no more.*once as it was"):
        change(before, a_job(sink, tmp_path, "m"))
    change(before, before)
    assert rows() == [(1, 2, None)]


@pytest.mark.parametrize("modes", [("append", "upsert"), ("upsert", "append")])
def test_rows_that_another_mode_has_staged_are_asked_for_before_the_takeover(modes: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    before, after = (a_job(sl.DeltaSink(path, mode=mode), tmp_path) for mode in modes)
    driver = before.start()
    driver.checkpoint([("a", 1)])
    driver.stage([("b", 2)])
    driver.complete()
    with pytest.raises(IncompatibleCheckpointError, match=r"staged as another mode= of the sink.*once with the sink"):
        change(before, after)
    assert after.log.generation == driver.log.generation
    before.start()
    change(before, after).checkpoint([("c", 3)])
    assert sorted(row["n"] for row in DeltaTable(path).to_pyarrow_table().to_pylist()) == [1, 2, 3]


# --- somebody else at the target -----------------------------------------------------------------


def test_a_second_sink_of_the_job_with_another_name_for_the_same_table_is_refused(path: Path) -> None:
    link = path.parent / "link"
    link.symlink_to(path.parent)
    job, other = (a_job(sl.SQLiteSink(folder / path.name, "visits"), path.parent) for folder in (path.parent, link))
    for _ in range(2):
        driver = job.start()
        second = SinkDriver(other, other.sink.target(other.context), job.log)
        with pytest.raises(DirectoryNotOursError, match=r"link/target.db#visits is the target of another sink of job"):
            second.recover()
        driver.recover()  # after an error, a claim is repeated
        driver.checkpoint([("a", 1)])


def test_a_folder_that_two_sinks_of_a_job_name_in_two_ways_keeps_the_rows_of_both(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    one, other = (a_job(sl.ParquetSink(str(tmp_path / name)), tmp_path) for name in ("out", "link"))
    driver = one.start()
    second = SinkDriver(other, other.sink.target(other.context), driver.log)
    second.stage([("b", 2)])
    driver.staged += second.staged
    driver.stage([("a", 1)])
    driver.complete()
    one.start()  # without the second sink, whose turn comes later
    other.log, other.newest = one.log, one.newest
    other.start()
    assert sorted(pq.read_table(tmp_path / "out", partitioning=None)["n"].to_pylist()) == [1, 2]


@dataclass(frozen=True, slots=True)
class RacingSink(sl.SQLiteSink):
    """Somebody else does something right after the first look at the marker. It keeps the contract."""

    def target(self, context: SinkContext) -> SinkTarget:
        return RacingTarget(self, context)


class RacingTarget(SQLiteTarget):
    meanwhile: list[Callable[[], None]] = []

    def committed(self) -> Marker | None:
        found = super().committed()
        if self.meanwhile:
            self.meanwhile.pop()()
        return found


def test_a_driver_that_still_runs_may_publish_while_the_next_one_checks_the_target(path: Path) -> None:
    job = a_job(RacingSink(path, "visits"), path.parent)
    old = job.start()
    old.stage([("a", 1)])
    metadata = old.complete()
    RacingTarget.meanwhile.append(lambda: old.publish(metadata))
    job.start().checkpoint([("b", 2)])
    assert query(path, "SELECT n FROM visits ORDER BY n") == [(1,), (2,)]


# --- what a checkpoint and a marker say ----------------------------------------------------------


def test_a_savepoint_that_took_longer_than_a_later_checkpoint_can_be_restored_again_and_again(path: Path) -> None:
    job = a_job(sl.SQLiteSink(path, "visits"), path.parent)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    batch = driver.batch
    driver.checkpoint([("b", 2)])  # while the savepoint is written
    noted = with_positions({}, {driver.target.place: driver.target.position or 0})
    savepoint = a_checkpoint(job.context.job, 3, driver.log.generation, batch, (), noted)
    job.start(savepoint, repeat_rows=True)
    job.start()
    job.start().checkpoint([("b", 2)])
    assert query(path, "SELECT n FROM visits ORDER BY n") == [(1,), (2,), (2,)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_savepoint_that_counts_on_rows_which_a_later_start_dropped_is_refused(path: Path, mode: Any) -> None:
    """Its call did not return: the driver died before the rows were published."""
    job = a_job(sl.SQLiteSink(path, "visits", mode=mode), path.parent)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    driver.stage([("b", 2)])
    savepoint = a_savepoint(driver)
    driver.stage([("c", 3)])  # staged, and in nothing that can be restored
    again = job.start()
    with pytest.raises(
        SinkFilesMissingError, match=r"savepoint 2 .*covers 1 rows .* which are not there, and .*staged/"
    ):
        job.start(savepoint, repeat_rows=True)
    again.checkpoint([("b", 2)])
    with pytest.raises(
        SinkFilesMissingError, match=r"generation 2 dropped when it went on from an older.*delete"
    ) as no:
        job.start(savepoint, repeat_rows=True)
    assert job.log.generation == 2
    [note] = path.parent.rglob("*.dropped")
    assert str(note) in str(no.value)
    note.unlink()
    job.start(savepoint, repeat_rows=True).checkpoint([("c", 3)])
    job.start()
    assert query(path, "SELECT n FROM visits ORDER BY n") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_savepoint_whose_rows_are_published_can_be_restored_though_later_rows_were_dropped(
    path: Path, mode: Any
) -> None:
    job = a_job(sl.SQLiteSink(path, "visits", mode=mode), path.parent)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    driver.stage([("b", 2)])
    savepoint = a_savepoint(driver)
    driver.publish(driver.complete())
    for generation in (2, 3):
        driver.stage([("c", 3)])
        driver = job.start()
        assert driver.log.generation == generation
    driver.checkpoint([("c", 3)])
    job.start(savepoint, repeat_rows=True).checkpoint([("c", 3)])
    job.start()
    twice = [(3,)] if mode == "append" else []
    assert query(path, "SELECT n FROM visits ORDER BY n") == [(1,), (2,), (3,), *twice]


def test_notes_on_dropped_rows_are_bounded_and_a_damaged_one_is_told(path: Path) -> None:
    notes = DroppedRows(a_context(path.parent), "sqlite:/t#visits")
    for generation in range(2, KEPT + 10):
        for _ in range(2):
            notes.note(first_batch(generation - 1) + 1, generation)
    file = Path(notes.location)
    assert len(json.loads(file.read_bytes())) == KEPT
    file.write_bytes(b"[")
    with pytest.raises(MetadataError, match=r"damaged.*delete it, if no savepoint"):
        notes.note(5, 3)


def a_savepoint(driver: SinkDriver) -> CheckpointMetadata:
    """A savepoint that counts on all rows that are staged."""
    noted = with_positions({}, {driver.target.place: driver.target.position or 0})
    found = a_checkpoint(driver.job.context.job, 2, driver.log.generation, driver.batch, driver.staged, noted)
    return msgspec.structs.replace(found, kind="savepoint")


def test_a_checkpoint_without_rows_needs_no_look_at_the_target(path: Path) -> None:
    job = a_job(sl.SQLiteSink(path, "visits"), path.parent)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    away = path.rename(path.parent / "away")
    noted = driver.checkpoint()
    assert position_in(noted, driver.target.place) == driver.target.position == first_batch(1) + 1
    driver.stage([("b", 2)])
    metadata = driver.complete()
    with pytest.raises(SinkError, match="lost the marker"):
        driver.publish(metadata)
    away.rename(path)
    driver.publish(metadata)
    assert query(path, "SELECT n FROM visits") == [(1,), (2,)]


def test_a_driver_whose_target_was_taken_from_another_folder_is_told_with_its_next_rows(path: Path) -> None:
    job = a_job(sl.SQLiteSink(path, "visits", mode="upsert"), path.parent)
    old = job.start()
    newest = old.checkpoint([("a", 1)])
    other = a_job(sl.SQLiteSink(path, "visits", mode="upsert"), path.parent / "other")
    new = other.start(newest)
    new.checkpoint([("a", 2)])
    old.checkpoint()
    with pytest.raises(FencedError, match="another checkpoint_dir"):
        old.checkpoint([("a", 3)])
    assert query(path, "SELECT n FROM visits") == [(2,)]


def test_a_marker_with_a_generation_that_no_checkpoint_can_have_is_damaged(path: Path) -> None:
    job = a_job(sl.SQLiteSink(path, "visits"), path.parent)
    job.start()
    [(text,)] = query(path, "SELECT marker FROM strandline_markers")
    marker = {**json.loads(text), "generation": HIGHEST_KNOWN_GENERATION + 1}
    query(path, f"UPDATE strandline_markers SET marker = '{json.dumps(marker)}'")
    with pytest.raises(DirectoryNotOursError, match="damaged marker"):
        job.start()


def test_a_start_with_another_checkpoint_dir_says_what_to_do_if_the_first_is_gone(path: Path) -> None:
    a_job(sl.SQLiteSink(path, "visits"), path.parent).start()
    with pytest.raises(DirectoryNotOursError, match=r"is gone, bring it back; or empty the target, with its marker"):
        a_job(sl.SQLiteSink(path, "visits"), path.parent).start()


def test_staged_rows_that_the_store_shows_late_are_waited_for(path: Path) -> None:
    folder, shown = path.parent, path.parent / "hidden"
    stale = {"stale_folder": str(folder / "stale"), "stale_seconds": "600", "switch": str(shown)}
    context = a_context(folder)
    url = f"faulty+file://{folder / 'checkpoints'}"
    context = replace(context, checkpoint_dir=url, storage_options=stale)
    job = SinkJob(RacingSink(path, "visits").bound(context), context)
    driver = job.start()
    shown.touch()
    driver.stage([("a", 1)])
    driver.complete()
    # The first look at the marker is before the file was missed, and the second after that.
    RacingTarget.meanwhile += [shown.unlink, lambda: None]
    job.start()
    assert query(path, "SELECT n FROM visits") == [(1,)]
