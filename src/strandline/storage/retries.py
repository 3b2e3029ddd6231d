"""Repeats an operation of a storage or a sink that failed, with growing pauses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from strandline.errors import AlreadyExistsError, SinkError, StorageError, StorageFullError, StorageRefusedError

log = logging.getLogger(__name__)

T = TypeVar("T")

LASTING = (AlreadyExistsError, StorageFullError, StorageRefusedError)
"""Errors that the same operation would raise again. `NotFoundError` is not one: some stores show new files late."""


class Retries:
    """How often a driver tries an operation of a storage or a sink, and how long it pauses in between.

    The operation must be safe to repeat after a try that failed and took effect all the same.
    """

    def __init__(self, tries: int = 6, first_pause: float = 0.1) -> None:
        self.tries = tries
        self._first_pause = first_pause
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Do not pause any more: the driver was told to end, and somebody waits for that."""
        self._hurry.set()

    def pause(self, attempt: int) -> None:
        """Wait after try number `attempt`, counted from 0."""
        self._hurry.wait(self._first_pause * 2**attempt)

    def call(self, what: str, act: Callable[[], T]) -> T:
        """The result of `act`. Raises its error if it is `LASTING`, or after the last try; `what` names it in logs."""
        for attempt in range(self.tries - 1):
            try:
                return act()
            except LASTING:
                raise
            except (StorageError, SinkError) as error:
                log.warning("%s failed and is tried again: %s", what, error)
            self.pause(attempt)
        return act()
