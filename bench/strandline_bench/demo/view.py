"""What the demo shows while it runs: a live picture on a terminal, or one line per event."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from strandline.checkpoint.stats import CheckpointStats


@dataclass(frozen=True, slots=True)
class SlotLine:
    """One process of the run, as it is shown."""

    name: str
    pid: int
    state: str
    """`running`, `killed`, `lost` or `ended`."""
    note: str = ""


@dataclass(slots=True)
class Picture:
    """The facts that the view shows at one moment."""

    rows_total: int
    phase: str = "starting"
    rows_done: int = 0
    rows_arrived: int = 0
    rate: float = 0.0
    state_bytes: int = 0
    batches: int = 0
    restarts: int = 0
    replaced: int = 0
    processes: tuple[SlotLine, ...] = ()
    checkpoints: tuple[CheckpointStats, ...] = ()
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self.started


class View(Protocol):
    """Where the demo tells what happens. `event` may be called from any thread."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, text: str, style: str = "") -> None:
        """Show one line about something that happened."""

    def changed(self) -> None:
        """The picture has new figures."""


class PlainView:
    """Prints one line per event, for pipes and logs. Checkpoints and every tenth of the rows are events, too."""

    def __init__(self, console: Console, picture: Picture) -> None:
        self._console = console
        self._picture = picture
        self._tenths = 0
        self._told: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.changed()

    def event(self, text: str, style: str = "") -> None:
        line = f"{self._picture.elapsed:6.1f} s  {text}"
        self._console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def changed(self) -> None:
        picture = self._picture
        for checkpoint in picture.checkpoints:
            if checkpoint.status != "in_progress" and checkpoint.id not in self._told:
                self._told.add(checkpoint.id)
                self.event(_checkpoint_line(checkpoint))
        tenths = picture.rows_done * 10 // picture.rows_total
        if tenths > self._tenths:
            self._tenths = tenths
            self.event(
                f"{picture.rows_done:,} of {picture.rows_total:,} rows, {picture.rate:,.0f} rows/s, "
                f"state {size(picture.state_bytes)}"
            )


class LiveView:
    """A picture that is redrawn several times a second and fits the size of the terminal."""

    def __init__(self, console: Console, picture: Picture) -> None:
        self._console = console
        self._picture = picture
        self._events: deque[Text] = deque(maxlen=100)
        self._spinner = Spinner("dots", style="cyan")
        self._over = False
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=8, vertical_overflow="crop", transient=False
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._live.__exit__(kind, error, trace)

    def event(self, text: str, style: str = "") -> None:
        first = text.splitlines()[0] if text else ""
        self._events.append(
            Text.assemble(
                (f"{self._picture.elapsed:5.1f} s  ", "dim"), (first, style), no_wrap=True, overflow="ellipsis"
            )
        )

    def changed(self) -> None:
        """Nothing to do: the picture is read when it is drawn."""

    # --- drawing ---------------------------------------------------------------------------------

    def _draw(self) -> RenderableType:
        picture = self._picture
        processes = len(picture.processes) or 1
        # Borders and titles: 4 lines of the head, 2 of the processes, 4 of the table, 2 of the events.
        # The last picture leaves room for the result below it.
        spare = 7 if self._over else 1
        left = max(4, self._console.height - spare - 4 - 2 - processes - 4 - 2)
        shown = max(2, left // 2)
        return Group(
            self._head(picture),
            self._processes(picture),
            self._checkpoints(picture, shown),
            self._log(left - shown),
        )

    def _head(self, picture: Picture) -> RenderableType:
        done = picture.rows_done / picture.rows_total
        first = Table.grid(expand=True, padding=(0, 1))
        first.add_column(width=1)
        first.add_column(ratio=1)
        first.add_column(justify="right", no_wrap=True)
        first.add_row(
            Text("●", style="green") if self._over else self._spinner,
            ProgressBar(total=1.0, completed=done, complete_style="cyan", finished_style="green"),
            Text.assemble(
                (f"{picture.rows_done:,}", "bold"), f" / {picture.rows_total:,} rows ", (f"{done:4.0%}", "bold cyan")
            ),
        )
        second = Table.grid(expand=True, padding=(0, 1))
        for _ in range(4):
            second.add_column(no_wrap=True)
        second.add_column(no_wrap=True, justify="right")
        completed = sum(checkpoint.status == "completed" for checkpoint in picture.checkpoints)
        second.add_row(
            *(
                Text.assemble((value, "bold"), (f" {unit}", "dim"))
                for value, unit in (
                    (f"{picture.rate:,.0f}", "rows/s"),
                    (size(picture.state_bytes), "state"),
                    (str(picture.batches), "batches"),
                    (str(completed), "checkpoints"),
                    (f"{picture.elapsed:.0f}", "s"),
                )
            )
        )
        title = f"[bold]strandline demo[/] [dim]·[/] {escape(picture.phase)}"
        return Panel(Group(first, second), title=title, title_align="left", border_style="cyan")

    def _processes(self, picture: Picture) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for process in picture.processes:
            dot, style = _STATES[process.state]
            grid.add_row(
                Text.assemble((dot, style), f" {process.name}"),
                f"pid {process.pid}",
                Text.assemble((process.state, style), (f"  {process.note}" if process.note else "", "dim")),
            )
        if not picture.processes:
            grid.add_row(Text("not started yet", style="dim"), "", "")
        return Panel(grid, title="processes", title_align="left", border_style="dim")

    def _checkpoints(self, picture: Picture, shown: int) -> RenderableType:
        table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
        table.add_column("id", justify="right")
        table.add_column("status", no_wrap=True)
        for name in ("duration", "sync", "async", "uploaded", "full size"):
            table.add_column(name, justify="right", no_wrap=True)
        for checkpoint in picture.checkpoints[: -shown - 1 : -1]:
            mark, style = _STATUSES[checkpoint.status]
            table.add_row(
                str(checkpoint.id),
                Text(f"{mark} {checkpoint.status.replace('_', ' ')}", style=style),
                f"{checkpoint.barrier_to_completed_ms:,.0f} ms",
                f"{checkpoint.sync_ms:,.0f} ms",
                f"{checkpoint.async_ms:,.0f} ms",
                size(checkpoint.checkpointed_bytes),
                size(checkpoint.full_bytes),
            )
        title = "checkpoints [dim](newest first)[/]"
        return Panel(table, title=title, title_align="left", border_style="dim", height=shown + 3)

    def _log(self, lines: int) -> RenderableType:
        newest = list(self._events)[-lines:]
        return Panel(Group(*newest), title="events", title_align="left", border_style="dim", height=lines + 2)


_STATES = {"running": ("●", "green"), "killed": ("✖", "bold red"), "lost": ("✖", "red"), "ended": ("○", "dim")}
_STATUSES = {"completed": ("✔", "green"), "in_progress": ("…", "yellow"), "failed": ("✖", "red")}


def size(count: float) -> str:
    """A number of bytes as readable text."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def _checkpoint_line(checkpoint: CheckpointStats) -> str:
    if checkpoint.status == "failed":
        return f"checkpoint {checkpoint.id} was given up: {checkpoint.failure}"
    return (
        f"checkpoint {checkpoint.id} completed in {checkpoint.barrier_to_completed_ms:,.0f} ms "
        f"(sync {checkpoint.sync_ms:,.0f} ms, async {checkpoint.async_ms:,.0f} ms): "
        f"uploaded {size(checkpoint.checkpointed_bytes)}, full size {size(checkpoint.full_bytes)}"
    )
