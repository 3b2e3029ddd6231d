"""Background threads whose unexpected end is seen."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from strandline.errors import StrandlineError

log = logging.getLogger(__name__)

OnFailure = Callable[[StrandlineError], None]
"""Takes the error of a thread that has died, with its traceback."""


class BackgroundThread(threading.Thread):
    """Runs `work` once. If an exception ends it, `on_failure` gets the error: somebody may wait for the thread.

    What the error leads to is the caller's choice. In a run it ends the generation, by the restart strategy.
    """

    def __init__(self, name: str, work: Callable[[], None], on_failure: OnFailure) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._on_failure = on_failure

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            log.exception("the thread %s has died", self.name)
            self._on_failure(thread_error(self.name, error))


def thread_error(name: str, error: BaseException) -> StrandlineError:
    """The error that says that a thread has died, and where."""
    text = "".join(traceback.format_exception(error))
    return StrandlineError(f"the background thread {name} has died: {type(error).__name__}: {error}\n{text}")
