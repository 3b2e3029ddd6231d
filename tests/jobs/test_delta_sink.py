"""Jobs with Delta sinks: the tables hold what the job emitted, whatever happened to its drivers and its slots."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import strandline as sl
from tests.jobs.kills import slot_pids
from tests.jobs.place import Place, Sum, batches, running_sums

pytestmark = pytest.mark.spark


def rows_in(table: Path) -> list[tuple[Any, ...]]:
    rows = DeltaTable(table).to_pyarrow_table().select(["user", "n", "s"]).to_pylist()
    return sorted((tuple(row.values()) for row in rows), key=repr)


def sums_into_tables(place: Place, **options: Any) -> sl.Job:
    job = place.job(**options)
    sums = job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums")
    sums.sink(sl.DeltaSink(str(place.root / "changes"), partition_by=["user"]))
    sums.sink(sl.DeltaSink(str(place.root / "newest"), mode="upsert"))
    return job


def check(place: Place, written: list[list[tuple[Any, int]]]) -> None:
    changes = running_sums(written)
    assert rows_in(place.root / "changes") == changes
    newest = {user: (user, n, s) for user, n, s in sorted(changes, key=lambda row: row[1])}
    assert rows_in(place.root / "newest") == sorted(newest.values(), key=repr)


def test_tables_hold_what_the_job_emitted_after_killed_slots_and_lost_drivers(place: Place) -> None:
    written = batches(6, users=5)
    with sums_into_tables(place).start() as run:
        place.write(written[0])
        run.process_all_available()
        check(place, written[:1])
        place.write(written[1])
        os.kill(slot_pids(run)[0], signal.SIGKILL)
        place.write(written[2])
        run.process_all_available()
        check(place, written[:3])
    DeltaTable(place.root / "changes").optimize.compact()
    DeltaTable(place.root / "newest").vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    run = sums_into_tables(place, checkpoint_interval="1h").start()
    place.write(written[3])
    run.process_all_available()
    place.write(written[4])
    run.cancel()
    with sums_into_tables(place).start() as run:
        place.write(written[5])
        run.process_all_available()
    check(place, written)
    assert not list((place.root / "changes" / "_strandline").glob("*"))
    assert not list((place.checkpoints / "visits" / "staged").rglob("*.arrow"))


def test_an_append_that_is_ahead_is_not_repeated(place: Place) -> None:
    written = batches(2, users=5)
    place.write(written[0])
    with sums_into_tables(place).start() as run:
        run.process_all_available()
        savepoint = run.savepoint(str(place.root / "savepoints"))
        place.write(written[1])
        run.process_all_available()
    with pytest.raises(sl.SinkAheadError, match=r"changes has rows of later batches already"):
        sums_into_tables(place).start(restore=savepoint)
    write_deltalake(place.root / "newest", pa.table({"user": ["x"], "n": [0], "s": [0]}), mode="append")
    with sums_into_tables(place).start() as run:
        run.process_all_available()
    assert ("x", 0, 0) in rows_in(place.root / "newest")
    assert rows_in(place.root / "changes") == running_sums(written)


def test_a_table_that_does_not_fit_ends_the_start_and_leaves_it_as_it_is(place: Place) -> None:
    write_deltalake(place.root / "changes", pa.table({"user": ["x"], "n": ["text"], "s": [0]}), partition_by=["user"])
    with pytest.raises(sl.IncompatibleCheckpointError, match="column 'n' is of type string"):
        sums_into_tables(place).start()
    assert DeltaTable(place.root / "changes").version() == 0
    assert not (place.root / "newest").exists()
