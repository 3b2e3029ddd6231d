"""What `run.query` shows of a key: for every kind of step what a plain model has, and nothing for other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

import strandline as sl
from strandline.errors import StrandlineError
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.base import Operator
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.limits import DEFAULT_LIMITS, JoinLimits
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.coding.ddl import parse_schema
from strandline.state.handles.look_up import LookUp
from strandline.state.handles.query import KEY_GROUP_BYTES, encode_key
from tests.examples import examples
from tests.operators.clocked import ClockedSlot

Make = Callable[[Operator], ClockedSlot]
Rows = list[tuple[str | None, int]]
"""Keys, and numbers that are times as well: seconds."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INPUT = parse_schema("k string, t timestamp, x long")
KEYS = ("a", "b", "a\0", "", None)
MISSING = "c"
batches = st.lists(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 60)), max_size=8), max_size=4)
thorough = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def slot(tmp_path: Path) -> Make:
    return lambda operator: ClockedSlot(operator, tmp_path)


def at(seconds: int) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def input_rows(rows: Rows) -> list[tuple[Any, ...]]:
    return [(key, at(x), x) for key, x in rows]


def query(mini: ClockedSlot, key: Any, state: str | None = None) -> Any:
    """What a slot with all key groups answers."""
    step = mini.operator
    schema = StructType([step.input_struct[name] for name in step.key_columns])
    encoded = encode_key(schema, (key,), 0)[KEY_GROUP_BYTES:]
    for group in range(128):
        found = step.look_up(LookUp(mini.backend, group, encoded, 0), state)
        if found is not None:
            return found[0]
    return step.nothing(state)


@thorough
@given(batches)
def test_aggregates_are_shown_as_they_were_emitted_last(slot: Make, drawn: list[Rows]) -> None:
    aggregates = {"n": sl.count(), "mean": sl.avg("x"), "newest": sl.last("x"), "latest": sl.max("t")}
    mini = slot(AggregateOperator("a", ["k"], INPUT, aggregates))
    emitted: dict[Any, dict[str, Any]] = {}
    for rows in drawn:
        for key, *values in mini.at(input_rows(rows)):
            emitted[key] = dict(zip(aggregates, values, strict=True))
        assert {key: query(mini, key) for key in (*KEYS, MISSING)} == {
            key: emitted.get(key) for key in (*KEYS, MISSING)
        }


def windows_of(spec: Any, times: list[int]) -> Iterator[tuple[int, int, int]]:
    """Start, end and count of every window, from a plain model."""
    if isinstance(spec, sl.SessionWindow):
        spans: list[list[int]] = []
        for time in sorted(times):
            if spans and time - spans[-1][-1] <= spec.gap_ms // 1000:
                spans[-1].append(time)
            else:
                spans.append([time])
        yield from ((span[0], span[-1] + spec.gap_ms // 1000, len(span)) for span in spans)
        return
    size, slide = spec.size_ms // 1000, spec.slide_ms // 1000
    for start in range(-size, 61, 1):
        inside = sum(start <= time < start + size for time in times)
        if start % slide == 0 and inside:
            yield start, start + size, inside


@thorough
@given(
    batches, st.sampled_from([sl.tumbling("10s"), sl.sliding("20s", "5s"), sl.sliding("15s", "10s"), sl.session("4s")])
)
def test_windows_are_shown_with_start_and_end(slot: Make, drawn: list[Rows], spec: Any) -> None:
    mini = slot(WindowOperator("w", ["k"], INPUT, spec, "t", {"n": sl.count()}))
    times: dict[Any, list[int]] = {}
    for rows in drawn:
        mini.at(input_rows(rows))
        for key, x in rows:
            times.setdefault(key, []).append(x)
    for key in (*KEYS, MISSING):
        shown = [(row["window_start"], row["window_end"], row["n"]) for row in query(mini, key)]
        model = [(at(start), at(end), n) for start, end, n in windows_of(spec, times.get(key, []))]
        assert shown == model
        assert all("k" not in row for row in query(mini, key))


def values_of(row: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(row.items())


@thorough
@given(batches, st.sampled_from([DEFAULT_LIMITS, JoinLimits(chunk_bytes=60)]), st.booleans())
def test_the_rows_of_a_join_are_shown_by_side(slot: Make, drawn: list[Rows], limits: JoinLimits, timed: bool) -> None:
    left, right = parse_schema("k string, lt timestamp, x long"), parse_schema("k string, rt timestamp, y long")
    times: Any = ("lt", "rt") if timed else (None, None)
    bounds: Any = (-1000, 1000) if timed else (None, None)
    mini = slot(JoinOperator("j", ["k"], ["k"], left, right, "inner", times[0], times[1], bounds[0], bounds[1], limits))
    kept: dict[Any, dict[str, list[dict[str, Any]]]] = {}
    for rows in drawn:
        both = []
        for number, (key, x) in enumerate(rows):
            side, names = ("left", ("lt", "x")) if number % 2 == 0 else ("right", ("rt", "y"))
            row = {"k": key, names[0]: at(x), names[1]: x}
            inputs: dict[str, Any] = {"__sl_side": number % 2}
            for column in mini.operator.input_columns:  # type: ignore[attr-defined]  # it is a join
                inputs[column.name] = row.get(getattr(column, side))
            both.append(tuple(inputs[name] for name in mini.operator.input_struct.names))
            if key is not None:  # null is equal to nothing
                kept.setdefault(key, {"left": [], "right": []})[side].append(row)
        mini.at(both)
    for key in (*KEYS[:-1], MISSING):
        shown, model = query(mini, key), kept.get(key, {"left": [], "right": []})
        for side in ("left", "right"):
            assert sorted(map(values_of, shown[side])) == sorted(map(values_of, model[side]))
        assert list(shown) == ["left", "right"]


def test_a_key_of_a_deduplication_is_shown_with_its_expiry(slot: Make) -> None:
    for ttl, expires in ((None, None), (5000, at(12))):
        mini = slot(DeduplicateOperator("d", ["k"], INPUT, ttl))
        mini.at(input_rows([("a", 1), ("a", 2)]), now=7000)
        assert query(mini, "a") == {"expires": expires}
        assert query(mini, MISSING) is None


class Several(sl.KeyedProcessor):
    def open(self, context: sl.ProcessContext) -> None:
        self.tags = context.value_state("tags", "tags array<string>")
        self.seen = context.list_state("seen", "x long")
        self.by_x = context.map_state("by_x", "x long", "n long")

    def process(self, key: Any, rows: Any, context: sl.ProcessContext) -> Iterator[Any]:
        self.tags.update([])
        yield from ()


def test_states_of_a_processor_are_named_and_an_empty_value_is_a_value(slot: Make) -> None:
    mini = slot(ProcessOperator("p", Several(), ["k"], INPUT, INPUT))
    mini.at(input_rows([("a", 1)]))
    assert query(mini, "a", "tags") == []
    assert query(mini, MISSING, "tags") is None
    assert query(mini, "a", "seen") == []
    assert query(mini, "a", "by_x") == {}
    with pytest.raises(StrandlineError, match=r"has several states; name one: tags, seen, by_x$"):
        query(mini, "a")
    with pytest.raises(StrandlineError, match=r"has no state 'tag'; it has: tags, seen, by_x$"):
        query(mini, "a", "tag")
    counted = slot(AggregateOperator("a", ["k"], INPUT, {"n": sl.count()}))
    with pytest.raises(StrandlineError, match=r"no state 'n': its states have no names; leave the argument out$"):
        query(counted, "a", "n")
