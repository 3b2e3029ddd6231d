"""A thread that does something now and then, and whose failures never reach the job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

LAST_SECONDS = 5.0
"""How long `close` waits."""


class Background:
    """Calls `act` every `seconds`, in a daemon thread, and a last time when it is closed.

    The first failure of a row of failures is logged; the next success ends the row.
    """

    def __init__(self, name: str, what: str, act: Callable[[bool], bool], seconds: float = 1.0) -> None:
        """`act` gets True the last time, and says whether it did something. `what` names the work in the log."""
        self._what = what
        self._act = act
        self._seconds = seconds
        self._closing = False
        self._wanted = threading.Event()
        """Set if somebody does not want to wait for the next time."""
        self._failed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def now(self) -> None:
        """Has the work done now, in the background."""
        self._wanted.set()

    def finish(self) -> None:
        """Has the work done a last time, in the background."""
        self._closing = True
        self._wanted.set()

    def close(self, seconds: float = LAST_SECONDS) -> bool:
        """Has the work done a last time; False if that takes longer than so many seconds. Never raises."""
        self.finish()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            self._wanted.clear()  # before the look: what is wanted from here on is not lost
            last = self._closing
            try:
                if self._act(last):
                    self._failed = False
            except Exception as error:  # noqa: BLE001 - whatever a disk or a storage does, the job goes on
                if not self._failed:
                    log.warning("%s failed and is tried again; the job goes on: %s", self._what, error)
                self._failed = True
            if last:
                return
            self._wanted.wait(self._seconds)
