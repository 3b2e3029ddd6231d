"""The output rows of epochs, which wait in the driver until a checkpoint publishes them.

Slots do not stage them: that would be a file for each slot and epoch. The epoch log holds a copy, so that the next
takeover can stage them if this driver is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from strandline.checkpoint.epochs import Rows
from strandline.checkpoint.metadata import SinkFile
from strandline.runtime.driver.restore.epoch_rows import Stagers, stage_rows
from strandline.storage.retries import Retries

_BATCH: Final = 3
_STREAM: Final = 4
"""Where in `Rows` the epoch and the rows are."""


class StagedRows:
    """Keeps the rows of committed epochs until they are staged. Safe to use from several threads."""

    def __init__(
        self, job: str, stagers: Stagers, retries: Retries, note: Callable[[int, list[SinkFile]], None]
    ) -> None:
        """`note` is told of what was staged, with the last epoch of which it may hold rows."""
        self._note = note
        self._job = job
        self._stagers = stagers
        self._retries = retries
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        """Held while rows are staged. Taken before `_lock`."""
        self._rows: list[Rows] = []
        self._barriers: list[int] = []
        """The epochs after which checkpoints were taken: no file has rows from both sides of one."""
        self.size = 0
        """How many bytes of rows are in memory."""

    def add(self, rows: Iterable[Rows]) -> None:
        """Take the rows of a committed epoch."""
        with self._lock:
            for one in rows:
                self._rows.append(one)
                self.size += len(one[_STREAM])

    def barrier(self, batch: int) -> None:
        """A checkpoint is taken after this epoch, and the rows of no later one are here."""
        with self._lock:
            self._barriers.append(batch)

    def stage(self, batch: int) -> None:
        """Stage all rows of epochs up to `batch`. When this returns, `note` has been told of all of them.

        If staging fails, the rows are still there for another try.
        """
        with self._staging:
            with self._lock:
                bounds = [one for one in self._barriers if one < batch] + [batch]
                groups = [(bound, [one for one in self._rows if one[_BATCH] <= bound]) for bound in bounds]
            taken = 0
            done: list[tuple[int, list[SinkFile]]] = []
            for bound, rows in groups:
                if len(rows) > taken:
                    files = stage_rows(self._job, rows[taken:], self._stagers, bound, self._retries)
                    done.append((bound, files))
                    taken = len(rows)
            for bound, files in done:  # before anybody else looks for rows: a checkpoint may wait for them
                self._note(bound, files)
            with self._lock:
                self.size -= sum(len(one[_STREAM]) for one in self._rows[:taken])
                self._rows = self._rows[taken:]  # rows are added at the end, in the order of epochs
                self._barriers = [one for one in self._barriers if one > batch]
