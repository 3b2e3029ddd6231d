"""How far the slots of a new generation are with their state, as their task managers tell with every heartbeat."""

from __future__ import annotations

from collections.abc import Collection

from strandline.runtime.driver.figures import Restoring
from strandline.runtime.protocol.messages import SlotSpec


class RestoredState:
    """Adds up what the task managers tell. Any thread may read and note."""

    def __init__(self) -> None:
        self._total: int | None = None
        """The size of what is needed; None while no generation is opened."""
        self._generation = 0
        self._done: dict[str, int] = {}

    def begin(self, specs: Collection[SlotSpec]) -> None:
        """These slots of a new generation are started with the state of a checkpoint."""
        self._generation = max((spec.generation for spec in specs), default=0)
        self._done = {}
        self._total = sum(file.size for spec in specs for state in spec.restore for file in state.files)

    def note(self, manager: str, generation: int, done: int) -> None:
        """The slots of a task manager have so many bytes. One whose slots are all ready tells 0 again.

        What is told of the slots of another generation does not count: it comes late.
        """
        if self._total is not None and generation == self._generation:
            self._done[manager] = max(done, self._done.get(manager, 0))

    def end(self) -> None:
        """The slots are ready, or could not be started."""
        self._total = None

    def progress(self) -> Restoring | None:
        """How far they are; None if no state is being restored."""
        total = self._total
        return Restoring(min(total, sum(self._done.copy().values())), total) if total else None
