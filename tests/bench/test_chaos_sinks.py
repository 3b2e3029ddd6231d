"""`strandline chaos sinks`: what its oracle sees in a target, how targets are dealt, and a sample of it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from strandline.sinks.names import new_final_name, staged_name
from strandline.sinks.parquet.owner import OWNER
from strandline_bench.chaos.sinks import _dealt
from strandline_bench.chaos.sinks_job import CHANGES, NEWEST, SinksPlace
from strandline_bench.targets import DeltaTarget, IcebergTarget, ParquetTarget, SQLiteTarget

Rows = list[tuple[Any, ...]]


@pytest.fixture
def place(tmp_path: Path) -> SinksPlace:
    place = SinksPlace(tmp_path, 3, False, {"sqlite": SQLiteTarget(tmp_path / "sqlite")})
    place.write(3)
    return place


def told(place: SinksPlace, changes: Rows, newest: Rows) -> list[str]:
    """What the oracle says of the target alone; the other outputs of the job are not there."""
    target = place.targets["sqlite"]
    assert isinstance(target, SQLiteTarget)
    target.home.mkdir(exist_ok=True)
    with closing(sqlite3.connect(target.database)) as connection, connection:
        for table, rows in ((CHANGES, changes), (NEWEST, newest)):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(f"CREATE TABLE {table} (key TEXT, n INTEGER, s INTEGER)")
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
    return [problem for problem in place.problems() if problem.startswith("sqlite")]


def test_the_oracle_sees_missing_doubled_outdated_and_misplaced_rows(place: SinksPlace) -> None:
    rows: Rows = sorted(place.expected().elements(), key=lambda row: row[1])
    newest: Rows = list({row[0]: row for row in rows}.values())
    older: Rows = list({row[0]: row for row in reversed(rows)}.values())
    assert told(place, rows, newest) == []
    assert "1 of" in told(place, rows[1:], newest)[0]
    assert "wrong or twice" in told(place, [*rows, rows[-1]], newest)[0]
    assert "comes after" in told(place, rows[::-1], newest)[0]
    assert "newest: " in told(place, rows, older)[0]
    assert "newest: 1 rows are wrong or twice" in told(place, rows, [*newest, newest[0]])[0]


def test_the_oracle_sees_staged_files_and_files_that_no_table_knows(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    target = DeltaTarget(tmp_path)
    write_deltalake(str(tmp_path / "changes"), pa.table({"key": ["k"]}))
    assert list(target.leftovers()) == []
    (tmp_path / "changes" / "_strandline").mkdir()
    (tmp_path / "changes" / "_strandline" / "part.parquet.staged").touch()
    (tmp_path / "changes" / new_final_name("visits", 7)).touch()
    (tmp_path / "changes" / "part-of-an-upsert.parquet").touch()  # delta-rs names it, and VACUUM deletes it
    staged, orphan = target.leftovers()
    assert "part.parquet.staged" in staged
    assert "part-visits-00000000000000000007-" in orphan


def test_the_oracle_sees_files_that_no_snapshot_of_an_iceberg_table_names(tmp_path: Path) -> None:
    target = IcebergTarget(tmp_path)
    catalogue = load_catalog("default", **target.catalogue)
    catalogue.create_namespace("bench")
    table = catalogue.create_table("bench.changes", pa.schema([("key", pa.string())]))
    for key in "abc":
        table.append(pa.table({"key": [key]}))
    table.delete("key = 'b'")
    assert list(target.leftovers()) == []
    location = Path(table.location().removeprefix("file://"))
    names = ["data/x.parquet", "data/_strandline/x.staged", "metadata/x-m0.avro", "metadata/snap-x.avro"]
    for name in [*names, f"metadata/00009-{uuid4()}.metadata.json"]:
        (location / name).parent.mkdir(exist_ok=True)
        (location / name).touch()
    (location / f"metadata/00000-{uuid4()}.metadata.json").touch()  # of a driver that was killed when it made the table
    assert len(list(target.leftovers())) == 5


def test_files_that_belong_to_a_target_are_not_left_over(tmp_path: Path) -> None:
    folder = tmp_path / "parquet" / "changes"
    (folder / "_strandline").mkdir(parents=True)
    (folder / OWNER).touch()
    target = ParquetTarget(tmp_path / "parquet")
    assert list(target.leftovers()) == []
    (folder / staged_name("part.parquet")).touch()
    assert list(target.leftovers()) == ["staged file changes/_strandline/part.parquet.staged"]


def test_every_target_gets_its_share_of_the_rounds() -> None:
    deck = ["a", "b", "c", "d", "b", "a"]
    hand, deck = _dealt(deck, 3)
    assert (hand, deck) == (["a", "b", "c"], ["d", "b", "a"])
    assert _dealt(["a", "b", "a", "c"], 3) == (["a", "b", "c"], ["a"])


@pytest.mark.spark
@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_sample_of_the_rounds_leaves_targets_whole(tmp_path: Path) -> None:
    """As its users start it, into targets that need no server."""
    command = [
        sys.executable,
        "-m",
        "strandline.admin.cli.main",
        "chaos",
        "sinks",
        "--sink",
        "sqlite",
        "--sink",
        "delta",
    ]
    ended = subprocess.run(
        [*command, "--minutes", "0.15", "--seed", "7", "--work-dir", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    result = json.loads(ended.stdout)
    assert result["problems"] == []
    assert result["rounds"] == 1
    assert result["faults"] >= 1
    assert result["checkpoints"] >= 1
    assert set(result["sinks"]) == {"sqlite", "delta"}
    assert list(tmp_path.iterdir()) == []
