"""Ends the runs that are still there when the interpreter exits, so that Spark's own end finds no query at work.

A script may end without `stop()`, by its last line, an exception or Ctrl-C. Then every run that is left is stopped: the
batch is finished, and a last checkpoint covers it. A stop that takes longer than `EXIT_PATIENCE` seconds becomes a
cancel, and so does one that a second Ctrl-C interrupts.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

EXIT_PATIENCE = 30.0
"""Seconds that a run gets to stop when the interpreter exits."""


class Left(Protocol):
    """What is known here of a run."""

    def stop_quietly(self) -> None:
        """End with a last checkpoint. Raises nothing: what goes wrong is in the log."""

    def cancel_quietly(self) -> None:
        """End at once, and keep the checkpoints."""


_left: WeakSet[Left] = WeakSet()


def end_at_exit(run: Left) -> None:
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
        stopping = threading.Thread(target=run.stop_quietly, daemon=True, name="stop-at-exit")
        try:
            stopping.start()
            stopping.join(EXIT_PATIENCE)
        except KeyboardInterrupt:
            pass
        if stopping.is_alive():
            run.cancel_quietly()
