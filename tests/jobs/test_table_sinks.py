"""A job with sinks that keep a marker: the table holds what the job emitted, whatever happened to its drivers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.checkpoint.metadata import SinkFile
from strandline.sinks import Marker, SinkContext, SinkTarget
from strandline.sinks.sqlite import SQLiteTarget
from tests.jobs.place import Place, Sum, batches, running_sums, wait_for_batches
from tests.waiting import wait_until

pytestmark = pytest.mark.spark


def table(path: Path, name: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return sorted(database.execute(f'SELECT "user", n, s FROM "{name}"').fetchall(), key=repr)


def sums_into_two_tables(place: Place, **options: Any) -> sl.Job:
    job = place.job(**options)
    sums = job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums")
    sums.sink(sl.SQLiteSink(place.root / "out.db", "changes"))
    sums.sink(sl.SQLiteSink(place.root / "out.db", "newest", mode="upsert"))
    sums.sink(sl.ParquetSink(str(place.output)))
    return job


def check(place: Place, written: list[list[tuple[Any, int]]]) -> None:
    changes = running_sums(written)
    assert table(place.root / "out.db", "changes") == changes
    newest = {user: (user, n, s) for user, n, s in sorted(changes, key=lambda row: row[1])}
    assert table(place.root / "out.db", "newest") == sorted(newest.values(), key=repr)
    assert place.rows() == changes


def test_changes_are_appended_and_the_newest_value_of_a_key_is_kept(place: Place) -> None:
    written = batches(4)
    with sums_into_two_tables(place).start() as run:
        for batch in written[:2]:
            place.write(batch)
        run.process_all_available()
        check(place, written[:2])
        savepoint = run.savepoint(str(place.root / "savepoints"))
        place.write(written[2])
        run.process_all_available()
    with pytest.raises(sl.SinkAheadError, match=r"changes has rows of later batches already"):
        sums_into_two_tables(place).start(restore=savepoint)
    with sums_into_two_tables(place).start() as run:
        place.write(written[3])
        run.process_all_available()
        check(place, written)
    assert not list((place.checkpoints / "visits" / "staged").rglob("*.arrow"))


def test_rows_that_were_complete_when_the_driver_ended_are_there_after_the_next_start(place: Place) -> None:
    written = batches(3)
    for batch in written:
        place.write(batch)
    job = sums_into_two_tables(place, checkpoint_interval="1h")
    run = job.start()
    run.process_all_available()
    check(place, written)
    place.write(written[0])
    run.cancel()
    with sums_into_two_tables(place).start() as run:
        run.process_all_available()
        check(place, [*written, written[0]])


def test_a_savepoint_returns_when_the_rows_it_counts_on_are_published(place: Place) -> None:
    written = batches(2)
    place.write(written[0])
    with sums_into_two_tables(place, checkpoint_interval="1h").start() as run:
        wait_for_batches(run, 1)
        assert table(place.root / "out.db", "changes") == []
        savepoint = run.savepoint(str(place.root / "savepoints"))
        check(place, written[:1])
        run.cancel()
    with sums_into_two_tables(place).start():
        pass  # a start deletes what is staged and covered by no checkpoint
    place.checkpoints = place.root / "elsewhere"
    place.write(written[1])
    with sums_into_two_tables(place).start(restore=savepoint) as run:
        run.process_all_available()
    check(place, written)


class SlowTarget(SQLiteTarget):
    """A table whose commits take long. It keeps the contract."""

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        if staged:
            while not self.go_on.is_file():
                time.sleep(0.01)
        super().commit(staged, marker, replaces)

    @property
    def go_on(self) -> Path:
        return Path(self.place.removeprefix("sqlite:").partition("#")[0]).with_name("go-on")


class SlowSink(sl.SQLiteSink):
    def target(self, context: SinkContext) -> SinkTarget:
        return SlowTarget(self, context)


def test_batches_wait_while_a_sink_is_behind_and_go_on_when_it_has_caught_up(place: Place) -> None:
    written = batches(6)
    job = place.job(sink_backlog="1b", checkpoint_interval="50ms")
    sums = job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums")
    sums.sink(SlowSink(place.root / "out.db", "changes"))
    with job.start() as run:
        place.write(written[0])
        wait_until(lambda: bool(run.checkpoints()) and run.figures().batches == 1, what="a checkpoint")
        for batch in written[1:]:
            place.write(batch)
        wait_until(lambda: run.figures().held_up_s > 0, what="a batch that waits for the sink")
        held = run.figures()
        assert held.batches < len(written)
        assert [sink.staged_bytes > 0 for sink in held.sinks] == [True]
        assert table(place.root / "out.db", "changes") == []
        (place.root / "go-on").touch()
        run.process_all_available()
        figures = run.figures()
        assert figures.held_up_s == 0
        assert [sink.rows for sink in figures.sinks] == [len(running_sums(written))]
    assert table(place.root / "out.db", "changes") == running_sums(written)


def test_a_table_that_refuses_the_rows_ends_the_run_and_the_next_start_writes_them(place: Place) -> None:
    written = batches(2)
    with sums_into_two_tables(place).start() as run:
        place.write(written[0])
        run.process_all_available()
    with closing(sqlite3.connect(place.root / "out.db")) as database:
        database.execute("CREATE TRIGGER no BEFORE INSERT ON changes BEGIN SELECT RAISE(ABORT, 'closed today'); END")
    place.write(written[1])
    run = sums_into_two_tables(place).start()
    with pytest.raises(sl.StorageRefusedError, match=r"changes refuses what job 'visits' writes: closed today"):
        run.await_termination(timeout=60)
    with closing(sqlite3.connect(place.root / "out.db")) as database:
        database.execute("DROP TRIGGER no")
    with sums_into_two_tables(place).start() as run:
        check(place, written)  # the first act of a start


def test_a_sink_that_is_taken_out_of_the_job_is_missed_if_rows_are_staged_for_it(place: Place) -> None:
    written = batches(1)
    with sums_into_two_tables(place).start() as run:
        pass
    with closing(sqlite3.connect(place.root / "out.db")) as database:
        database.execute("CREATE TRIGGER no BEFORE INSERT ON changes BEGIN SELECT RAISE(ABORT, 'closed today'); END")
    place.write(written[0])
    run = sums_into_two_tables(place).start()
    with pytest.raises(sl.StorageRefusedError):
        run.await_termination(timeout=60)
    with pytest.raises(sl.IncompatibleCheckpointError, match=r"staged and not yet there, and the job has no such sink"):
        place.sums().start()
    job = place.sums()
    with job.start(allow_non_restored_state=True):
        pass
    assert place.rows() == running_sums(written)


def test_a_job_that_goes_on_under_another_name_may_write_into_the_same_table(place: Place) -> None:
    def named(name: str) -> sl.Job:
        job = sl.Job(name, place.spark, place.config())
        sums = job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums")
        sums.sink(sl.SQLiteSink(place.root / "out.db", "changes"))
        return job

    written = batches(2)
    place.write(written[0])
    with named("visits").start() as run:
        run.process_all_available()
        savepoint = run.savepoint(str(place.root / "savepoints"))
    place.write(written[1])
    with named("fork").start(restore=savepoint) as run:
        run.process_all_available()
    assert table(place.root / "out.db", "changes") == running_sums(written)


def test_rows_without_columns_are_refused_where_the_job_is_defined(place: Place) -> None:
    rows = place.job().source(place.source()).transform(lambda frame: frame.select())
    for sink in (sl.SQLiteSink(place.root / "out.db", "rows"), sl.ParquetSink(str(place.output))):
        with pytest.raises(sl.JobDefinitionError, match="rows without columns cannot be written by"):
            rows.sink(sink)
