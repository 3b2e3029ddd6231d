"""A join gives each pair and each row without a partner exactly once; a plain model says which, and in which batch."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError
from strandline.operators.base import Operator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.limits import DEFAULT_LIMITS, JoinLimits
from strandline.operators.join.matching import matching
from strandline.state.backends.factory import open_backend
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.clocked import ClockedSlot

Make = Callable[[Operator], ClockedSlot]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEFTS = parse_schema("k string, j int, lt timestamp, x long")
RIGHTS = parse_schema("y string, k string, i long, rt timestamp")
Row = tuple[Any, ...]


def at(us: int | None) -> datetime | None:
    return None if us is None else EPOCH + timedelta(microseconds=us)


@pytest.fixture
def slot(tmp_path: Path) -> Make:
    return lambda operator: ClockedSlot(operator, tmp_path)


SMALL = JoinLimits(largest_slice=4, smallest_slice=1, slice_bytes=100, output_rows=3, chunk_bytes=60, read_keys=2)


def joined(
    how: Any = "inner",
    lower: int | None = None,
    upper: int | None = None,
    limits: JoinLimits = DEFAULT_LIMITS,
    late: str = "drop",
) -> JoinOperator:
    left_time, right_time = (None, None) if lower is None else ("lt", "rt")
    columns = ["k", "j"], ["k", "i"], LEFTS, RIGHTS
    return JoinOperator("j", *columns, how, left_time, right_time, lower, upper, limits, late)


def tagged(operator: JoinOperator, lefts: list[dict[str, Any]], rights: list[dict[str, Any]]) -> list[Row]:
    """The one input that a planner makes of both sides."""
    rows = []
    for side, name in ((0, "left"), (1, "right")):
        for row in (lefts, rights)[side]:
            values = {c.name: row[source] if (source := getattr(c, name)) else None for c in operator.input_columns}
            values["__sl_side"] = side
            rows.append(tuple(values[column] for column in operator.input_struct.fieldNames()))
    return rows


def output(left: dict[str, Any] | None, right: dict[str, Any] | None) -> Row:
    one, other = left or {}, right or {}
    key = (left or right or {})["k"]
    return (key, *(one.get(name) for name in ("j", "lt", "x")), *(other.get(name) for name in ("y", "i", "rt")))


class Model:
    """All rows that ever joined or may join, and who had a partner."""

    def __init__(self, how: str, lower: int | None, upper: int | None) -> None:
        self.shown = how in ("left", "full"), how in ("right", "full")
        self.lower, self.upper = lower, upper
        self.rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        self.waiting: list[tuple[int, dict[str, Any]]] = []

    def batch(
        self, lefts: Any, rights: Any, late: int | None, watermark: int | None
    ) -> tuple[list[Row], tuple[list[Row], list[Row]]]:
        """The rows that come out, and the late rows of each side."""
        made: list[Row] = []
        dropped: tuple[list[Row], list[Row]] = ([], [])
        for side, rows in ((0, lefts), (1, rights)):
            for row in rows:
                time = row["us"]
                if self.lower is not None and late is not None and time is not None and time <= 1000 * late:
                    dropped[side].append(tuple(row[name] for name in (LEFTS, RIGHTS)[side].names))
                    continue
                if None in (row["k"], row["n"]) or (self.lower is not None and time is None):
                    if self.shown[side]:
                        made.append(output(row, None) if side == 0 else output(None, row))
                    continue
                for other in self.rows[1 - side]:
                    left, right = (row, other) if side == 0 else (other, row)
                    if self.meet(left, right):
                        made.append(output(left, right))
                        self.waiting = [(s, w) for s, w in self.waiting if w is not row and w is not other]
                        row["met"] = True
                self.rows[side].append(row)
                if self.shown[side] and "met" not in row:
                    self.waiting.append((side, row))
        for side, row in list(self.waiting):
            last = row["us"] + 1000 * (self.upper if side == 0 else -self.lower)  # type: ignore[operator]
            if watermark is not None and last <= 1000 * watermark:
                made.append(output(row, None) if side == 0 else output(None, row))
                self.waiting.remove((side, row))
        return made, dropped

    def meet(self, left: dict[str, Any], right: dict[str, Any]) -> bool:
        if (left["k"], left["n"]) != (right["k"], right["n"]):
            return False
        if self.lower is None or self.upper is None:
            return True
        return bool(left["us"] + 1000 * self.lower <= right["us"] <= left["us"] + 1000 * self.upper)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_comes_out_follows_a_plain_model(slot: Make, data: st.DataObject) -> None:
    timed = data.draw(st.integers(0, 3), "timed") > 0
    how = data.draw(st.sampled_from(["inner", "left", "right", "full"])) if timed else "inner"
    lower = data.draw(st.integers(-30, 20)) if timed else None
    upper = None if lower is None else lower + data.draw(st.integers(0, 9) | st.integers(10, 60))
    limits = DEFAULT_LIMITS
    if data.draw(st.booleans(), "small limits"):
        limits = SMALL
    if data.draw(st.booleans(), "small buckets"):
        limits = replace(limits, least_bucket_us=7000)
    word = data.draw(st.sampled_from(["drop", "late"])) if timed else "drop"
    mini = slot(joined(how, lower, upper, limits, word))
    model, watermark, number = Model(how, lower, upper), None, 0
    keys = st.sampled_from([("a", 0)] * 6 + [("b", 0), ("a", 1), (None, 0), ("a", None)])

    def side(last: int, **own: str) -> list[dict[str, Any]]:
        nonlocal number
        rows = []
        whole = st.integers(max(0, last - 60), last).map(lambda ms: 1000 * ms)
        times = whole | whole | st.integers(-5000, 1000 * last) | st.none()
        for (key, n), us in data.draw(st.lists(st.tuples(keys, times), max_size=8)):
            number += 1
            row = {"k": key, "n": n, "us": us, own["n"]: n, own["us"]: at(us), own["id"]: number}
            if own["id"] == "y":
                row["y"] = None if number % 5 == 0 else "y" * (number % 4) + str(number)
            rows.append(row)
        return rows

    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.none() | st.integers(0, 30))
        later = watermark if step is None else (watermark or 0) + step
        last = (later or 0) + 40
        lefts, rights = side(last, n="j", us="lt", id="x"), side(last, n="i", us="rt", id="y")
        rows = data.draw(st.permutations(tagged(mini.operator, lefts, rights)))  # type: ignore[arg-type]
        commit = data.draw(st.integers(0, 3), "commit") > 0
        tried = model if commit else pickle.loads(pickle.dumps(model))
        expected, late = tried.batch(lefts, rights, mini.late, later)
        made = mini.at(rows, later, commit=commit, cuts=data.draw(st.lists(st.integers(0, 20), max_size=3)))
        assert Counter(made) == Counter(expected)
        assert mini.operator.late_rows == sum(map(len, late))
        if word == "late":
            assert [Counter(mini.sides[f"late_{side}"]) for side in ("left", "right")] == [*map(Counter, late)]
        if how != "inner" and later is not None and mini.operator.next_timer_ms is not None:
            assert mini.operator.next_timer_ms > later
        assert bool(tried.waiting) <= (mini.operator.next_timer_ms is not None)
        watermark = later if commit else watermark
        if data.draw(st.booleans(), "restart"):
            mini.reopen()
    if timed:
        mini.at([], (watermark or 0) + 100_000)
        assert mini.entries() == 0


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@pytest.mark.parametrize(("lower", "upper", "on_disk"), [(-20, 20, True), (5, 25, False), (0, 0, False)])
def test_larger_batches_follow_the_model_too(
    slot: Make, tmp_path: Path, how: str, lower: int, upper: int, on_disk: bool
) -> None:
    chance = Random(f"{how} {lower}")
    mini = slot(joined(how, lower, upper, JoinLimits(least_bucket_us=7000)))
    if on_disk:
        mini.backend, mini.memory = open_backend("rocksdb", tmp_path / "db"), 4000
    model = Model(how, lower, upper)
    for batch in range(1, 9):
        sides: list[list[dict[str, Any]]] = []
        for n_name, time_name, id_name in (("j", "lt", "x"), ("i", "rt", "y")):
            rows = []
            for _ in range(40):
                n, us = chance.randrange(8), 1000 * chance.randrange(20 * batch - 30, 20 * batch + 40)
                number: Any = chance.randrange(10**9)
                named = {n_name: n, time_name: at(us), id_name: number if id_name == "x" else str(number)}
                rows.append({"k": "a", "n": n, "us": us} | named)
            sides.append(rows)
        lefts, rights = sides
        expected, late = model.batch(lefts, rights, mini.late, 20 * batch)
        assert Counter(mini.at(tagged(mini.operator, lefts, rights), 20 * batch)) == Counter(expected)  # type: ignore[arg-type]
        assert mini.operator.late_rows == sum(map(len, late))
    assert all(late)
    mini.backend.close()


points = st.integers(0, 5) | st.sampled_from([-(10**17), 10**17])


@given(
    st.lists(st.tuples(st.integers(0, 3), points, st.integers(0, 3))), st.lists(st.tuples(st.integers(0, 3), points))
)
def test_ranges_of_time_are_found_however_far_apart(queries: Any, targets: Any) -> None:
    ask = np.array(queries, np.int64).reshape(-1, 3)
    have = np.array(targets, np.int64).reshape(-1, 2)
    expected = {
        (q, t)
        for q, (key, low, span) in enumerate(queries)
        for t, (other, time) in enumerate(targets)
        if key == other and low <= time <= low + span
    }
    for largest in (1 << 62, 0):
        found = matching(ask[:, 0], ask[:, 1], ask[:, 1] + ask[:, 2], have[:, 0], have[:, 1], largest)
        pairs = [found.pairs(start, start + 2) for start in range(0, len(found), 2)]
        assert sorted((int(q), int(t)) for qs, ts in pairs for q, t in zip(qs, ts, strict=True)) == sorted(expected)
        assert np.flatnonzero(found.queries()).tolist() == sorted({q for q, _ in expected})
        assert np.flatnonzero(found.targets()).tolist() == sorted({t for _, t in expected})


def row_of(number: int, key: str = "a", us: int = 0) -> dict[str, Any]:
    return {"k": key, "j": 1, "i": 1, "lt": at(us), "rt": at(us), "x": number, "y": str(number)}


def test_a_hot_key_is_not_rewritten_as_a_whole(slot: Make) -> None:
    mini = slot(joined(limits=JoinLimits(chunk_bytes=2000)))
    operator: Any = mini.operator
    assert mini.at(tagged(operator, [row_of(0)], [])) == []
    for batch in range(20):
        assert len(mini.at(tagged(operator, [], [row_of(n) for n in range(batch * 50, batch * 50 + 50)]))) == 50
    assert mini.entries() > 10
    assert len(mini.at(tagged(operator, [row_of(1)], []))) == 1000


def test_a_row_without_partner_comes_out_once_and_one_with_a_partner_never(slot: Make) -> None:
    mini = slot(joined("full", -10, 10))
    operator: Any = mini.operator
    lefts = [row_of(1, "a", 5000), row_of(2, "b", 5000)]
    assert mini.at(tagged(operator, lefts, []), watermark=0) == []
    assert operator.next_timer_ms == 15
    rights = [row_of(3, "a", 14_000)]
    for commit in (False, True):
        made = mini.at(tagged(operator, [], rights), watermark=15, commit=commit)
        assert sorted(made, key=str) == [output(lefts[0], rights[0]), output(lefts[1], None)]
    assert mini.at([], watermark=1000) == []
    assert mini.at([], watermark=10_000) == []
    assert mini.entries() == 0
    assert mini.operator.next_timer_ms is None


def test_a_row_less_than_a_millisecond_after_the_watermark_is_not_late(slot: Make) -> None:
    mini = slot(joined("left", 0, 10))
    operator: Any = mini.operator
    left, late, right = row_of(1, "a", 5001), row_of(2, "a", 5000), row_of(3, "a", 15_001)
    mini.at([], watermark=5)
    assert mini.at(tagged(operator, [left, late], []), watermark=15) == []  # a partner may come, at 15.001
    assert operator.late_rows == 1
    assert mini.at(tagged(operator, [], [right]), watermark=15) == [output(left, right)]


def test_many_keys_with_nested_columns(slot: Make) -> None:
    left = parse_schema("k long, a array<struct<p:int,q:string>>")
    right = parse_schema("k int, m map<string,long>, d decimal(10,2)")
    operator = JoinOperator("j", ["k"], ["k"], left, right)
    mini = slot(operator)
    assert operator.output_struct.simpleString() == (
        "struct<k:bigint,a:array<struct<p:int,q:string>>,m:map<string,bigint>,d:decimal(10,2)>"
    )
    lefts = [{"k": n, "a": [{"p": n, "q": "x"}, None]} for n in range(2000)]
    rights = [{"k": n, "m": [("z", n)], "d": None} for n in range(1000, 3000)]
    assert mini.at(tagged(operator, lefts, [])) == []
    mini.reopen()
    made = mini.at(tagged(operator, [], rights))
    assert sorted(made, key=str) == sorted(
        ((n, [{"p": n, "q": "x"}, None], [("z", n)], None) for n in range(1000, 2000)), key=str
    )


def test_the_input_is_described_for_the_planner() -> None:
    operator = JoinOperator("j", ["j", "k"], ["i", "k"], LEFTS, RIGHTS)
    described = [(c.name, c.data_type.simpleString(), c.left, c.right) for c in operator.input_columns]
    assert described == [
        ("j", "bigint", "j", "i"),
        ("k", "string", "k", "k"),
        ("__sl_l_1", "int", "j", None),
        ("__sl_l_2", "timestamp", "lt", None),
        ("__sl_l_3", "bigint", "x", None),
        ("__sl_r_0", "string", None, "y"),
        ("__sl_r_2", "bigint", None, "i"),
        ("__sl_r_3", "timestamp", None, "rt"),
    ]
    assert operator.input_struct.fieldNames()[:3] == ["j", "k", "__sl_side"]
    assert operator.output_struct.fieldNames() == ["k", "j", "lt", "x", "y", "i", "rt"]
    assert operator.time_mode == "none"
    assert joined("inner", 0, 0).time_mode == "event"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"how": "outer"}, "how='outer' is not valid; use inner, left, right or full"),
        ({"how": "left"}, "a left join needs the time columns of both sides"),
        ({"left_time": "lt"}, "time columns of both sides, or of none"),
        ({"lower_ms": 0, "upper_ms": 1}, "bounds in time need the time columns"),
        ({"left_time": "lt", "right_time": "rt"}, "needs a lower and an upper bound; give both"),
        ({"left_time": "lt", "right_time": "rt", "lower_ms": 5, "upper_ms": 1}, "lower bound 5 ms is above the upper"),
        (
            {"left_time": "x", "right_time": "rt", "lower_ms": 0, "upper_ms": 1},
            "'x' is of type bigint, not a timestamp; convert it first",
        ),
        ({"right_keys": ["kk", "i"]}, "no column 'kk'; did you mean 'k'"),
        ({"right_keys": ["k"]}, "2 key columns on the left and 1 on the right"),
        ({"left_keys": ["k", "k"]}, "given twice"),
        ({"left_keys": ["k", "lt"]}, "'lt' on the left is timestamp, 'i' on the right is bigint; cast one"),
        ({"left_keys": ["j"], "right_keys": ["i"]}, "both sides have a column 'k'; rename it on one side"),
        ({"late": "keep"}, "late='keep' is not possible here: the partners of a late row may be forgotten"),
        ({"late": "aside"}, "late='aside' needs within=: only by event time are rows late"),
    ],
)
def test_a_wrong_join_is_refused_when_the_job_is_built(changed: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"left_keys": ["k", "j"], "right_keys": ["k", "i"]}
    with pytest.raises(JobDefinitionError, match=told) as caught:
        JoinOperator("both", **(arguments | {"left_schema": LEFTS, "right_schema": RIGHTS} | changed))
    assert "operator 'both'" in str(caught.value)
