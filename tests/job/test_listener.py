"""Listeners: what they are told, and that they disturb nobody."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

import strandline as sl
from strandline.errors import ConfigError
from strandline.job.listener import Listeners, check_listener
from strandline.runtime.driver.event_delivery import KEPT_EVENTS
from strandline.runtime.driver.events import CheckpointEnded, Progressed, Recovered, Rescaled, Terminated
from strandline.runtime.driver.recoveries import Recovery, Rescaling

RUN: Any = SimpleNamespace(name="visits")
"""Listeners hand the run on, and read its name. A run needs Spark."""
RECOVERY = Recovery(0.0, "slots", (1,), 2, 3.0, 4, 5, "slot 1: its process 7 was killed by SIGKILL")
RESCALING = Rescaling(0.0, 2, 4, 7, 3000.0, 1000.0, 300.0, 600.0, 64, 5, 6)


class Recorder(sl.RunListener):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_started(self, run: sl.JobRun) -> None:
        self.told.append("started")

    def on_progress(self, run: sl.JobRun, progress: dict[str, Any]) -> None:
        self.told.append(progress)

    def on_checkpoint(self, run: sl.JobRun, checkpoint: sl.CheckpointStats) -> None:
        self.told.append(checkpoint)

    def on_recovery(self, run: sl.JobRun, recovery: sl.Recovery) -> None:
        self.told.append(recovery)

    def on_rescale(self, run: sl.JobRun, rescaling: sl.Rescaling) -> None:
        self.told.append(rescaling)

    def on_terminated(self, run: sl.JobRun) -> None:
        self.told.append("terminated")


class Raises(Recorder):
    """Fails in every call, after it noted it."""

    def on_started(self, run: sl.JobRun) -> None:
        super().on_started(run)
        raise SystemExit(1)

    def on_progress(self, run: sl.JobRun, progress: dict[str, Any]) -> None:
        super().on_progress(run, progress)
        raise ValueError("no such dashboard")


class Waits(Recorder):
    """Does not return from its first call before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def on_started(self, run: sl.JobRun) -> None:
        super().on_started(run)
        self.may_go_on.wait()


def test_every_listener_is_told_everything_in_order_and_none_disturbs_another(caplog: pytest.LogCaptureFixture) -> None:
    listeners, all_of_them = Listeners(RUN), (Waits(), Raises(), Recorder())
    for one in all_of_them:
        listeners.add(one)
    listeners.post(Progressed({"batchId": 0}))  # before the run has begun
    checkpoint = cast(sl.CheckpointStats, object())
    with caplog.at_level(logging.ERROR):
        listeners.start()
        for event in (CheckpointEnded(checkpoint), Recovered(RECOVERY), Rescaled(RESCALING), Terminated()):
            listeners.post(event)
        listeners.join(0.5)  # does not wait for the slow one for ever
        all_of_them[0].may_go_on.set()
        listeners.join(60)
    everything = ["started", {"batchId": 0}, checkpoint, RECOVERY, RESCALING, "terminated"]
    assert [one.told for one in all_of_them] == [everything] * 3
    assert "no such dashboard" in caplog.text
    assert "has failed at Progressed" in caplog.text


def test_a_listener_that_is_too_slow_loses_the_oldest_progress_and_nothing_else() -> None:
    listeners, slow = Listeners(RUN), Waits()
    listeners.add(slow)
    listeners.start()
    listeners.post(Recovered(RECOVERY))
    for number in range(3 * KEPT_EVENTS):
        listeners.post(Progressed({"batchId": number}))
    listeners.post(Terminated())
    slow.may_go_on.set()
    listeners.join(60)
    assert slow.told[:2] == ["started", RECOVERY]
    assert slow.told[-1] == "terminated"
    assert [told["batchId"] for told in slow.told[2:-1]] == list(range(2 * KEPT_EVENTS + 2, 3 * KEPT_EVENTS))


def test_a_listener_of_a_run_that_is_over_is_told_so() -> None:
    listeners, late = Listeners(RUN), Recorder()
    listeners.post(Terminated())
    listeners.add(late).start()
    listeners.join(60)
    assert late.told == ["started", "terminated"]


def test_a_listener_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"extends sl\.RunListener"):
        check_listener(print)
