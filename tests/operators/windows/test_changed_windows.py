"""A changed window over the state of the old one: refused, or what a plain model of all rows says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from strandline.errors import IncompatibleCheckpointError
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.operators.windows.window_operator import WindowOperator
from strandline.operators.windows.window_state import Emit
from strandline.state.backends.factory import BACKENDS, open_backend
from tests.examples import examples
from tests.operators.restored import carry_over, changes_between
from tests.operators.windows.window_models import (
    AGGREGATES,
    INPUT,
    PaneModel,
    Row,
    SessionModel,
    expected,
    millis,
    pane_specs,
    timed_rows,
)
from tests.operators.windows.window_slot import SUBTASK, WindowSlot, at

LATENESS = st.sampled_from([0, 0, 15, 100, 300])
NAMES = list(AGGREGATES)


def window(spec: Any, lateness: int = 0, emit: Any = "close", names: list[str] = NAMES) -> WindowOperator:
    return WindowOperator("w", ["a", "b"], INPUT, spec, "t", {name: AGGREGATES[name] for name in names}, lateness, emit)


class Followed:
    """A window and its model, over the same batches."""

    def __init__(
        self, data: st.DataObject, operator: WindowOperator, names: list[str], spill: Path, span: int = 300
    ) -> None:
        self.span = span
        self.data = data
        self.names = names
        self.history: list[tuple[int, Row]] = []
        """All rows that were not late when they came."""
        self.arrived: list[int | None] = []
        """The watermark of the batch before, for each of these rows."""
        self.shown: dict[Any, dict[str, Any]] = {}
        """The aggregates that came out last for each window."""
        self.changed_at: int | None = None
        backend = open_backend(data.draw(st.sampled_from(BACKENDS), "backend"), Path(mkdtemp(dir=spill)) / "db")
        self.slot = WindowSlot(operator, spill, backend)
        self.model = model_of(operator)
        self.base = data.draw(st.sampled_from([0, -150, 1_700_000_000_000]))

    def run(self, batches: int) -> None:
        for _ in range(batches):
            rows = self.data.draw(timed_rows(self.base, self.span, self.span < 300) | st.just([]))
            ahead = self.data.draw(st.none() | st.integers(0, self.span // 3))
            before = self.slot.watermark
            self._run(rows, before if ahead is None else (self.base if before is None else before) + ahead)

    def _run(self, rows: list[Row], watermark: int | None) -> None:
        before = self.slot.watermark
        timed = [(millis(row[1]), row) for row in rows if row[1] is not None]
        fresh = [(time, row) for time, row in timed if not self.model.late(time, before)]
        self.history += fresh
        self.arrived += [before] * len(fresh)
        want = self.model.step(fresh, watermark, before)
        made = self.slot.run(rows, watermark)
        seen = Counter(((out[0], out[1]), millis(out[2]), millis(out[3])) for out in made)
        assert seen == Counter(list(want))
        assert self.slot.operator.late_rows == len(timed) - len(fresh)
        for out in made:
            right = dict(zip(NAMES, expected(want[(out[0], out[1]), millis(out[2]), millis(out[3])]), strict=True))
            found = dict(zip(self.names, out[5:], strict=True))
            self.shown[(out[0], out[1]), millis(out[2]), millis(out[3])] = found
            assert {name: value for name, value in found.items() if name not in ("all", "different")} == {
                name: right[name] for name in self.names if name not in ("all", "different")
            }
            assert "all" not in found or sorted(found["all"]) == right["all"]
            assert "different" not in found or abs(found["different"] - right["different"]) <= 1

    def finish(self) -> None:
        """Close all windows: each that ended after the change has come out, the last time with all its rows.

        Windows that had ended when one of their rows came are left to the model.
        """
        self._run([], self.base + 10_000)
        self.slot.backend.close()
        if isinstance(self.model, SessionModel):
            return
        whole: Counter[Any] = Counter()
        ended: set[Any] = set()
        for (time, row), before in zip(self.history, self.arrived, strict=True):
            windows = [((row[0], row[2]), *window) for window in self.model.windows(time)]
            whole.update(windows)
            ended.update(window for window in windows if before is not None and window[2] <= before)
        for window, count in whole.items():
            if window not in ended and (self.changed_at is None or window[2] > self.changed_at):
                assert self.shown[window].get("n", count) == count

    def change(self, operator: WindowOperator, names: list[str]) -> None:
        """Go on with another operator; raises `IncompatibleCheckpointError` if that is refused."""
        carry_over(self.slot.operator, operator, self.slot.backend, range(12, 16))
        operator.open(SUBTASK)
        self.slot.operator, self.names = operator, names
        old, watermark = self.model, self.slot.watermark
        self.changed_at = watermark
        self.model = model_of(operator)
        if isinstance(self.model, PaneModel):
            # The model knows all rows. So it finds out if the operator has lost one that it still needs.
            self.model.rows = [
                (time, row)
                for time, row in self.history
                if watermark is None or self.model.windows(time)[0][1] + self.model.lateness > watermark
            ]
        else:
            gap, lateness = self.model.spec.gap_ms, self.model.lateness
            kept = [one for one in old.open if watermark is None or one[2] + gap + lateness > watermark]
            self.model = replace(self.model, open=kept, arrived=old.arrived)


def model_of(operator: WindowOperator) -> Any:
    make: Any = SessionModel if isinstance(operator.spec, SessionWindow) else PaneModel
    return make(operator.spec, operator.allowed_lateness_ms, operator.emit)


@st.composite
def changed_specs(draw: st.DrawFn, old: Any) -> Any:
    """Another specification; often one that has something in common with the old one."""
    if isinstance(old, SessionWindow):
        return draw(
            st.builds(SessionWindow, st.integers(1, 6).map(lambda gap: gap * 10)) | st.just(SlidingWindow(10, 10))
        )
    slide = old.pane_ms * draw(st.integers(1, 4))
    near = SlidingWindow(slide * draw(st.integers(1, 4)), slide, old.offset_ms + slide * draw(st.integers(0, 2)))
    return draw(st.sampled_from([near, near, near, SessionWindow(20)]) | pane_specs())


EMITS: st.SearchStrategy[Emit] = st.sampled_from(["close", "update"])
MOSTLY_AT_CLOSE = st.sampled_from(["close", "close", "close", "update"])


@st.composite
def changed_windows(draw: st.DrawFn, old: WindowOperator) -> tuple[WindowOperator, list[str]]:
    """A window in which one or two things differ."""
    spec, lateness, emit, names = old.spec, old.allowed_lateness_ms, old.emit, list(old.aggregates)
    for what in draw(
        st.lists(st.sampled_from(["spec", "lateness", "emit", "fewer", "others"]), min_size=1, max_size=2)
    ):
        if what == "spec":
            spec = draw(changed_specs(old.spec))
        elif what == "lateness":
            lateness = draw(LATENESS)
        elif what == "emit":
            emit = "update" if old.emit == "close" else "close"
        else:
            names = draw(st.permutations(names if what == "fewer" else NAMES))
            names = names[: draw(st.integers(1, len(names)))]
    return window(spec, lateness, emit, names), names


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), spec=pane_specs() | st.integers(1, 6).map(lambda gap: SessionWindow(gap * 10)))
def test_a_changed_window_is_refused_or_exactly_right(tmp_path: Path, data: st.DataObject, spec: Any) -> None:
    followed = Followed(data, window(spec, data.draw(LATENESS), data.draw(EMITS)), NAMES, tmp_path)
    followed.run(data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 2), "changes")):
        new, names = data.draw(changed_windows(followed.slot.operator))
        if not changed(followed, new, names):
            break
        followed.run(data.draw(st.integers(1, 3)))
    followed.finish()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    pane=st.sampled_from([10, 20, 30]),
    panes=st.integers(1, 8),
    slide=st.integers(1, 4),
    size=st.integers(1, 4),
    offset=st.sampled_from([0, 0, 10, 20, 40]),
)
def test_windows_of_merged_panes_are_refused_or_exactly_right(
    tmp_path: Path, data: st.DataObject, pane: int, panes: int, slide: int, size: int, offset: int
) -> None:
    old = SlidingWindow(pane * panes, pane)
    new = SlidingWindow(pane * slide * size, pane * slide, offset)
    followed = Followed(data, window(old, data.draw(LATENESS), data.draw(EMITS)), NAMES, tmp_path)
    followed.run(data.draw(st.integers(1, 4)))
    if changed(followed, window(new, data.draw(st.sampled_from([0, 0, 0, 15])), data.draw(MOSTLY_AT_CLOSE)), NAMES):
        followed.run(data.draw(st.integers(1, 4)))
    followed.finish()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), gap=st.sampled_from([10, 20, 40]), lateness=st.sampled_from([0, 20, 60, 100]))
def test_changed_sessions_of_a_busy_key_are_refused_or_exactly_right(
    tmp_path: Path, data: st.DataObject, gap: int, lateness: int
) -> None:
    followed = Followed(data, window(SessionWindow(gap), lateness, data.draw(EMITS)), NAMES, tmp_path, span=150)
    followed.run(data.draw(st.integers(1, 4)))
    new = window(SessionWindow(gap), data.draw(st.sampled_from([0, 5, 20, 60])), data.draw(EMITS))
    if changed(followed, new, NAMES):
        followed.run(data.draw(st.integers(1, 4)))
    followed.finish()


def test_a_session_that_a_shorter_lateness_ends_gets_no_more_rows(tmp_path: Path) -> None:
    slot = WindowSlot(window(SessionWindow(10), 60, names=["n"]), tmp_path)
    assert len(slot.run([("u", at(85), 0, 1, "y")], 100)) == 1
    shorter = window(SessionWindow(10), 0, names=["n"])
    carry_over(slot.operator, shorter, slot.backend, range(12, 16))
    shorter.open(SUBTASK)
    slot.operator = shorter
    assert slot.run([("u", at(91), 0, 1, "y")], 100) == []
    (row,) = slot.run([], 200)
    assert (millis(row[2]), millis(row[3]), row[5]) == (91, 101, 1)
    assert slot.entries() == 0


def changed(followed: Followed, new: WindowOperator, names: list[str]) -> bool:
    """Whether the change was carried over. If it was refused, nothing has changed."""
    entries = list(followed.slot.backend.scan(b""))
    before = followed.slot.operator.spec
    try:
        followed.change(new, names)
    except IncompatibleCheckpointError:
        event("refused")
        assert list(followed.slot.backend.scan(b"")) == entries
        return False
    event(f"carried over{', panes merged' if before != new.spec and entries else ''}")
    return True


MINUTE = 60_000
TUMBLING = SlidingWindow(MINUTE, MINUTE)


@pytest.mark.parametrize(
    ("before", "now", "texts"),
    [
        (TUMBLING, SlidingWindow(5 * MINUTE, 5 * MINUTE), ["size: 1 min before, 5 min now, and a part of the rows"]),
        (SlidingWindow(5 * MINUTE, 5 * MINUTE), TUMBLING, ["size: 5 min before, 1 min now", "cannot be spread over"]),
        (TUMBLING, SlidingWindow(MINUTE, MINUTE, 1000), ["the offset: 0 before, 1 s now"]),
        (TUMBLING, SlidingWindow(2 * MINUTE, MINUTE), ["a part of the rows that open windows need is gone"]),
        (TUMBLING, SessionWindow(MINUTE), ["the kind of step: window before, session now"]),
        (SessionWindow(MINUTE), TUMBLING, ["the kind of step"]),
        (SessionWindow(MINUTE), SessionWindow(MINUTE // 2), ["the gap: 1 min before, 30 s now, and sessions"]),
        (SessionWindow(MINUTE), SessionWindow(2 * MINUTE), ["the gap: 1 min before, 2 min now"]),
    ],
)
def test_windows_that_need_what_is_gone_are_refused(before: Any, now: Any, texts: list[str]) -> None:
    with pytest.raises(IncompatibleCheckpointError) as caught:
        changes_between(window(before), window(now), allow=True)
    for text in ["operator w: the step has changed", *texts, "another uid", "allow_non_restored_state=True"]:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"lateness": 5}),
        ({}, {"emit": "update"}),
        ({"names": ["n"]}, {"names": ["n", "total"]}),
        ({"spec": SessionWindow(10)}, {"spec": SessionWindow(10), "lateness": 5}),
        ({"spec": SessionWindow(10), "lateness": 5, "emit": "update"}, {"spec": SessionWindow(10), "lateness": 5}),
        ({"spec": SlidingWindow(40, 10), "emit": "update"}, {"spec": SlidingWindow(20, 10), "emit": "update"}),
    ],
)
def test_what_would_lose_rows_is_refused(before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = ({"spec": TUMBLING, **options} for options in (before, now))
    with pytest.raises(IncompatibleCheckpointError, match="cannot be carried over"):
        changes_between(window(**old), window(**new))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"lateness": 5}, {}),
        ({"emit": "update"}, {}),
        ({"names": ["n", "total", "mean"]}, {"names": ["mean", "n"]}),
        ({"spec": SlidingWindow(600_000, MINUTE)}, {"spec": SlidingWindow(600_000, 600_000)}),
        ({"spec": SlidingWindow(600_000, MINUTE)}, {"spec": SlidingWindow(300_000, 2 * MINUTE)}),
        ({"spec": TUMBLING, "lateness": 240_000}, {"spec": SlidingWindow(5 * MINUTE, 5 * MINUTE)}),
        ({"spec": TUMBLING}, {"spec": SlidingWindow(MINUTE, MINUTE, 2 * MINUTE)}),
        ({"spec": SessionWindow(10), "lateness": 5}, {"spec": SessionWindow(10)}),
        ({"spec": SessionWindow(10), "emit": "update"}, {"spec": SessionWindow(10)}),
    ],
)
def test_what_the_state_still_holds_is_carried_over(before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = ({"spec": TUMBLING, **options} for options in (before, now))
    changes_between(window(**old), window(**new))
