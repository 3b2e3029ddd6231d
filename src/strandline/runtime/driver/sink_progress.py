"""Counts what the sinks of a run have got, over all its generations."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import msgspec

from strandline.errors import StrandlineError
from strandline.runtime.driver.figures import SinkFigures
from strandline.runtime.driver.recoveries import first_line


class SinkProgress:
    """The figures of the sinks, by place. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, SinkFigures] = {}
        self._held_up_since: float | None = None

    def published(self, place: str, checkpoint: int, rows: int, commit_ms: float) -> None:
        """A target has the rows of a checkpoint."""
        with self._lock:
            before = self._of(place)
            self._figures[place] = msgspec.structs.replace(
                before,
                rows=before.rows + rows,
                last_checkpoint=checkpoint,
                last_commit_ms=commit_ms,
                failures_in_row=0,
                error="",
            )

    def failed(self, place: str, error: StrandlineError) -> None:
        """A commit has failed. It is tried again, or the run restarts."""
        with self._lock:
            before = self._of(place)
            self._figures[place] = msgspec.structs.replace(
                before, failures_in_row=before.failures_in_row + 1, error=first_line(str(error))
            )

    def recovered(self) -> None:
        """A generation has begun, so all targets have the rows of the checkpoint that it restores: no commit fails."""
        with self._lock:
            for place, before in list(self._figures.items()):
                self._figures[place] = msgspec.structs.replace(before, failures_in_row=0, error="")

    def staged(self, sizes: Mapping[str, int]) -> None:
        """So many bytes are staged for each sink and covered by no completed checkpoint yet."""
        with self._lock:
            for place in {*self._figures, *sizes}:
                self._figures[place] = msgspec.structs.replace(self._of(place), staged_bytes=sizes.get(place, 0))

    def held_up(self, waits: bool) -> None:
        """Whether batches wait for the sinks."""
        with self._lock:
            since = self._held_up_since or time.monotonic()
            self._held_up_since = since if waits else None

    def figures(self) -> tuple[SinkFigures, ...]:
        """The sinks, by their places."""
        with self._lock:
            return tuple(figures for _place, figures in sorted(self._figures.items()))

    @property
    def held_up_s(self) -> float:
        """For how many seconds batches have been waiting for the sinks; 0 if they do not wait."""
        with self._lock:
            return 0.0 if self._held_up_since is None else time.monotonic() - self._held_up_since

    def _of(self, place: str) -> SinkFigures:
        return self._figures.get(place) or SinkFigures(place)
