"""Background threads whose unexpected end is seen."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from strandline.errors import StrandlineError

log = logging.getLogger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

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


def all_done(acts: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Run all of `acts`, each with the name of its thread, at the same time. Raises the first error once all are done.

    The threads do not keep the process from ending, as those of a pool would.
    """
    if len(acts) == 1:
        acts[0][1]()
        return
    errors: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), name=name, daemon=True) for name, act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def map_with_caller(pool: ThreadPoolExecutor, work: Callable[[Given], Made], items: Iterable[Given]) -> list[Made]:
    """What `work` makes of each item, all at once: of the last one in this thread, which would only wait otherwise.

    `work` should return its errors: after an error of the last item the others go on, and nobody hears of theirs.
    """
    given = list(items)
    if not given:
        return []
    futures = [pool.submit(work, item) for item in given[:-1]]
    made = work(given[-1])
    return [*(future.result() for future in futures), made]


def thread_error(name: str, error: BaseException) -> StrandlineError:
    """The error that says that a thread has died, and where."""
    text = "".join(traceback.format_exception(error))
    return StrandlineError(f"the background thread {name} has died: {type(error).__name__}: {error}\n{text}")
