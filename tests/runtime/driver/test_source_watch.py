"""One warning for every silence of a source, and none for a source that is asked often."""

from __future__ import annotations

import time

import pytest

from strandline.runtime.driver.generations import GenerationCounts
from strandline.runtime.driver.progress import RunProgress
from strandline.runtime.driver.run_figures import run_figures
from strandline.runtime.driver.source_watch import Silence, SourceWatch
from strandline.runtime.driver.status import RunStatus

ASKING = "Getting offsets from KafkaV2[Subscribe[clicks]]"
IDLE = "Waiting for data to arrive"


def warnings_after(words: list[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a watch that finds the query doing this, ten times a second."""
    left = iter(words)
    times = iter(range(len(words)))
    watch = SourceWatch("visits", lambda: next(left), lambda: next(times) / 10)
    for _ in words:
        watch.look()
    return [record.getMessage() for record in caplog.records]


def test_a_silence_is_told_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    silence, answer = warnings_after([ASKING] * 300 + [IDLE, ASKING, IDLE], caplog)
    assert silence.startswith("job visits: KafkaV2[Subscribe[clicks]] has not answered for 10 s; the job waits.")
    assert answer == "job visits: KafkaV2[Subscribe[clicks]] answers again after 30 s"


def test_a_silence_is_a_figure_of_the_run_until_it_ends() -> None:
    told: list[Silence | None] = []
    now = iter(range(10_000))
    words = [ASKING]
    watch = SourceWatch("visits", lambda: words[-1], lambda: next(now) / 10, told.append)
    for _ in range(200):
        watch.look()
    assert told == [Silence("KafkaV2[Subscribe[clicks]]", 0.0)]
    watch.answered()
    watch.answered()
    assert told[1:] == [None]
    for _ in range(200):
        watch.look()
    watch.close()
    assert [one is None for one in told] == [False, True, False, True]
    progress = RunProgress("visits")
    progress.silence = Silence("KafkaV2[Subscribe[clicks]]", time.monotonic() - 30)
    figures = run_figures(RunStatus.RUNNING, 0, GenerationCounts(), progress, None, None)
    assert figures.silent_source == "KafkaV2[Subscribe[clicks]]"
    assert 30 <= figures.silent_s < 60


def test_a_source_that_answers_now_and_then_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_after(([ASKING] * 90 + [IDLE]) * 5, caplog) == []
