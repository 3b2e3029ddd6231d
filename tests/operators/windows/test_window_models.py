"""Windows follow a plain model over any batches, watermarks, late rows, re-runs and restarts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.limits import GroupingLimits
from strandline.operators.windows.limits import DEFAULT_WINDOW_LIMITS, WindowLimits
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.windows.window_slot import WindowSlot, at

INPUT = parse_schema("a string, t timestamp, b long, x long, y string")
AGGREGATES = {
    "n": agg.count(),
    "total": agg.sum("x"),
    "least": agg.min("y"),
    "mean": agg.avg("x"),
    "first": agg.first("x"),
    "last": agg.last("y", ignore_nulls=True),
    "all": agg.collect_list("y"),
    "different": agg.approx_count_distinct("x"),
}

Row = tuple[Any, ...]
Window = tuple[Any, int, int]
"""A key, and start and end in milliseconds."""


def expected(rows: list[Row]) -> tuple[Any, ...]:
    """The aggregates of rows in the order of arrival."""
    xs = [row[3] for row in rows]
    ys = [row[4] for row in rows if row[4] is not None]
    known = [x for x in xs if x is not None]
    return (
        len(rows),
        sum(known) if known else None,
        min(ys, default=None),
        sum(known) / len(known) if known else None,
        xs[0],
        ys[-1] if ys else None,
        sorted(ys),
        len(set(known)),
    )


@dataclass
class PaneModel:
    """All rows that were not late."""

    spec: SlidingWindow
    lateness: int
    emit: str
    rows: list[tuple[int, Row]] = field(default_factory=list)

    def windows(self, time: int) -> list[tuple[int, int]]:
        size, slide, offset = self.spec.size_ms, self.spec.slide_ms, self.spec.offset_ms
        start = math.floor((time - offset) / slide) * slide + offset
        return [(s, s + size) for s in range(start, time - size, -slide)]

    def late(self, time: int, before: int | None) -> bool:
        return before is not None and all(end + self.lateness <= before for _, end in self.windows(time))

    def step(self, fresh: list[tuple[int, Row]], wm: int | None, before: int | None) -> dict[Window, list[Row]]:
        self.rows = self.rows + fresh
        every: dict[Window, list[Row]] = {}
        for time, row in self.rows:
            for start, end in self.windows(time):
                every.setdefault(((row[0], row[2]), start, end), []).append(row)
        changed = {((row[0], row[2]), *window) for time, row in fresh for window in self.windows(time)}

        def emitted(window: Window) -> bool:
            end = window[2]
            open_before = before is None or end > before
            if self.emit == "update":
                return window in changed and (before is None or end + self.lateness > before)
            if open_before:
                return wm is not None and end <= wm
            return window in changed and end + self.lateness > before  # type: ignore[operator]

        made = {window: rows for window, rows in every.items() if emitted(window)}
        if wm is not None:
            self.rows = [(t, row) for t, row in self.rows if self.windows(t)[0][1] + self.lateness > wm]
        return made

    def timer(self, wm: int | None) -> tuple[int, int] | None:
        due = []
        for time, _ in self.rows:
            ends = [end for _, end in self.windows(time) if wm is None or end > wm]
            due.append(min(ends) if ends and self.emit == "close" else self.windows(time)[0][1] + self.lateness)
        return (min(due), min(due)) if due else None

    def copy(self) -> PaneModel:
        return replace(self)


@dataclass
class SessionModel:
    """Open sessions: key, first and last time, and rows."""

    spec: SessionWindow
    lateness: int
    emit: str
    open: list[tuple[Any, int, int, list[tuple[int, Row]]]] = field(default_factory=list)
    arrived: int = 0

    def late(self, time: int, before: int | None) -> bool:
        return before is not None and time + self.spec.gap_ms + self.lateness <= before

    def step(self, fresh: list[tuple[int, Row]], wm: int | None, before: int | None) -> dict[Window, list[Row]]:
        gap = self.spec.gap_ms
        for time, row in fresh:
            key = (row[0], row[2])
            touching = [s for s in self.open if s[0] == key and s[1] - gap <= time <= s[2] + gap]
            first, last = min([time, *(s[1] for s in touching)]), max([time, *(s[2] for s in touching)])
            rows = [pair for s in touching for pair in s[3]] + [(self.arrived, row)]
            self.open = [s for s in self.open if s not in touching] + [(key, first, last, rows)]
            self.arrived += 1
        fresh_numbers = set(range(self.arrived - len(fresh), self.arrived))
        made = {}
        for key, first, last, rows in self.open:
            end = last + gap
            changed_now = any(number in fresh_numbers for number, _ in rows)
            if self.emit == "update":
                emitted = changed_now
            else:
                emitted = wm is not None and end <= wm and (changed_now or before is None or end > before)
            if emitted:
                made[(key, first, end)] = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
        if wm is not None:
            self.open = [s for s in self.open if s[2] + gap + self.lateness > wm]
        return made

    def timer(self, wm: int | None) -> tuple[float, int] | None:
        due = []
        for *_, last, _ in self.open:
            end = last + self.spec.gap_ms
            due.append(end if self.emit == "close" and (wm is None or end > wm) else end + self.lateness)
        # It may be early, for a session that went on since it was planned.
        return (-math.inf, min(due)) if due else None

    def copy(self) -> SessionModel:
        return replace(self)


@st.composite
def pane_specs(draw: st.DrawFn) -> SlidingWindow:
    size = draw(st.integers(1, 12))
    slide = draw(st.just(size) | st.integers(1, size))
    return SlidingWindow(size * 10, slide * 10, draw(st.sampled_from([0, 0, 3])))


def millis(moment: datetime) -> int:
    return round((moment - at(0)).total_seconds() * 1000)


def follow(model: Any, operator: WindowOperator, data: st.DataObject, spill: Path) -> None:
    slot = WindowSlot(operator, spill)
    base = data.draw(st.sampled_from([0, -150, 1_700_000_000_000]))
    row = st.tuples(
        st.none() | st.sampled_from("uv"),
        st.none() | st.integers(0, 300),
        st.none() | st.integers(0, 1),
        st.none() | st.integers(-5, 5),
        st.none() | st.text("xyz\0", max_size=2),
    )
    watermark: int | None = None
    for _ in range(data.draw(st.integers(1, 6))):
        rows = [
            (a, None if t is None else at(base + t), b, x, y) for a, t, b, x, y in data.draw(st.lists(row, max_size=12))
        ]
        ahead = data.draw(st.none() | st.integers(0, 120))
        next_watermark = watermark if ahead is None else (base if watermark is None else watermark) + ahead
        timed = [(millis(r[1]), r) for r in rows if r[1] is not None]
        fresh = [(t, r) for t, r in timed if not model.late(t, watermark)]
        tried = model.copy()
        want = tried.step(fresh, next_watermark, watermark)
        commit = data.draw(st.booleans() | st.just(True))
        made = slot.run(rows, next_watermark, data.draw(st.lists(st.integers(0, 12), max_size=3)), commit)
        seen = Counter(((out[0], out[1]), millis(out[2]), millis(out[3])) for out in made)
        assert seen == Counter(list(want)), (seen, want)
        for out in made:
            assert out[4] == out[3] - timedelta(microseconds=1)
            values = list(out[5:])
            values[6] = sorted(values[6])
            right = list(expected(want[(out[0], out[1]), millis(out[2]), millis(out[3])]))
            assert abs(values.pop() - right.pop()) <= 1
            assert values == right
        late = [r for t, r in timed if model.late(t, watermark)]
        assert operator.late_rows == len(late) if slot.operator is operator else True
        assert Counter(slot.late) == Counter(late)
        if commit:
            model, watermark = tried, next_watermark
            bounds, timer = model.timer(watermark), slot.operator.next_timer_ms
            if bounds is None:
                assert timer is None
                assert slot.entries() == 0
            else:
                assert timer is not None
                assert bounds[0] <= timer <= bounds[1]
                assert watermark is None or timer > watermark
        if data.draw(st.integers(0, 3)) == 0 and commit:
            slot.reopen()


SMALL = WindowLimits(GroupingLimits(gather_rows=3, held_groups=3, slice_rows=2), chunk_entries=4, looks_per_gap=2)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    spec=pane_specs() | st.integers(1, 6).map(lambda gap: SessionWindow(gap * 10)),
    emit=st.sampled_from(["close", "update"]),
    lateness=st.sampled_from([0, 0, 15, 100]),
    small=st.booleans(),
)
def test_windows_follow_a_plain_model(
    tmp_path: Path, data: st.DataObject, spec: Any, emit: Any, lateness: int, small: bool
) -> None:
    model: Any = (
        SessionModel(spec, lateness, emit) if isinstance(spec, SessionWindow) else PaneModel(spec, lateness, emit)
    )
    limits = SMALL if small else DEFAULT_WINDOW_LIMITS
    operator = WindowOperator("w", ["a", "b"], INPUT, spec, "t", AGGREGATES, lateness, emit, "late", limits)
    follow(model, operator, data, tmp_path)
