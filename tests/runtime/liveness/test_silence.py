"""How long somebody has been silent, and threads that die."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import StrandlineError
from strandline.runtime.liveness.processes import is_working, progress, started_at
from strandline.runtime.liveness.silence import LONGEST_STEP, Silence
from strandline.runtime.liveness.threads import BackgroundThread

TIMEOUT = 8.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1))
def test_silence_is_the_time_since_the_last_sign_of_life_in_which_this_process_was_awake(
    looks: list[tuple[float, bool]],
) -> None:
    now = 0.0
    silence = Silence(lambda: now)
    expected = 0.0
    for pause, heard in looks:
        now += pause
        expected += min(pause, LONGEST_STEP)
        if heard:
            silence.heard()
            expected = 0.0
        assert silence.seconds() == pytest.approx(expected)


def test_a_process_that_was_stopped_itself_takes_nobody_for_silent() -> None:
    now = 0.0
    silence = Silence(lambda: now)
    now += 3600
    assert silence.seconds() < TIMEOUT


def test_a_thread_that_dies_is_reported_with_its_traceback() -> None:
    died: list[StrandlineError] = []

    def merge_segments() -> None:
        raise KeyError("a bug")

    thread = BackgroundThread("upkeep", merge_segments, died.append)
    thread.start()
    thread.join()
    (error,) = died
    assert str(error).startswith("the background thread upkeep has died: KeyError: 'a bug'")
    assert "in merge_segments" in str(error)


def test_a_process_that_works_makes_progress_and_one_that_waits_makes_none() -> None:
    program = "print(1, flush=True); input(); print(sum(range(10**8)))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        started = started_at(process.pid)
        time.sleep(0.05)  # until it waits for its input
        before = progress(process.pid)
        assert progress(process.pid) == before
        assert is_working(process.pid, started)
        assert not is_working(process.pid, started - 1)
        process.stdin.write("\n")
        process.stdin.close()
        process.stdout.readline()
        assert progress(process.pid) != before
    assert not is_working(process.pid, started)
