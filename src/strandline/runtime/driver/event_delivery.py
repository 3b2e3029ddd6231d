"""Tells one listener what happens to a run, in a thread of its own, so that the run never waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from strandline.errors import StrandlineError
from strandline.runtime.driver.events import Progressed, RunEvent, Started, Terminated
from strandline.runtime.liveness.threads import BackgroundThread

log = logging.getLogger(__name__)

KEPT_EVENTS = 1000
"""How many events wait for a slow listener. Beyond that, the oldest progress is dropped, or else the oldest event."""


class EventDelivery:
    """The queue and the thread of one listener."""

    def __init__(self, name: str, tell: Callable[[RunEvent], None]) -> None:
        """`name` is for logs. If `tell` raises an error, the error is logged and the next event follows."""
        self._name = name
        self._tell = tell
        self._changed = threading.Condition()
        self._events: deque[RunEvent] = deque()
        self._dropped = 0
        self._thread = BackgroundThread(f"listener {name}", self._deliver, self._died)

    def start(self) -> None:
        """Begin with `Started`; whatever was posted already comes next."""
        self._thread.start()

    def post(self, event: RunEvent) -> None:
        """Have the listener told of an event. Nothing follows `Terminated`."""
        with self._changed:
            if len(self._events) >= KEPT_EVENTS:
                self._drop_one()
            self._events.append(event)
            self._changed.notify()

    def join(self, patience: float) -> None:
        """Wait until the listener was told of the end, for at most `patience` seconds."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _drop_one(self) -> None:
        oldest = next((event for event in self._events if isinstance(event, Progressed)), self._events[0])
        self._events.remove(oldest)
        self._dropped += 1
        if self._dropped == 1:
            log.warning("the listener %s is slow, so it does not get every event", self._name)

    def _deliver(self) -> None:
        event: RunEvent = Started()
        while True:
            try:
                self._tell(event)
            except (Exception, SystemExit):
                log.exception("the listener %s has failed at %s", self._name, type(event).__name__)
            if isinstance(event, Terminated):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._events)
                event = self._events.popleft()

    def _died(self, error: StrandlineError) -> None:
        log.error("the listener %s gets no more events: %s", self._name, error)
