"""Combined rows give the same output, state and counts as the raw rows, however rows are cut, combined and mixed."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.errors import StrandlineError
from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
from strandline.operators.aggregate.limits import GroupingLimits
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, BatchInfo, Operator
from strandline.operators.combining import JUDGED_ROWS, LATE_COLUMN, ROWS_COLUMN, Combined, Combiner, Combining
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.windows.limits import WindowLimits
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.mixed_slot import SUBTASK, MixedSlot, pieces, raw_table
from tests.operators.windows.window_models import pane_specs
from tests.operators.windows.window_slot import at

INPUT = parse_schema(
    "a string, d double, l array<int>, t timestamp, x long, f double, y string, m decimal(38,2), o int"
)
AGGREGATES = {
    "n": agg.count(),
    "known": agg.count("y"),
    "total": agg.sum("x"),
    "least": agg.min("y"),
    "lowest": agg.min("f"),
    "greatest": agg.max("f"),
    "latest": agg.max("t"),
    "mean": agg.avg("x"),
    "weight": agg.sum("f"),
    "money": agg.sum("m"),
    "different": agg.approx_count_distinct("x"),
}
NAN = math.nan
LONGEST = 2**63 - 1
WIDEST = 10**38 - 1
"""The most cents."""
SMALL = GroupingLimits(gather_rows=3, held_groups=3, slice_rows=2)

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["hot", "hot", "hot", "b", None]),
        st.sampled_from([0.0, 0.0, -0.0, NAN, 1.5, None]),
        st.sampled_from([[1, None], [], None]),
        st.none() | st.integers(0, 300).map(at),
        st.none() | st.integers(-5, 5),
        st.none() | st.sampled_from([1.0, 2.0, -0.0, 7.0, 0.5, NAN]),
        st.none() | st.text("xyz\0", max_size=2),
        st.none() | st.decimals(-9, 9, places=2),
        st.integers(0, 1),
    ),
    max_size=14,
)
CUTS = st.lists(st.integers(0, 14), max_size=5)
PLACES = st.lists(st.floats(0, 1), min_size=7, max_size=7)
COMBINED = st.lists(st.booleans() | st.just(True), min_size=7, max_size=7)
SPECS = st.none() | pane_specs() | st.integers(1, 6).map(lambda gap: SessionWindow(gap * 10))


def step(
    spec: Any, keys: tuple[str, ...], aggregates: Any = None, lateness: int = 0, emit: Any = "close", late: str = "drop"
) -> Operator:
    """A window step, or running aggregates if `spec` is None."""
    made = AGGREGATES if aggregates is None else aggregates
    if spec is None:
        return AggregateOperator("s", keys, INPUT, made)
    return WindowOperator("s", keys, INPUT, spec, "t", made, lateness, emit, late)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    spec=SPECS,
    keys=st.sampled_from([("a", "d"), ("a",), ("o",), ("l",)]),
    lateness=st.sampled_from([0, 0, 15, 100]),
    emit=st.sampled_from(["close", "update"]),
    late=st.sampled_from(["drop", "late"]),
)
def test_combined_rows_give_the_same_output_state_and_counts(
    tmp_path: Path, data: st.DataObject, spec: Any, keys: tuple[str, ...], lateness: int, emit: Any, late: str
) -> None:
    keys = ("o",) if spec is not None and keys == ("l",) else keys  # windows have no nested keys
    operator = step(spec, keys, None, lateness, emit, late)
    plain, mixed = MixedSlot(operator, tmp_path), MixedSlot(operator, tmp_path)
    watermark: int | None = None
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(ROWS)
        ahead = data.draw(st.none() | st.integers(0, 150))
        watermark = watermark if ahead is None else (watermark or 0) + ahead
        cut = pieces(len(rows), data.draw(CUTS), data.draw(PLACES), data.draw(COMBINED))
        assert mixed.run(rows, watermark, cut) == plain.run(rows, watermark)
        assert mixed.operator.next_timer_ms == plain.operator.next_timer_ms
        assert mixed.state() == plain.state()


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), spec=SPECS, emit=st.sampled_from(["close", "update"]))
def test_the_output_is_the_same_if_combined_rows_go_into_state_before_the_batch_ends(
    tmp_path: Path, data: st.DataObject, spec: Any, emit: Any
) -> None:
    limits = WindowLimits(SMALL, chunk_entries=4, looks_per_gap=2)
    operator: Operator = (
        AggregateOperator("s", ["a", "d"], INPUT, AGGREGATES, SMALL)
        if spec is None
        else WindowOperator("s", ["a", "d"], INPUT, spec, "t", AGGREGATES, 0, emit, limits=limits)
    )
    plain, mixed = MixedSlot(operator, tmp_path), MixedSlot(operator, tmp_path)
    for watermark in (None, 100, 500):
        rows = data.draw(ROWS)
        cut = pieces(len(rows), data.draw(CUTS), data.draw(PLACES), data.draw(COMBINED))
        seen, wanted = mixed.run(rows, watermark, cut), plain.run(rows, watermark)
        assert sorted(seen.output) == sorted(wanted.output)
        assert (seen.late_rows, seen.of_groups) == (wanted.late_rows, wanted.of_groups)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    spec=st.sampled_from([None, SlidingWindow(10, 10), SessionWindow(10)]),
    numbers=st.lists(st.sampled_from([LONGEST, -LONGEST - 1, 1, -1, LONGEST - 1, None]), max_size=8),
    money=st.lists(st.sampled_from([WIDEST, -WIDEST, 1, -1, None]), min_size=8, max_size=8),
    decimals=st.booleans(),
)
def test_a_sum_overflows_with_combined_rows_if_it_does_without(
    tmp_path: Path, data: st.DataObject, spec: Any, numbers: list[Any], money: list[Any], decimals: bool
) -> None:
    cells = list(zip(numbers, map(euros, money), strict=False))
    rows: list[tuple[Any, ...]] = [("a", 0.0, [], at(5), number, 1.0, "y", amount, 0) for number, amount in cells]
    operator = step(spec, ("a",), {"total": agg.sum("m" if decimals else "x"), "least": agg.min("x")})
    cut = pieces(len(rows), data.draw(CUTS), data.draw(PLACES), data.draw(COMBINED))
    plain, mixed = MixedSlot(operator, tmp_path), MixedSlot(operator, tmp_path)
    wanted = plain.run(rows, None)
    total = sum(value or 0 for value in (money[: len(rows)] if decimals else numbers))
    fits = abs(total) <= WIDEST if decimals else -(2**63) <= total < 2**63
    assert fits == (wanted.error == "")
    if not fits:
        assert "no longer fits" in wanted.error
    assert mixed.run(rows, None, cut) == wanted
    assert mixed.state() == plain.state()


def euros(cents: int | None) -> Decimal | None:
    """A decimal of up to 38 digits, which arithmetic would round."""
    return None if cents is None else Decimal((int(cents < 0), tuple(map(int, str(abs(cents)))), -2))


def bids(count: int, hot: int = 3) -> list[tuple[Any, ...]]:
    """Rows of few keys within 100 ms."""
    return [("k", 0.0, [], at(n % 100), n, 1.0, "y", None, n % hot) for n in range(count)]


@pytest.mark.parametrize(
    ("spec", "keys", "left"),
    [
        (None, ("o",), 3),
        (None, ("a",), 1),
        (SlidingWindow(100, 100), ("a",), 1),
        (SlidingWindow(100, 50), ("o",), 6),
        (SessionWindow(1000), ("o",), 3),
        (SessionWindow(50), ("o",), 6),
    ],
)
def test_a_row_is_left_for_each_key_and_pane_or_piece_of_a_session(spec: Any, keys: tuple[str, ...], left: int) -> None:
    operator = step(spec, keys)
    combiner = operator.combiner()
    assert combiner is not None
    made = pickle.loads(pickle.dumps(combiner)).combine(raw_table(operator, bids(600)), None)
    assert made.raw is None
    assert made.combined.num_rows == made.num_rows == left
    assert pc.sum(made.combined[ROWS_COLUMN]).as_py() == 600
    assert made.combined.schema.equals(combiner.schema.append(pa.field(SUBTASK_COLUMN, pa.int32())))
    groups, subtasks = (made.combined[name].to_pylist() for name in (KEY_GROUP_COLUMN, SUBTASK_COLUMN))
    assert subtasks == [group % 2 for group in groups]
    again = combiner.combine(raw_table(operator, bids(600)), None)
    assert again.combined is not None
    assert again.combined.equals(made.combined)


def test_late_rows_and_rows_without_a_time_are_counted_per_key_group() -> None:
    operator = step(SlidingWindow(10, 10), ("a",))
    combiner = operator.combiner()
    assert combiner is not None
    rows = [(*row[:3], time, *row[4:]) for row, time in zip(bids(5), [None, at(1), at(2), at(50), at(51)], strict=True)]
    made = combiner.combine(raw_table(operator, rows), 20).combined
    assert made is not None
    assert made.select([ROWS_COLUMN, LATE_COLUMN, "a"]).to_pylist() == [
        {ROWS_COLUMN: 2, LATE_COLUMN: 0, "a": "k"},
        {ROWS_COLUMN: 3, LATE_COLUMN: 2, "a": None},
    ]


def test_late_rows_for_a_side_output_are_left_raw_with_all_columns() -> None:
    operator = step(SlidingWindow(10, 10), ("a",), late="late")
    combiner = operator.combiner()
    assert combiner is not None
    table = raw_table(operator, bids(100))
    made = combiner.combine(table, 50)
    assert made.raw is not None
    assert made.raw.equals(table.slice(0, 50))
    assert made.combined is not None
    assert made.combined.num_rows == 5
    everything_late = combiner.combine(table, 1000)
    assert everything_late.combined is None
    assert everything_late.raw is not None
    assert everything_late.raw.equals(table)


class Fold(ArrowAggregate):
    state_schema = pa.schema([("s", pa.int64())])
    result_type = "long"

    def partial(self, rows: pa.Table) -> pa.Table:
        raise NotImplementedError

    def merge(self, states: pa.Table) -> pa.Table:
        raise NotImplementedError

    def result(self, states: pa.Table) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "aggregate", [agg.first("x"), agg.last("y", ignore_nulls=True), agg.collect_list("y"), Fold()("x")], ids=str
)
@pytest.mark.parametrize("spec", [None, SlidingWindow(10, 5), SessionWindow(10)])
def test_a_step_whose_results_may_depend_on_the_order_has_no_combiner(spec: Any, aggregate: agg.Aggregate) -> None:
    operator = step(spec, ("a",), {"n": agg.count(), "one": aggregate})
    assert operator.combiner() is None
    combiner = step(spec, ("a",)).combiner()
    assert combiner is not None
    made = combiner.combine(raw_table(operator, bids(10)), None).combined
    assert made is not None
    with pytest.raises(StrandlineError, match=r"rows cannot be combined.*bug"):
        run(operator, made, None)


def test_a_step_of_another_kind_has_no_combiner() -> None:
    assert DeduplicateOperator("s", ["a"], INPUT, None).combiner() is None


@pytest.mark.parametrize("values", [[0.1], [1e300], [NAN], [math.inf], [2.0**52]])
def test_sums_of_floats_whose_order_may_matter_stay_raw(values: list[float]) -> None:
    operator = step(None, ("a",), {"mean": agg.avg("f")})
    combiner = operator.combiner()
    assert combiner is not None
    rows: list[tuple[Any, ...]] = [("k", 0.0, [], at(0), 1, value, "y", None, 0) for value in [1.0, *values, 3.0]]
    made = combiner.combine(raw_table(operator, rows), None)
    assert made.combined is None
    assert made.raw is not None
    assert made.raw.num_rows == len(rows)


@pytest.mark.parametrize("spec", [None, SlidingWindow(10, 10), SessionWindow(10)])
def test_rows_that_the_step_will_refuse_stay_raw(spec: Any) -> None:
    operator = step(spec, ("a",))
    combiner = operator.combiner()
    assert combiner is not None
    table = raw_table(operator, bids(10))
    wrong = table.set_column(table.schema.get_field_index("x"), "x", pa.array(["no number"] * 10))
    for rows in (table.drop_columns(["x"]), wrong, table.slice(0, 0)):
        made = combiner.combine(rows, 10**6)
        assert made.combined is None
        assert made.raw is not None
        assert made.raw.equals(rows)


@pytest.mark.parametrize("spec", [SlidingWindow(10, 10), SessionWindow(10)])
def test_combined_rows_that_should_have_been_late_are_an_error(spec: Any) -> None:
    operator = step(spec, ("a",))
    combiner = operator.combiner()
    assert combiner is not None
    made = combiner.combine(raw_table(operator, bids(10)), None).combined
    assert made is not None
    with pytest.raises(StrandlineError, match=r"late.*bug"):
        run(operator, made, 1000)


def run(operator: Operator, rows: pa.Table, late_watermark_ms: int | None) -> None:
    operator.open(SUBTASK)
    changes = ChangeSet(HeapBackend(), 1 << 20, Path())
    for _ in operator.run(iter(rows.to_batches()), changes, BatchInfo(1, 0, 2000, late_watermark_ms)):
        pass


class Halving(Combiner):
    """Leaves every n-th row."""

    worthwhile = 0.5

    def __init__(self) -> None:
        self.nth = 2
        self.called = 0

    def combine(self, rows: pa.Table, late_watermark_ms: int | None) -> Combined:
        assert late_watermark_ms == 7
        self.called += 1
        return Combined(rows.slice(0, rows.num_rows // self.nth), None)


def test_combining_ends_for_the_task_when_a_table_hardly_shrinks() -> None:
    combiner = Halving()
    combining = Combining(combiner, 7)
    large, small = (pa.table({"a": range(count)}) for count in (JUDGED_ROWS, JUDGED_ROWS - 1))
    assert combining(large).num_rows == JUDGED_ROWS // 2
    combiner.nth = 1
    assert combining(small).num_rows == JUDGED_ROWS - 1
    combining(large)
    left = combining(large)
    assert (left.combined, left.raw) == (None, large)
    assert combiner.called == 3
    assert combining.pays is False


def test_without_a_combiner_all_rows_stay_raw() -> None:
    combining = Combining(None, None)
    assert not combining.pays
    table = pa.table({"a": [1]})
    assert combining(table) == Combined(None, table)


def test_batches_without_windows_have_only_counts(tmp_path: Path) -> None:
    slot = MixedSlot(step(SlidingWindow(10, 10), ("a",)), tmp_path)
    slot.run([], 10**6)
    seen = slot.run(bids(9), 10**6, pieces(9, [], [0.0], [True]))
    assert seen.output == []
    assert sum(seen.of_groups) == seen.rows == seen.late_rows == 9
    assert slot.state() == []


@pytest.mark.parametrize("watermark", [0, 2**63 // 1000 - 30_000], ids=["ordinary", "at the end"])
@pytest.mark.parametrize("spec", [SlidingWindow(10, 10), SessionWindow(10)])
def test_times_at_the_end_of_64_bits_count_as_late_whether_combined_or_not(
    tmp_path: Path, spec: Any, watermark: int
) -> None:
    operator = step(spec, ("a",), {"n": agg.count()})
    plain, mixed = MixedSlot(operator, tmp_path), MixedSlot(operator, tmp_path)
    times = [100_000, None, 2**63 - 1, 2**63 - 40_000_000, 2**63 - 1_000_000_000]
    table = raw_table(operator, bids(len(times)))
    moments = pa.array(times, pa.int64()).view(table.schema.field("t").type)
    table = table.set_column(table.schema.get_field_index("t"), "t", moments)
    combiner = operator.combiner()
    assert combiner is not None
    made = combiner.combine(table, watermark)
    assert made.raw is None
    for slot, rows in ((plain, table), (mixed, made.combined)):
        assert rows is not None
        run(slot.operator, rows, watermark)
    assert mixed.operator.late_rows == plain.operator.late_rows


@pytest.mark.parametrize("offset", [0, 3])
def test_the_pane_of_a_time_does_not_depend_on_the_rows_beside_it(offset: int) -> None:
    spec = SlidingWindow(10, 10, offset)
    times = np.array([-(2**63), -(2**63) + 2_999, -1, 0, 7_000, 2**63 - 1])
    alone = [int(spec.panes_of(times[at : at + 1])[0]) for at in range(len(times))]
    assert spec.panes_of(times).tolist() == alone
