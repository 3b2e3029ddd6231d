"""`sl.read_state` of the steps without user code: what a row is, and which names the columns have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import strandline as sl
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import decode, encode
from strandline.checkpoint.steps import ShownAggregate
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.base import Operator
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.process.arrow_operator import ArrowProcessOperator
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.coding.ddl import parse_schema
from strandline.state_reader.reader import Selection, StateTable
from tests.runtime.taskmanager.changelog.host import JOB
from tests.state_reader.written import Written, group_of

INPUT = parse_schema("user string, x long, ts timestamp")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ROWS = [(f"u{at % 5}", at, EPOCH + timedelta(seconds=at * 20)) for at in range(30)]
MINUTE = timedelta(minutes=1)


def written(folder: Path, operator: Operator, rows: Sequence[tuple[Any, ...]], **times: Any) -> str:
    """A checkpoint with the state of one operator after two batches."""
    with Written(folder, [operator]) as job:
        job.run({operator.uid: rows[: len(rows) // 2]}, **times)
        job.run({operator.uid: rows[len(rows) // 2 :]}, **times)
        return job.checkpoint()


def read(path: str, *names: str, **options: Any) -> list[dict[str, Any]]:
    rows = sl.read_state(path, *names, **options).read_all().to_pylist()
    return sorted(rows, key=repr)


class Median(sl.ArrowAggregate):
    """Keeps the sum, whatever its name says."""

    state_schema = pa.schema([pa.field("total", pa.int64())])
    result_type = "long"

    def partial(self, rows: pa.Table) -> pa.Table:
        return rows.group_by("group_id").aggregate([("x", "sum")]).rename_columns(["group_id", "total"])

    def merge(self, states: pa.Table) -> pa.Table:
        return states.group_by("group_id").aggregate([("total", "sum")]).rename_columns(["group_id", "total"])

    def result(self, states: pa.Table) -> Any:
        return states.column("total")


def test_aggregates_have_the_names_of_the_job(tmp_path: Path) -> None:
    aggregates = {
        "n": sl.count(),
        "mean": sl.avg("x"),
        "until": sl.max("ts"),
        "all": sl.collect_list("x"),
        "newest": sl.last("x", ignore_nulls=True),
        "about": sl.approx_count_distinct("x"),
    }
    path = written(tmp_path, AggregateOperator("totals", ["user"], INPUT, aggregates), ROWS)
    expected = []
    for user in sorted({row[0] for row in ROWS}):
        own = [row for row in ROWS if row[0] == user]
        xs = [row[1] for row in own]
        expected.append(
            {
                "user": user,
                "key_group": group_of((user,)),
                "n": len(own),
                "mean": sum(xs) / len(xs),
                "until": own[-1][2],
                "all": xs,
                "newest": xs[-1],
                "about": len(xs),
            }
        )
    assert read(path, "totals") == read(path, "totals", "aggregates") == expected
    assert read(path, "totals", key="u3") == expected[3:4]


def test_accumulators_without_a_known_name_are_shown_as_they_are_stored(tmp_path: Path) -> None:
    path = written(
        tmp_path, AggregateOperator("totals", ["user"], INPUT, {"n": sl.count(), "mine": Median()("x")}), ROWS
    )
    (first, *_) = read(path, "totals")
    assert first == {"user": "u0", "key_group": group_of(("u0",)), "n": 6, "user:mine:total": 75}
    file = Path(path, "_metadata")
    metadata = decode(file.read_bytes(), "here", Home(JOB, 1))
    steps = tuple(msgspec.structs.replace(step, results=()) for step in metadata.steps)
    file.chmod(0o600)
    file.write_bytes(encode(msgspec.structs.replace(metadata, steps=steps)))
    (first, *_) = read(path, "totals")
    assert first == {"user": "u0", "key_group": group_of(("u0",)), "count": 6, "user:mine:total": 75}


def test_tumbling_windows_and_sessions_are_rows(tmp_path: Path) -> None:
    tumbling = WindowOperator("w", ["user"], INPUT, sl.tumbling("1m"), "ts", {"s": sl.sum("x")})
    path = written(tmp_path / "tumbling", tumbling, ROWS)
    sums: dict[tuple[str, datetime], int] = {}
    for user, x, ts in ROWS:
        start = EPOCH + (ts - EPOCH) // MINUTE * MINUTE
        sums[user, start] = sums.get((user, start), 0) + x
    found = {(row["user"], row["window_start"]): row for row in read(path, "w", "windows")}
    assert {at: row["s"] for at, row in found.items()} == sums
    assert all(row["window_end"] == start + MINUTE for (_, start), row in found.items())
    assert {row["user"] for row in read(path, "w", key="u2")} == {"u2"}

    session = WindowOperator("w", ["user"], INPUT, sl.session("1m"), "ts", {"n": sl.count()})
    path = written(tmp_path / "session", session, [("a", 1, EPOCH), ("a", 2, EPOCH + MINUTE / 2), ("b", 1, EPOCH)])
    assert [(row["user"], row["window_start"], row["window_end"], row["n"]) for row in read(path, "w")] == [
        ("a", EPOCH, EPOCH + 1.5 * MINUTE, 2),
        ("b", EPOCH, EPOCH + MINUTE, 1),
    ]


def test_sliding_windows_show_their_panes(tmp_path: Path) -> None:
    sliding = WindowOperator("w", ["user"], INPUT, sl.sliding("2m", "1m"), "ts", {"n": sl.count()})
    path = written(tmp_path, sliding, [("a", 1, EPOCH), ("a", 2, EPOCH + MINUTE)])
    assert [(row["pane_start"], row["pane_end"], row["n"]) for row in read(path, "w", "panes")] == [
        (EPOCH, EPOCH + MINUTE, 1),
        (EPOCH + MINUTE, EPOCH + 2 * MINUTE, 1),
    ]


@pytest.mark.parametrize("ttl_ms", [None, 60_000])
def test_deduplication_shows_until_when_keys_are_remembered(tmp_path: Path, ttl_ms: int | None) -> None:
    path = written(tmp_path, DeduplicateOperator("first", ["user"], INPUT, ttl_ms), ROWS, processing_ms=5000)
    expiry = None if ttl_ms is None else EPOCH + timedelta(seconds=65)
    assert read(path, "first", "seen") == [
        {"user": f"u{at}", "key_group": group_of((f"u{at}",)), "expiry": expiry} for at in range(5)
    ]


def test_a_join_shows_the_rows_of_each_side(tmp_path: Path) -> None:
    left, right = parse_schema("user string, x long, ts timestamp"), parse_schema("user string, y string, at timestamp")
    join = JoinOperator("j", ["user"], ["user"], left, right, "inner", "ts", "at", -60_000, 60_000)
    rows = [("a", 0, 1, EPOCH, None, None), ("a", 1, None, None, "z", EPOCH), ("b", 0, 2, EPOCH, None, None)]
    path = written(tmp_path, join, rows)
    assert [(row["user"], row["x"], row["ts"]) for row in read(path, "j", "left")] == [("a", 1, EPOCH), ("b", 2, EPOCH)]
    assert read(path, "j", "right") == [{"user": "a", "key_group": group_of(("a",)), "y": "z", "at": EPOCH}]
    assert [row["x"] for row in read(path, "j", "left", key="b")] == [2]
    with pytest.raises(sl.StrandlineError, match="name one: left, right"):
        sl.read_state(path, "j")


class Remember(sl.ArrowProcessor):
    """Keeps the last row of each key."""

    def open(self, context: Any) -> None:
        self.last = context.value_state("last", "x long, tags array<string>")

    def process(self, table: pa.Table, context: Any) -> None:
        keys = table.select(["user"]).group_by("user").aggregate([]).num_rows
        self.last.put_many(None, pa.table({"x": pa.array([7] * keys), "tags": pa.array([["t"]] * keys)}))


def test_the_state_of_an_arrow_processor_is_a_table(tmp_path: Path) -> None:
    operator = ArrowProcessOperator("arrow", Remember(), ["user"], INPUT, parse_schema("user string"))
    path = written(tmp_path, operator, ROWS)
    assert read(path, "arrow", "last", key="u1") == [
        {"user": "u1", "key_group": group_of(("u1",)), "x": 7, "tags": ["t"]}
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"times": ()},
        {"parameters": {}},
        {"keys": (("user", "strng"),)},
        {"kind": "session"},
        {"results": (ShownAggregate("n", "median", "x", "long"),)},
    ],
)
def test_a_step_that_cannot_exist_is_an_error_of_the_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = written(tmp_path, WindowOperator("w", ["user"], INPUT, sl.tumbling("1m"), "ts", {"n": sl.count()}), ROWS)
    file = Path(path, "_metadata")
    metadata = decode(file.read_bytes(), "here", Home(JOB, 1))
    steps = tuple(msgspec.structs.replace(step, **changes) for step in metadata.steps)
    file.chmod(0o600)
    file.write_bytes(encode(msgspec.structs.replace(metadata, steps=steps)))
    with pytest.raises(sl.IncompatibleCheckpointError, match=r"cannot exist|does not say"):
        sl.read_state(path, "w")


def test_keys_of_other_columns_than_described_are_damage(tmp_path: Path) -> None:
    path = written(tmp_path, AggregateOperator("totals", ["user"], INPUT, {"n": sl.count()}), ROWS)
    file = Path(path, "_metadata")
    metadata = decode(file.read_bytes(), "here", Home(JOB, 1))
    for keys in ((("user", "string"), ("more", "bigint")), (("a", "string"), ("b", "string")), (("u", "array<int>"),)):
        steps = tuple(msgspec.structs.replace(step, keys=keys) for step in metadata.steps)
        file.chmod(0o600)
        file.write_bytes(encode(msgspec.structs.replace(metadata, steps=steps)))
        rows = StateTable.open(path, "totals", None).batches(Selection())
        with pytest.raises(sl.DamagedFileError, match="are not what the checkpoint says"):
            list(rows)
