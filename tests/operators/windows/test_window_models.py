"""Windows follow a plain model over any batches, watermarks, late rows, re-runs and restarts."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.operators.aggregate.limits import GroupingLimits
from strandline.operators.windows.limits import DEFAULT_WINDOW_LIMITS, WindowLimits
from strandline.operators.windows.specs import SessionWindow
from strandline.operators.windows.window_operator import WindowOperator
from tests.examples import examples
from tests.operators.windows.window_models import (
    AGGREGATES,
    INPUT,
    PaneModel,
    SessionModel,
    expected,
    millis,
    pane_specs,
    timed_rows,
)
from tests.operators.windows.window_slot import WindowSlot


def follow(model: Any, operator: WindowOperator, data: st.DataObject, spill: Path) -> None:
    slot = WindowSlot(operator, spill)
    base = data.draw(st.sampled_from([0, -150, 1_700_000_000_000]))
    watermark: int | None = None
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(timed_rows(base))
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
