"""A job into Iceberg tables: they hold what the job emitted, whatever happened to its drivers."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

import strandline as sl
from tests.jobs.place import Place, Sum, batches, running_sums

pytestmark = pytest.mark.spark


def catalogue(place: Place) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{place.root}/catalogue.db", "warehouse": f"file://{place.root}/tables"}


def rows(place: Place, table: str) -> list[tuple[Any, ...]]:
    found = load_catalog("default", **catalogue(place)).load_table(table).scan().to_arrow().select(["user", "n", "s"])
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


def sums_into_iceberg(place: Place, **options: Any) -> sl.Job:
    job = place.job(**options)
    sums = job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums")
    sums.sink(sl.IcebergSink("sales.changes", catalogue(place)))
    sums.sink(sl.IcebergSink("sales.newest", catalogue(place), mode="upsert"))
    totals = job.source(place.source()).key_by("user").aggregate(n=sl.count(), s=sl.sum("x"), uid="totals")
    totals.sink(sl.IcebergSink("sales.by_user", catalogue(place), partition_by=["user"]))
    return job


def check(place: Place, written: list[list[tuple[Any, int]]]) -> None:
    changes = running_sums(written)
    assert rows(place, "sales.changes") == changes
    assert rows(place, "sales.by_user") == changes
    newest = {user: (user, n, s) for user, n, s in sorted(changes, key=lambda row: row[1])}
    assert rows(place, "sales.newest") == sorted(newest.values(), key=repr)


def test_tables_equal_the_batch_computation_after_a_driver_was_lost(place: Place) -> None:
    written = batches(4, users=8)
    run = sums_into_iceberg(place).start()
    for batch in written[:2]:
        place.write(batch)
    run.process_all_available()
    check(place, written[:2])
    place.write(written[2])
    run.cancel()  # whatever was staged, and whatever was committed
    with sums_into_iceberg(place).start() as run:
        place.write(written[3])
        run.process_all_available()
        check(place, written)
    files = [*(place.root / "tables").rglob("*"), *place.checkpoints.rglob("*")]
    assert [path for path in files if path.name.endswith((".staged", ".arrow"))] == []
