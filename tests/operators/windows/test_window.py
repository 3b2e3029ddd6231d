"""Window operators: what they emit when, what they refuse, and that nothing is left in state."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.aggregate import functions as agg
from strandline.operators.windows.limits import WindowLimits
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, session, sliding, tumbling
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.backends.factory import open_backend
from strandline.state.coding.ddl import parse_schema
from tests.operators.windows.window_slot import WindowSlot, at, window

INPUT = parse_schema("k string, t timestamp, x long")
COUNT = {"n": agg.count()}
SPECS = [tumbling("10ms"), sliding("30ms", "10ms"), sliding("50ms", "20ms", offset="5ms"), session("10ms")]

Start = Callable[..., WindowSlot]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def started(spec: Any, aggregates: Any = COUNT, **options: Any) -> WindowSlot:
        return WindowSlot(WindowOperator("w", ["k"], INPUT, spec, "t", aggregates, **options), tmp_path)

    return started


def test_specifications_are_read_and_checked() -> None:
    assert tumbling("1m") == SlidingWindow(60_000, 60_000)
    assert sliding("10m", timedelta(minutes=1), offset="5s") == SlidingWindow(600_000, 60_000, 5_000)
    assert sliding("9s", "6s").pane_ms == 3_000
    assert session("5m") == SessionWindow(300_000)
    wrong: list[Any] = ["0s", "a while", -1, 0.0001]
    for size in wrong:
        with pytest.raises(JobDefinitionError, match="size="):
            tumbling(size)
    with pytest.raises(JobDefinitionError, match="cannot slide by 2000 ms"):
        sliding("1s", "2s")
    with pytest.raises(JobDefinitionError, match="gap"):
        session(0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"time_column": "tt"}, "no column 'tt'; did you mean 't'"),
        ({"time_column": "zzz"}, "no column 'zzz'; the columns are k, t, x, d"),
        ({"time_column": "x"}, "the time column 'x' is of type bigint, not a timestamp; convert it first"),
        ({"time_column": "d"}, "the time column 'd' is of type date"),
        ({"key_columns": ["kk"]}, "no column 'kk'; did you mean 'k'"),
        ({"aggregates": {"n": agg.sum("y")}}, "no column 'y'"),
        (
            {"aggregates": {"window_start": agg.count()}},
            r"'window_start' is an output column of windows; give count\(\) another",
        ),
        ({"aggregates": {"k": agg.count()}}, "'k' is a key column"),
        ({"key_columns": ["window_end"]}, "key column 'window_end'"),
        ({"late": "keep"}, "late='keep' is not possible here: the windows of a late row are closed"),
        ({"key_columns": ["l"]}, "windows take keys of plain types"),
        ({"spec": "1m"}, "'1m' is not a window; use one such as"),
        ({"allowed_lateness_ms": -1}, "must not be negative"),
        ({"emit": "sometimes"}, "emit='sometimes' is not valid; use 'close' or 'update'"),
        ({"late": ""}, "'drop' or the name of a side output"),
    ],
)
def test_a_wrong_definition_is_refused_when_the_job_is_built(options: dict[str, Any], told: str) -> None:
    schema = parse_schema("k string, t timestamp, x long, d date, window_end long, l array<int>")
    whole: dict[str, Any] = {
        "key_columns": ["k"],
        "spec": tumbling("1s"),
        "time_column": "t",
        "aggregates": COUNT,
    } | options
    with pytest.raises(JobDefinitionError, match=told) as caught:
        WindowOperator("w", input_schema=schema, **whole)
    assert "operator 'w'" in str(caught.value)


def test_the_output_has_the_key_the_window_and_the_aggregates() -> None:
    operator = WindowOperator("w", ["k"], INPUT, tumbling("1s"), "t", COUNT)
    assert operator.output_struct.simpleString() == (
        "struct<k:string,window_start:timestamp,window_end:timestamp,window_time:timestamp,n:bigint>"
    )
    assert operator.needed_columns == ("k", "t")
    assert operator.time_mode == "event"
    assert not operator.side_outputs
    local = WindowOperator("w", ["k"], parse_schema("k long, t timestamp_ntz"), session("1s"), "t", COUNT, late="late")
    assert local.output_struct["window_end"].dataType.simpleString() == "timestamp_ntz"
    assert local.side_outputs == {"late": local.input_struct}


@pytest.mark.parametrize("spec", SPECS)
def test_the_operator_travels_and_describes_its_states(spec: Any) -> None:
    operator = WindowOperator("w", ["k"], INPUT, spec, "t", {"m": agg.avg("x")}, 5, "update", "late")
    again = pickle.loads(pickle.dumps(operator))
    assert again.__reduce__()[1] == operator.__reduce__()[1]
    assert [state.kind for state in again.states()] == ["aggregate"] * len(again.states())


def test_a_window_closes_when_the_watermark_reaches_its_end(start: Start) -> None:
    slot = start(tumbling("10ms"))
    assert slot.run([("a", at(0), 1), ("a", at(9.999), 1), ("b", at(10), 1), ("a", at(-0.001), 1)], None) == []
    assert slot.operator.next_timer_ms == 0
    assert slot.run([], 9) == [("a", *window(-10, 0), 1)]
    assert slot.operator.next_timer_ms == 10
    assert slot.run([("a", at(5), 1)], 10) == [("a", *window(0, 10), 3)]
    assert slot.run([("a", at(5), 1), ("a", None, 1)], 15) == []
    assert slot.operator.late_rows == 1
    assert slot.run([], 20) == [("b", *window(10, 20), 1)]
    next_timer: int | None = slot.operator.next_timer_ms
    assert (next_timer, slot.entries()) == (None, 0)


def test_a_sliding_window_is_merged_from_the_panes_that_have_rows(start: Start) -> None:
    slot = start(sliding("30ms", "10ms"), {"n": agg.count(), "x": agg.sum("x")})
    assert slot.run([("a", at(0), 1), ("a", at(20), 2), ("b", at(10), 4)], None) == []
    assert slot.operator.next_timer_ms == 10
    made = sorted(slot.run([], 100))
    assert made == sorted(
        [
            ("a", *window(-20, 10), 1, 1),
            ("a", *window(-10, 20), 1, 1),
            ("a", *window(0, 30), 2, 3),
            ("a", *window(10, 40), 1, 2),
            ("a", *window(20, 50), 1, 2),
            ("b", *window(-10, 20), 1, 4),
            ("b", *window(0, 30), 1, 4),
            ("b", *window(10, 40), 1, 4),
        ]
    )
    assert slot.entries() == 0


def test_rows_that_are_late_but_allowed_emit_their_window_again(start: Start) -> None:
    slot = start(tumbling("10ms"), allowed_lateness_ms=20, late="late")
    assert slot.run([("a", at(1), 1)], 12) == [("a", *window(0, 10), 1)]
    assert slot.run([("a", at(2), 1), ("b", at(3), 1)], 12) == [("a", *window(0, 10), 2), ("b", *window(0, 10), 1)]
    assert slot.operator.next_timer_ms == 30
    assert slot.run([], 30) == []
    assert slot.entries() == 0
    assert slot.run([("a", at(2), 7)], 30) == []
    assert (slot.operator.late_rows, slot.late) == (1, [("a", at(2), 7)])


def test_a_row_between_two_sessions_makes_them_one(start: Start) -> None:
    slot = start(session("10ms"), {"n": agg.count(), "first": agg.first("x"), "all": agg.collect_list("x")})
    slot.run([("a", at(0), 1), ("a", at(18), 2), ("b", at(5), 3)], None)
    assert slot.run([("a", at(9), 4)], 15) == [("b", *window(5, 15), 1, 3, [3])]
    assert slot.run([], 27) == []
    ((key, begin, end, time, count, first, every),) = slot.run([], 28)
    assert (key, begin, end, time, count, first, sorted(every)) == ("a", *window(0, 28), 3, 1, [1, 2, 4])
    assert slot.entries() == 0


def test_rows_a_gap_apart_are_one_session_as_in_spark(start: Start) -> None:
    slot = start(session("10ms"))
    made = slot.run([("a", at(0), 1), ("a", at(10), 1), ("b", at(0), 1), ("b", at(10.001), 1)], 1000)
    assert sorted(made) == [
        ("a", *window(0, 20), 2),
        ("b", *window(0, 10), 1),
        ("b", *window(10.001, 20.001), 1),
    ]


def test_updates_emit_what_changed_and_nothing_when_it_closes(start: Start) -> None:
    slot = start(session("10ms"), emit="update")
    assert slot.run([("a", at(0), 1), ("b", at(0), 1)], None) == [("a", *window(0, 10), 1), ("b", *window(0, 10), 1)]
    assert slot.run([("a", at(4), 1)], 5) == [("a", *window(0, 14), 2)]
    assert slot.run([], 50) == []
    assert slot.entries() == 0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("long", [-5, 0, None, 2**62]),
        ("int", [-5, 0, None]),
        ("string", ["", "a", None, "é\0" * 9]),
        ("binary", [b"", b"\0\xff", None]),
        ("double", [0.0, -1.5, None, 1e300]),
        ("float", [0.0, -1.5, None]),
        ("boolean", [True, False, None]),
        ("date", [date(1960, 1, 1), date(2020, 1, 1), None]),
        ("timestamp", [at(-1.5), at(1e12), None]),
        ("timestamp_ntz", [datetime(1960, 1, 1), None]),
        ("decimal(30,2)", [Decimal("-12345678901234567890.12"), Decimal("0.01"), None]),
    ],
)
def test_keys_come_out_of_state_as_they_went_in(spec: Any, kind: str, keys: list[Any], tmp_path: Path) -> None:
    schema = parse_schema(f"a {kind}, t timestamp, b string, c {kind}")
    slot = WindowSlot(WindowOperator("w", ["a", "b", "c"], schema, spec, "t", COUNT), tmp_path)
    rows = [(a, at(5), b, c) for a in keys for b in ("x", None) for c in keys]
    slot.run(rows, None)
    made = slot.run([], 10_000)
    assert {row[:3] for row in made} == {(a, b, c) for a, _, b, c in rows}
    assert slot.entries() == 0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("emit", ["close", "update"])
def test_many_keys_on_rocksdb_with_a_restart(spec: Any, emit: Any, tmp_path: Path) -> None:
    limits = WindowLimits(chunk_entries=300)
    backend = open_backend("rocksdb", tmp_path / "db", memory=32 << 20)
    aggregates = {"n": agg.count(), "x": agg.sum("x")}
    operator = WindowOperator("w", ["k"], INPUT, spec, "t", aggregates, 7, emit, limits=limits)
    slot, plain = (
        WindowSlot(operator, tmp_path, backend),
        WindowSlot(operator.__class__(*operator.__reduce__()[1]), tmp_path),
    )
    rows = [(f"k{number % 503}", at(number * 7919 % 97), number) for number in range(3000)]
    for step, watermark in enumerate((None, 20, 45, 60, 1000)):
        some = rows[step * 600 : (step + 1) * 600]
        slot.run(some[:50], watermark, commit=False)
        assert sorted(slot.run(some, watermark)) == sorted(plain.run(some, watermark))
        slot.reopen()
    assert slot.entries() == plain.entries() == 0
    backend.close()


@pytest.mark.parametrize("spec", [sliding("20ms", "10ms"), session("10ms")])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_overflow_names_the_key(start: Start, spec: Any, at_once: bool) -> None:
    slot = start(spec, {"s": agg.sum("x")})
    rows = [("b", at(1), 1), ("a", at(1), 2**62), ("a", at(11), 2**62), ("c", at(0), 1)]
    if not at_once:
        slot.run(rows[:2], None)
    with pytest.raises(SchemaError, match=r"key \('a',\): sum\('x'\) no longer fits"):
        slot.run(rows if at_once else rows[2:], 1000)
