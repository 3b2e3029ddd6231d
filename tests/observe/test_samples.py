"""Samples of figures: how many there are, and what they stand for."""

from __future__ import annotations

from itertools import pairwise

from strandline.observe.facts import KEPT_SAMPLES
from strandline.observe.samples import SAMPLE_EVERY, Samples
from strandline.runtime.driver.figures import RunFigures
from strandline.runtime.driver.recoveries import Began
from strandline.runtime.driver.status import RunStatus


def test_samples_span_ten_minutes_also_while_much_happens() -> None:
    samples, end = Samples(), 5 * KEPT_SAMPLES
    for look in range(end):
        at = look / 5
        samples.take(Began(at, 1000 + at), RunFigures(RunStatus.RUNNING, rows=look * 20, state_bytes=look), ())
    kept = samples.all()
    times = [one.time_ms for one in kept]
    assert min(after - before for before, after in pairwise(times)) >= SAMPLE_EVERY * 1000
    assert times[-1] - times[0] >= SAMPLE_EVERY * 1000 * (KEPT_SAMPLES - 1)
    assert kept[-1].state_bytes == end - 1  # the newest figures, whenever they came
    assert 99 < kept[-1].rows_per_second < 101


def test_a_sample_a_second_stays_as_it_is() -> None:
    samples = Samples()
    for second in range(5):
        samples.take(Began(float(second), 1000.0 + second), RunFigures(RunStatus.RUNNING, state_bytes=second), ())
    assert [one.state_bytes for one in samples.all()] == [0, 1, 2, 3, 4]
