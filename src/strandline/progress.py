"""Progress of long work for whoever watches a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], None]
"""Told what is being done next."""


@contextmanager
def steps(title: str, total: int) -> Iterator[Step]:
    """A bar on standard error that moves on with every step but the first; nothing where nobody watches."""
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
