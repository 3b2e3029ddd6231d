"""Of the rows of a key the first passes, and no other while the key is remembered; a plain model says which."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError
from strandline.operators.base import Operator
from strandline.operators.deduplicate import DeduplicateLimits, DeduplicateOperator
from strandline.state.backends.factory import open_backend
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.clocked import ClockedSlot

Make = Callable[[Operator], ClockedSlot]
INPUT = parse_schema("k string, j long, t timestamp, x long")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(ms: float | None) -> datetime | None:
    return None if ms is None else EPOCH + timedelta(milliseconds=ms)


@pytest.fixture
def slot(tmp_path: Path) -> Make:
    return lambda operator: ClockedSlot(operator, tmp_path)


keys = st.tuples(st.none() | st.sampled_from(["a", "b", "a\0"]), st.none() | st.integers(0, 2))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_passes_follows_a_plain_model(slot: Make, data: st.DataObject) -> None:
    by_event = data.draw(st.booleans(), "by event time")
    ttl = data.draw(st.integers(1, 40)) if by_event else data.draw(st.none() | st.integers(1, 40))
    limits = DeduplicateLimits()
    if data.draw(st.booleans(), "small limits"):
        limits = DeduplicateLimits(gather_rows=2, least_cleaned=1, read_keys=2)
    word = data.draw(st.sampled_from(["drop", "late"])) if by_event else "drop"
    mini = slot(DeduplicateOperator("d", ["k", "j"], INPUT, ttl, "t" if by_event else None, limits, word))
    until: dict[Any, int | None] = {}
    now, watermark, number = 0, None, 0
    for _ in range(data.draw(st.integers(1, 6))):
        now += data.draw(st.integers(0, 30))
        step = data.draw(st.none() | st.integers(0, 30))
        later = watermark if step is None else (watermark or 0) + step
        last = (later or 0) + 30
        times = st.none() | st.integers(0, last) | st.integers(0, 8 * last).map(lambda eighths: eighths / 8)
        drawn = data.draw(st.lists(st.tuples(keys, times), max_size=12))
        rows = []
        for key, time in drawn:
            number += 1
            rows.append((*key, at(time), number))
        known = {key: end for key, end in until.items() if by_event or end is None or end > now}
        expected, late = [], []
        for row, (key, time) in zip(rows, drawn, strict=True):
            if by_event and (time is None or (mini.late is not None and time <= mini.late)):
                late.append(row)
                continue
            moment = ceil(time) if by_event and time is not None else now
            if key not in known or (by_event and moment > (known[key] or 0)):
                known[key] = None if ttl is None else ttl + moment
                expected.append(row)
        commit = data.draw(st.booleans(), "commit")
        assert mini.at(rows, later, now, commit, data.draw(st.lists(st.integers(0, 12), max_size=3))) == expected
        assert mini.operator.late_rows == len(late)
        assert mini.sides == ({"late": late} if word == "late" else {})
        if commit:
            until, watermark = known, later
        if data.draw(st.booleans(), "restart"):
            mini.reopen()


@pytest.mark.parametrize("time_column", [None, "t"])
def test_all_state_is_gone_when_every_key_has_expired(slot: Make, tmp_path: Path, time_column: str | None) -> None:
    mini = slot(DeduplicateOperator("d", ["j"], INPUT, 100, time_column))
    mini.backend, mini.memory = open_backend("rocksdb", tmp_path / "db"), 100_000
    rows = [("a", n, at(n % 50), n) for n in range(3000)]
    assert len(mini.at(rows, watermark=-1, now=0)) == 3000
    assert mini.entries() > 3000
    assert mini.at(rows[:10], watermark=-1, now=50) == []
    mini.at([], watermark=151, now=151)
    assert mini.entries() == 0
    again = [("a", 1, at(200), 1)]
    assert mini.at(again, watermark=151, now=200) == again
    mini.backend.close()


def test_cleaning_is_bounded_and_what_waits_for_it_is_not_known(slot: Make) -> None:
    mini = slot(DeduplicateOperator("d", ["j"], INPUT, 100, limits=DeduplicateLimits(least_cleaned=100)))
    rows = [("a" * (n % 40), n, None, n) for n in range(3000)]
    mini.at(rows, now=0)
    before = mini.entries()
    mini.at([], now=100)
    assert 0 < mini.entries() < before
    assert mini.at(rows, now=100) == rows
    for _ in range(40):
        mini.at([], now=150)
    # What was renewed stays, whatever the index still had of its first time.
    assert mini.at(rows, now=199) == []
    assert len(mini.at(rows, now=200)) == 3000


def test_a_repeated_batch_passes_the_same_rows(slot: Make) -> None:
    mini = slot(DeduplicateOperator("d", ["k"], INPUT, 10, "t"))
    rows = [("a", 1, at(5), 1), ("a", 2, at(6), 2), ("b", 1, at(7), 3)]
    for commit in (False, False, True):
        assert mini.at(rows, watermark=20, commit=commit) == [rows[0], rows[2]]
    assert mini.entries() == 0


def test_a_row_less_than_a_millisecond_after_the_watermark_is_not_late(slot: Make) -> None:
    mini = slot(DeduplicateOperator("d", ["k"], INPUT, 10, "t"))
    mini.at([], watermark=5)
    rows = [("a", 1, at(5), 1), ("b", 1, at(5.001), 2), ("b", 1, at(15.001), 3)]
    assert mini.at(rows, watermark=15) == [rows[1]]
    assert mini.operator.late_rows == 1
    assert mini.at([("b", 1, at(15.001), 4)], watermark=15) == []  # 10 ms after the first one, and not more
    assert mini.at([], watermark=16) == []
    assert mini.entries() == 0


def test_nested_keys_and_payloads(slot: Make) -> None:
    schema = parse_schema("k array<int>, m map<string,long>")
    mini = slot(DeduplicateOperator("d", ["k"], schema, None))
    rows = [([1], [("a", 1)]), ([1], None), ([2], None)]
    assert mini.at(rows) == [rows[0], rows[2]]
    mini.reopen()
    assert mini.at(rows) == []


@pytest.mark.parametrize(
    ("keys", "ttl", "time", "told"),
    [
        (["kk"], None, None, "no column 'kk'; did you mean 'k'"),
        (["k"], 0, None, "ttl is 0 ms"),
        (["k"], True, None, "ttl is True ms"),
        (["k"], None, "t", "needs ttl="),
        (["k"], 5, "x", "the time column 'x' is of type bigint, not a timestamp; convert it first"),
        (["k"], 5, "tt", "no column 'tt'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_job_is_built(keys: Any, ttl: Any, time: Any, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=told) as caught:
        DeduplicateOperator("once", keys, INPUT, ttl, time)
    assert "operator 'once'" in str(caught.value)


@pytest.mark.parametrize(
    ("late", "time", "told"),
    [
        ("keep", "t", "late='keep' is not possible here: the key of a late row may be forgotten"),
        ("aside", None, "late='aside' needs within=: only by event time are rows late"),
        ("", "t", "late='' is not valid; use 'drop' or the name of a side output"),
    ],
)
def test_a_wrong_word_for_late_rows_is_refused(late: str, time: str | None, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=f"^operator 'once': {told}"):
        DeduplicateOperator("once", ["k"], INPUT, 5, time, late=late)
