"""Listeners of a run, and what they are told."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import ConfigError
from strandline.runtime.driver.event_delivery import EventDelivery
from strandline.runtime.driver.events import (
    CheckpointEnded,
    Progressed,
    Recovered,
    Rescaled,
    RunEvent,
    Started,
    Terminated,
)
from strandline.runtime.driver.recoveries import Recovery, Rescaling

if TYPE_CHECKING:
    from strandline.job.run import JobRun

END_PATIENCE = 1.0
"""For how many seconds the end of a run waits for its listeners."""


class RunListener:
    """Is told what happens to a run. Override the methods that you need, and give an instance to `add_listener`.

    Each listener is called in a thread of its own, one event after the other. It does not disturb the run. If it
    raises, its traceback is logged, and the next event follows. If it is slow, at most 1000 events wait for it, and the
    oldest progress is dropped. A listener may call the methods of `run`.
    """

    def on_started(self, run: JobRun) -> None:
        """The run has begun, or the listener was added to a run that has."""

    def on_progress(self, run: JobRun, progress: dict[str, Any]) -> None:
        """A batch is committed. `progress` is as in `run.last_progress`."""

    def on_checkpoint(self, run: JobRun, checkpoint: CheckpointStats) -> None:
        """A checkpoint or savepoint was completed or has failed: see `checkpoint.status`."""

    def on_recovery(self, run: JobRun, recovery: Recovery) -> None:
        """Lost slots were replaced, or the run went back to its last completed checkpoint."""

    def on_rescale(self, run: JobRun, rescaling: Rescaling) -> None:
        """The parallelism of the run was changed."""

    def on_terminated(self, run: JobRun) -> None:
        """The run is over: see `run.status` and `run.error`. No other call follows."""


def check_listener(listener: object) -> RunListener:
    """Raises `ConfigError` unless the object is a listener."""
    if not isinstance(listener, RunListener):
        raise ConfigError(
            f"add_listener({listener!r}): a listener is an instance of a class that extends sl.RunListener"
        )
    return listener


class Listeners:
    """The listeners of one run."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._all: list[EventDelivery] = []
        self._ended = False

    def add(self, listener: RunListener) -> EventDelivery:
        """Add a listener. It is told nothing before its delivery is started."""
        with self._lock:
            delivery = EventDelivery(repr(listener), partial(_tell, listener, self._run))
            self._all.append(delivery)
            if self._ended:
                delivery.post(Terminated())
            return delivery

    def start(self) -> None:
        """Tell all listeners that the run has begun, and whatever has happened since they were added."""
        for delivery in list(self._all):
            delivery.start()

    def post(self, event: RunEvent) -> None:
        """Tell all listeners. Never waits for one."""
        with self._lock:
            self._ended |= isinstance(event, Terminated)
            for delivery in self._all:
                delivery.post(event)

    def join(self, patience: float = END_PATIENCE) -> None:
        """Wait until all listeners have been told of the end, for at most `patience` seconds in all."""
        deadline = time.monotonic() + patience
        for delivery in list(self._all):
            delivery.join(max(0.0, deadline - time.monotonic()))


def _tell(listener: RunListener, run: JobRun, event: RunEvent) -> None:
    match event:
        case Started():
            listener.on_started(run)
        case Progressed(report):
            listener.on_progress(run, report)
        case CheckpointEnded(stats):
            listener.on_checkpoint(run, stats)
        case Recovered(recovery):
            listener.on_recovery(run, recovery)
        case Rescaled(rescaling):
            listener.on_rescale(run, rescaling)
        case Terminated():
            listener.on_terminated(run)
