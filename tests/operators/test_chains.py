"""Random chains of stateful steps, with the watermarks that the planner gives each of them, against a batch answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

import strandline as sl
from strandline.checkpoint.metadata import Times
from strandline.operators.base import Operator
from strandline.operators.columns.time_columns import with_time_columns
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.plan import SIDE_COLUMN
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, WindowSpec
from strandline.operators.windows.window_operator import WindowOperator
from strandline.runtime.driver.nodes import Node, SourceNode, StatefulNode
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.watermarks import SourceTime, WatermarkPlan, advanced
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.clocked import ClockedSlot

ZERO = datetime(1970, 1, 1, tzinfo=UTC)
BEGIN = 1_000_000
"""The time of the first rows, in milliseconds since the epoch."""
MICROSECOND = timedelta(microseconds=1)
Event = tuple[str, datetime]
"""What goes from step to step: a user, and a time."""


def ms(milliseconds: int) -> timedelta:
    return timedelta(milliseconds=milliseconds)


def stamp(time: datetime) -> int:
    """Milliseconds since the epoch, rounded down."""
    return (time - ZERO) // ms(1)


class Held(sl.KeyedProcessor):
    """Gives back every row when the watermark is `by_ms` later."""

    def __init__(self, by_ms: int) -> None:
        self.by_ms = by_ms

    def open(self, context: sl.ProcessContext) -> None:
        self.held = context.list_state("held", "t timestamp")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for row in rows:
            self.held.append_value(row.t)
            context.register_timer(self.due(row.t))

    def due(self, time: datetime) -> int:
        return -(-(time - ZERO) // ms(1)) + self.by_ms

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        held = list(self.held.get())
        self.held.put([time for time in held if self.due(time) != timestamp])
        yield from ((*key, time) for time in held if self.due(time) == timestamp)


@dataclass
class Step:
    """A step of a chain: its operator, how its rows become those of the next step, and what a batch computes."""

    operator: Operator
    time: str
    """The output column that is the time of the next step."""
    answer: Callable[[list[Event], list[Event]], Counter[tuple[Any, ...]]]
    """The output rows for all rows of the chain so far, and all of the second source."""
    columns: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = tuple(self.operator.output_schema.names)

    def events(self, rows: list[tuple[Any, ...]]) -> list[Event]:
        user, time = self.columns.index("user"), self.columns.index(self.time)
        return [(row[user], row[time]) for row in rows if row[time] is not None]


def windowed(spec: WindowSpec) -> Callable[[list[Event], list[Event]], Counter[tuple[Any, ...]]]:
    def pane(rows: list[Event], _others: list[Event]) -> Counter[tuple[Any, ...]]:
        counts: Counter[tuple[str, datetime]] = Counter()
        assert isinstance(spec, SlidingWindow)
        for user, time in rows:
            start = ZERO + ms(stamp(time) // spec.slide_ms * spec.slide_ms)
            while start + ms(spec.size_ms) > time:
                counts[user, start] += 1
                start -= ms(spec.slide_ms)
        return Counter(
            (user, start, start + ms(spec.size_ms), start + ms(spec.size_ms) - MICROSECOND, n)
            for (user, start), n in counts.items()
        )

    def session(rows: list[Event], _others: list[Event]) -> Counter[tuple[Any, ...]]:
        made: Counter[tuple[Any, ...]] = Counter()
        assert isinstance(spec, SessionWindow)
        gap = ms(spec.gap_ms)
        for user in {user for user, _ in rows}:
            times = sorted(time for other, time in rows if other == user)
            while times:
                n = 1
                while n < len(times) and times[n] - times[n - 1] <= gap:
                    n += 1
                made[user, times[0], times[n - 1] + gap, times[n - 1] + gap - MICROSECOND, n] += 1
                times = times[n:]
        return made

    return session if isinstance(spec, SessionWindow) else pane


def joined(how: str, lower: int, upper: int) -> Callable[[list[Event], list[Event]], Counter[tuple[Any, ...]]]:
    def answer(rows: list[Event], others: list[Event]) -> Counter[tuple[Any, ...]]:
        made: Counter[tuple[Any, ...]] = Counter()
        for user, time in rows:
            partners = [at for other, at in others if other == user and ms(lower) <= at - time <= ms(upper)]
            made.update((user, time, at) for at in partners)
            if how == "left" and not partners:
                made[user, time, None] += 1
        return made

    return answer


@st.composite
def steps(draw: st.DrawFn, uid: str, lag: int) -> Step:
    schema = with_time_columns(parse_schema("user string, t timestamp"), {"t": lag}, "t")
    kind = draw(st.sampled_from(["pane", "pane", "session", "deduplicate", "join", "join", "process"]))
    if kind in ("pane", "session"):
        slide = draw(st.sampled_from([7, 20, 50]))
        spec = SessionWindow(slide) if kind == "session" else SlidingWindow(slide * draw(st.integers(1, 3)), slide)
        times = ["window_time", "window_end"] + (["window_start"] if kind == "pane" else [])
        window = WindowOperator(uid, ("user",), schema, spec, "t", {"n": sl.count()})
        return Step(window, draw(st.sampled_from(times)), windowed(spec))
    if kind == "deduplicate":
        unique = DeduplicateOperator(uid, ("user", "t"), schema, draw(st.integers(1, 60)), "t")
        return Step(unique, "t", lambda rows, _others: Counter(set(rows)))
    if kind == "join":
        lower = draw(st.integers(-60, 40))
        upper = lower + draw(st.integers(0, 60))
        how = draw(st.sampled_from(["inner", "left"]))
        right = with_time_columns(parse_schema("user string, r timestamp"), {"r": 0}, "r")
        join = JoinOperator(uid, ("user",), ("user",), schema, right, cast(Any, how), "t", "r", lower, upper)
        return Step(join, draw(st.sampled_from(["t", "r"])), joined(how, lower, upper))
    by = draw(st.integers(0, 40))
    output = parse_schema("user string, t timestamp")
    held = ProcessOperator(
        uid, Held(by), ("user",), schema, output, time_mode="event", event_time="t", output_time="t", output_delay_ms=by
    )
    return Step(held, "t", lambda rows, _others: Counter(rows))


@st.composite
def chains(draw: st.DrawFn) -> list[Step]:
    chain: list[Step] = []
    lag = 0
    for number in range(draw(st.integers(2, 3))):
        step = draw(steps(f"step-{number}", lag))
        lag = step.operator.time_columns[step.time]
        chain.append(step)
    return chain


def planned(chain: list[Step], delays: tuple[int, int]) -> WatermarkPlan:
    """The watermarks as the planner computes them for a job with this chain; joins also read the second source."""
    first, second = (SourceNode(cast(Any, None), SourceTime((delay,))) for delay in delays)
    stream: Node = first
    lag = 0
    for step in chain:
        reads = ((stream, lag), *([(second, 0)] if isinstance(step.operator, JoinOperator) else []))
        stream = StatefulNode(stream, step.operator, (), StructType([]), reads)
        lag = step.operator.time_columns[step.time]
    return Graph([(stream, sl.ParquetSink("out"))], [step.operator for step in chain], [first, second]).watermark_plan()


def taken(operator: Operator, rows: list[Event], others: list[Event]) -> list[tuple[Any, ...]]:
    """The rows as the operator takes them; a join gets both of its sides in one."""
    if not isinstance(operator, JoinOperator):
        return sorted(rows) if operator.sorted_input else rows
    made = []
    for side, events in enumerate((rows, others)):
        for user, time in events:
            values = {"user": user, SIDE_COLUMN: side, ("t", "r")[side]: time}
            names = {column.name: (column.left, column.right)[side] for column in operator.input_columns}
            made.append(tuple(values.get(names.get(name) or name) for name in operator.input_struct.names))
    return made


batch_rows = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 90)), max_size=5)


@settings(max_examples=examples(150), deadline=None)
@given(
    chains(),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.lists(st.tuples(batch_rows, batch_rows, st.booleans()), max_size=8),
)
def test_a_chain_of_steps_drops_nothing_that_a_batch_counts(
    tmp_path_factory: pytest.TempPathFactory,
    chain: list[Step],
    delays: tuple[int, int],
    story: list[tuple[list[tuple[str, int]], list[tuple[str, int]], bool]],
) -> None:
    plan = planned(chain, delays)
    spill = tmp_path_factory.mktemp("chain")
    slots = [ClockedSlot(step.operator, spill) for step in chain]
    times = plan.restored(None)
    sources: tuple[list[Event], list[Event]] = ([], [])
    made: list[list[tuple[Any, ...]]] = [[] for _ in chain]

    def batch(rows: list[Event], others: list[Event], *shown: int) -> None:
        """A batch with rows of both sources; `shown` are the times of rows that a filter drops behind the source."""
        nonlocal times
        watermarks = plan.watermarks(times)
        seen = [max([stamp(time) for _, time in new] + list(shown), default=None) for new in (rows, others)]
        latest = tuple(advanced(known, (one,)) for known, one in zip(times.latest, seen, strict=True))
        for step, slot, output in zip(chain, slots, made, strict=True):
            out = slot.at(taken(slot.operator, rows, others), watermarks.get(slot.operator.uid))
            assert slot.operator.late_rows == 0
            output += out
            rows = step.events(out)
        times = Times(0, latest, watermarks)

    for first, second, restart in story:
        # A row may be behind the latest one of its source by less than the delay.
        earliest = [
            BEGIN if latest is None else latest - delay + 1
            for (latest,), delay in zip(times.latest, delays, strict=True)
        ]
        news = [
            [(user, ZERO + ms(least + offset)) for user, offset in rows]
            for least, rows in zip(earliest, (first, second), strict=True)
        ]
        for known, new in zip(sources, news, strict=True):
            known += new
        batch(news[0], news[1])
        if restart:
            for slot in slots:
                slot.reopen()
    batch([], [], 2 * BEGIN)
    batch([], [])

    rows = sources[0]
    for step, output in zip(chain, made, strict=True):
        assert Counter(output) == step.answer(rows, sources[1])
        rows = step.events(output)
