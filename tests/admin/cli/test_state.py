"""`strandline state ls` and `strandline state read`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.admin.cli.main import app
from strandline.admin.problems import UsageError
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from tests.state_reader.written import Written, group_of

INPUT = parse_schema("user string, day date, x long")


class Last(sl.KeyedProcessor):
    """Keeps the last x, with a time to live, and all of them."""

    def open(self, context: Any) -> None:
        self.last = context.value_state("last", "x long, raw binary, rate double", ttl="1h")
        self.all = context.list_state("all", "x long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            self.last.update((row.x, b"\x00", float("nan")))
            self.all.append_value(row.x)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """A job with 50 keys."""
    from datetime import date

    operator = ProcessOperator("last", Last(), ["user", "day"], INPUT, parse_schema("user string"))
    with Written(tmp_path_factory.mktemp("job"), [operator]) as job:
        job.run({"last": [(f"u{at}\x1b[2J", date(2026, 1, 1), at) for at in range(50)]})
        job.checkpoint()
        yield job


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["state", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_ls_shows_the_states_with_their_columns(job: Written) -> None:
    facts = json.loads(invoke("ls", job.job, "--json"))
    assert (facts["job"], facts["kind"], facts["id"]) == ("log", "checkpoint", 1)
    assert facts["operators"]["last"] > 0
    last, every = facts["states"]
    assert (last["operator"], last["state"], last["kind"], last["ttl_ms"]) == ("last", "last", "value", 3_600_000)
    assert [name for name, _ in last["columns"]] == ["user", "day", "key_group", "x", "raw", "rate", "expiry"]
    assert every["key"] == ["user", "day"]
    shown = invoke("ls", job.job)
    assert "checkpoint 1 of job log" in shown.replace("\n", " ")


def test_read_prints_rows_in_every_format(job: Written, tmp_path: Path) -> None:
    names = ("--operator", "last", "--state", "last")
    lines = [json.loads(line) for line in invoke("read", job.job, *names, "--format", "json").splitlines()]
    assert sorted(line["x"] for line in lines) == list(range(50))
    first = next(line for line in lines if line["x"] == 0)
    assert (first["day"], first["raw"], first["rate"], first["expiry"]) == (
        *("2026-01-01", "AA==", "nan"),
        "1970-01-01T01:00:00+00:00",
    )
    rows = list(csv.DictReader(io.StringIO(invoke("read", job.job, *names, "--format", "csv", "--limit", "7"))))
    assert len(rows) == 7
    assert rows[0].keys() == first.keys()
    file = tmp_path / "rows.parquet"
    assert invoke("read", job.job, *names, "--format", "parquet", "--output", str(file)) == ""
    assert sorted(pq.read_table(file).column("x").to_pylist()) == list(range(50))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
    table = invoke("read", job.job, *names)
    assert table.count("2026-01-01") == 20
    assert "\x1b[2J" not in table
    assert invoke("read", job.job, *names, "--limit", "0", "--format", "json") == ""


def test_read_finds_one_key(job: Written) -> None:
    user = "u7\x1b[2J"
    found = invoke("read", job.job, "--state", "all", "--key", user, "--key", "2026-01-01", "--format", "json")
    from datetime import date

    group = group_of((user, date(2026, 1, 1)))
    assert json.loads(found) == {"user": user, "day": "2026-01-01", "key_group": group, "index": 0, "x": 7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--key", "a"], "the key columns are user, day: give --key once for each"),
        (["--key", "a", "--key", "b"], "--key 'b': the key column 'day' is date32"),
        (["--format", "parquet"], "give --output FILE"),
        (["--output", "x"], "--output needs --format json, csv or parquet"),
    ],
)
def test_wrong_options_say_what_is_right(job: Written, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        invoke("read", job.job, "--state", "all", *arguments)
