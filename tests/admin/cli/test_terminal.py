"""A job's life from a terminal: started detached, seen and steered by other processes, stopped, started again."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strandline.observe.registration import local_runs
from tests.admin.cli.commands import strandline
from tests.admin.cli.terminal import in_terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = str(EXAMPLES / "totals" / "job.py")
Row = dict[str, Any]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        rows: list[Row] = importlib.import_module("data").orders()
        return rows
    finally:
        sys.modules.pop("data", None)


@pytest.fixture
def host(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host without jobs; what is left at the end is ended by its process id."""
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[2] --conf spark.ui.enabled=false pyspark-shell")
    yield
    for run in local_runs():
        if run.alive:  # it leads a process group of its own
            with suppress(ProcessLookupError):
                os.killpg(run.entry.pid, signal.SIGKILL)


def write(folder: Path, number: int, rows: list[Row]) -> None:
    folder.mkdir(exist_ok=True)
    draft = folder / f".{number}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), draft)
    draft.rename(folder / f"{number}.parquet")


def changes(folder: Path) -> list[tuple[Any, ...]]:
    """The rows that readers of the sink see."""
    if not any(folder.glob("*.parquet")):
        return []
    found = pq.ParquetDataset(str(folder)).read().to_pylist()
    return sorted((row["shop"], row["orders"], row["cents"]) for row in found)


def expected(files: list[list[Row]]) -> list[tuple[Any, ...]]:
    """A row for every shop of every file: its orders and cents so far."""
    rows, seen = [], []
    for file in files:
        seen += file
        for shop in {order["shop"] for order in file}:
            own = [order["cents"] for order in seen if order["shop"] == shop]
            rows.append((shop, len(own), sum(own)))
    return sorted(rows)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


def test_a_job_is_started_seen_steered_stopped_and_started_again(host: None, orders: list[Row], tmp_path: Path) -> None:
    files = [orders[:40], orders[40:80], orders[80:]]
    places = [str(tmp_path / name) for name in ("orders", "output", "checkpoints")]

    def comes(count: int) -> None:
        output = tmp_path / "output" / "changes"
        wait_until(lambda: changes(output) == expected(files[:count]), 60, f"the rows of {count} files")

    write(tmp_path / "orders", 0, files[0])
    settings = ["-D", "checkpoint_interval=500ms", "-D", "rest_port=0"]

    started = in_terminal("run", "-d", "-p", "1", *settings, SCRIPT, *places)
    job = found(r"Job has been submitted with JobID ([0-9a-f]{32})", started)
    page = found(r"page +(http://127\.0\.0\.1:\d+)", started)
    assert Path(found(r"log +(\S+)", started)).stat().st_mode & 0o077 == 0
    comes(1)

    assert page in in_terminal("list", "-r")
    assert re.search(r"totals\s+running for .*\n.*\n.*healthy", in_terminal("status", "totals"))
    assert "totals" in in_terminal("top", "totals", press={"q leaves": b"q"})
    first = found(
        r"Savepoint completed\. Path: (\S+)", in_terminal("savepoint", "totals", str(tmp_path / "savepoints"))
    )
    assert (Path(first) / "_metadata").is_file()
    assert "from 1 to 2 subtasks" in in_terminal("rescale", job[:6], "2")
    write(tmp_path / "orders", 1, files[1])
    comes(2)

    last = found(
        r'Draining job "totals", then suspending it with a savepoint\.\s+Savepoint completed\. Path: (\S+)',
        in_terminal("stop", "totals", "--drain", "-p", str(tmp_path / "savepoints")),
    )
    assert "job 'totals' does not run: stopped" in strandline("cancel", "totals", code=4).stderr
    assert strandline("status", "totals").stdout.startswith("totals  stopped after ")
    assert strandline("list", "-a", "--json", places[2]).json[0]["status"] == "stopped"

    write(tmp_path / "orders", 2, files[2])
    in_terminal("run", SCRIPT, "-s", last, "-d", *settings, *places)
    comes(3)
    status = strandline("status", "totals", "--json").json
    assert status["checkpoints"]["restored"]["path"] == f"{last}/_metadata"
    assert (status["id"], status["figures"]["parallelism"]) == (job, 2)
    assert "Stopped job totals" in in_terminal("stop", "totals")
    assert changes(tmp_path / "output" / "changes") == expected(files)
