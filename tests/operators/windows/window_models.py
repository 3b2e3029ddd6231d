"""Plain models of windows, on rows in lists, and the input that they are tried on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from hypothesis import strategies as st

from strandline.operators.aggregate import functions as agg
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.state.coding.ddl import parse_schema
from tests.operators.windows.window_slot import at

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


def timed_rows(base: int, span: int = 300, one_key: bool = False) -> st.SearchStrategy[list[Row]]:
    """Rows of `INPUT`, some of them without a time, the others within `span` ms after `base`."""
    row = st.tuples(
        st.just("u") if one_key else st.none() | st.sampled_from("uv"),
        st.none() | st.integers(0, span).map(lambda ms: at(base + ms)),
        st.just(0) if one_key else st.none() | st.integers(0, 1),
        st.none() | st.integers(-5, 5),
        st.none() | st.text("xyz\0", max_size=2),
    )
    return st.lists(row, max_size=12)


def millis(moment: datetime) -> int:
    return round((moment - at(0)).total_seconds() * 1000)
