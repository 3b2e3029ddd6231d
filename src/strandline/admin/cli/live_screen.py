"""A screen that renews itself every second until somebody presses q."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from strandline.admin.cli.console import SafeConsole
from strandline.admin.problems import NotReachedError

RENEW_SECONDS: Final = 1.0
LEAVE = b"qQ\x03\x04\x1b"


def show_live(screen: Callable[[], tuple[Any, bool]]) -> None:
    """Show what `screen` gives until q is pressed or the job has ended; without a terminal, show it once.

    `screen` also says whether the job runs. The last screen stays on the terminal.
    """
    console = SafeConsole()
    shown, runs = screen()
    if not (console.is_terminal and sys.stdin.isatty()):
        console.print(shown)
        return
    with _keys() as pressed, Live(_with_foot(shown), console=console, screen=True, auto_refresh=False) as live:
        while runs and not pressed(RENEW_SECONDS):
            try:
                shown, runs = screen()
                live.update(_with_foot(shown), refresh=True)
            except NotReachedError as error:  # a busy driver answers again
                live.update(_with_foot(shown, str(error)), refresh=True)
    console.print(shown)


def _with_foot(shown: Any, problem: str = "") -> Group:
    foot = Text(problem, style="bold red") if problem else Text("q leaves", style="dim")
    return Group(shown, foot)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits so many seconds, and says whether somebody wants to leave."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left)[0]:
                return False
            typed = os.read(descriptor, 64)
            if not typed or any(key in LEAVE for key in typed):
                return True
        return False

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
