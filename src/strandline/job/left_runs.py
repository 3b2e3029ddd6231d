"""Ends the runs that are still there when the interpreter exits, so that Spark's own end finds no query at work.

A script may end without `stop()`, by its last line, an exception or Ctrl-C. Then every run that is left is stopped: the
batch is finished, a last checkpoint covers it, and listeners learn of the end. A stop that takes longer than
`EXIT_PATIENCE` seconds becomes a cancel, and so does one that a second Ctrl-C interrupts.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from strandline.errors import StrandlineError

if TYPE_CHECKING:
    from strandline.job.run import JobRun

EXIT_PATIENCE = 30.0
"""Seconds that a run gets to stop when the interpreter exits."""

_left: WeakSet[JobRun] = WeakSet()


def end_at_exit(run: JobRun) -> None:
    """End `run` when the interpreter exits, unless it has ended before."""
    _register()
    _left.add(run)


@cache
def _register() -> None:
    # Not documented, but the only hook that comes before the end of thread pools, which a stop needs:
    # `concurrent.futures` ends its pools by it, too, and the hooks are called in reverse order.
    register: Callable[[Callable[[], Any]], Any] = getattr(threading, "_register_atexit", atexit.register)
    register(_end_all)


def _end_all() -> None:
    for run in list(_left):
        stopping = threading.Thread(target=_quietly, args=(run.stop,), daemon=True, name="stop-at-exit")
        try:
            stopping.start()
            stopping.join(EXIT_PATIENCE)
        except KeyboardInterrupt:
            pass
        if stopping.is_alive():
            _quietly(run._abandon)


def _quietly(end: Callable[[], object]) -> None:
    """A failure is in the log, and in `run.error`."""
    with suppress(StrandlineError):
        end()
