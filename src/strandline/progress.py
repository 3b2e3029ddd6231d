"""A progress bar for long calls, shown on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
