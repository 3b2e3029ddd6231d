"""Progress bars for long calls, shown on a terminal only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

SHOWN_AFTER: Final = 2.0
"""A call that is over within so many seconds shows no bar; a bar by steps is shown at once."""
_LOOK_EVERY: Final = 0.25

Step = Callable[[str], None]
"""Is called with the name of the next step."""


@contextmanager
def steps(title: str, total: int) -> Iterator[Step]:
    """Yields a function that begins the next of `total` steps. A terminal shows the steps on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _text: None
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield step
        bar.update(task, description="done", completed=total)


@contextmanager
def byte_bar(title: str, look: Callable[[], tuple[int, int] | None], after: float = SHOWN_AFTER) -> Iterator[None]:
    """Shows how many of how many bytes are done, as `look` says, on standard error if it is a terminal.

    There is no bar before `after` seconds, nor while `look` returns None.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    over = threading.Event()
    showing = threading.Thread(target=_show_bytes, args=(title, look, after, over, console), daemon=True, name="bar")
    showing.start()
    try:
        yield
    finally:
        over.set()
        showing.join()


def _show_bytes(
    title: str, look: Callable[[], tuple[int, int] | None], after: float, over: threading.Event, console: Console
) -> None:
    if over.wait(after):
        return
    columns = (
        TextColumn(title, markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    started = False
    try:
        while not over.wait(_LOOK_EVERY):
            seen = look()
            if seen is None:
                continue
            done, total = seen
            if not started:
                bar.start()
                started = True
                bar.add_task("", total=total)
            bar.update(bar.task_ids[0], completed=done, total=total)
    finally:
        if started:
            bar.stop()
