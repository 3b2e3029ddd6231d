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


def ends_within(seconds: float, name: str, act: Callable[[], None]) -> bool:
    """Run `act` in a thread of its own. Raises its error; False if it has not ended after `seconds`, and goes on."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            log.warning("%s: %s", name, error)
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return False
    for error in errors:
        raise error
    return True


def thread_error(name: str, error: BaseException) -> StrandlineError:
    """The error that says that a thread has died, and where."""
    text = "".join(traceback.format_exception(error))
    return StrandlineError(f"the background thread {name} has died: {type(error).__name__}: {error}\n{text}")
