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

import pyarrow as pa
import pytest

from strandline.sinks.names import staged_name
from strandline.sinks.parquet.owner import OWNER
from strandline_bench.chaos.sinks import _dealt
from strandline_bench.chaos.sinks_job import CHANGES, NEWEST, SinksPlace
from strandline_bench.targets import DeltaTarget, ParquetTarget, SQLiteTarget

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
    (tmp_path / "changes" / "part-orphan.parquet").touch()
    staged, orphan = target.leftovers()
    assert "part.parquet.staged" in staged
    assert "part-orphan.parquet" in orphan


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
