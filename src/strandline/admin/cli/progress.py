"""A progress bar for operations over two seconds: on standard error, and only if that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from strandline.admin.cli.console import SafeConsole
from strandline.progress import SHOWN_AFTER
from strandline.redaction import without_controls

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from strandline.admin.rest_client import Progress

ASK_EVERY: Final = 0.5


class Reporter:
    """Shows the progress of one operation."""

    def __init__(self, title: str, console: SafeConsole) -> None:
        self._title = without_controls(title)
        self._console = console
        self._began = time.monotonic()
        self._asked = 0.0
        self._bars: dict[bool, Bar] = {}
        self._shown: Bar | None = None

    def report(self, progress: Progress) -> None:
        """The operation is so far."""
        if not self._console.is_terminal or time.monotonic() - self._began < SHOWN_AFTER:
            return
        bytes_count = progress.unit == "bytes" and progress.total is not None
        if self._shown is None or bytes_count not in self._bars:
            self.close()
            self._shown = self._bars[bytes_count] = self._bar(bytes_count)
            self._shown.start()
            self._shown.add_task("", total=None)
        words = without_controls(progress.step).partition("\n")[0]
        self._shown.update(
            self._shown.task_ids[0], description=words, completed=progress.done, total=progress.total or None
        )

    def report_by(self, ask: Callable[[], Progress]) -> None:
        """The operation is as far as `ask` says, which is called if the bar is shown, at most twice a second."""
        now = time.monotonic()
        if self._console.is_terminal and now - self._began >= SHOWN_AFTER and now - self._asked >= ASK_EVERY:
            self._asked = now
            self.report(ask())

    def close(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown.stop()
        self._bars.clear()
        self._shown = None

    def _bar(self, bytes_count: bool) -> Bar:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )

        sizes = [DownloadColumn(), TransferSpeedColumn()] if bytes_count else []
        return Progress(
            TextColumn(self._title, markup=False),
            BarColumn(),
            *sizes,
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )


@contextmanager
def progress_of(title: str) -> Iterator[Reporter]:
    """Shows the progress of an operation until the block ends."""
    reporter = Reporter(title, SafeConsole(stderr=True))
    try:
        yield reporter
    finally:
        reporter.close()
