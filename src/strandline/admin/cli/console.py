"""The console that commands print to: a terminal obeys what Strandline prints, never what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from strandline.redaction import without_controls


class SafeConsole(Console):
    """Prints control characters as escapes, and takes brackets for brackets, not for markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))
