"""Makes epochs durable, beside the epochs that follow: one file in the epoch log for all that have come since the last.

The slots may be an epoch or more ahead of what is durable. If the log refuses a file, the generation ends, and the next
one begins where the log ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from strandline.checkpoint.epochs import Rows
from strandline.checkpoint.metadata import SourcePosition
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.driver.realtime.staged_rows import StagedRows
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.liveness.threads import BackgroundThread
from strandline.runtime.protocol.slot_calls import EpochSegment
from strandline.runtime.protocol.taskmanager_calls import DurableSegment

log = logging.getLogger(__name__)

MOST_EPOCHS: Final = 16
"""So many epochs are ahead of what is durable at most."""
MOST_BYTES: Final = 64 << 20
"""So many bytes of epochs wait for the log at most."""
MOST_UNSTAGED: Final = 32 << 20
"""With more bytes of output rows than that, no checkpoint is waited for: they are staged."""
LOOK_EVERY: Final = 0.1
"""Seconds between two looks whether somebody still wants to wait."""


@dataclass(frozen=True, slots=True)
class DecidedEpoch:
    """An epoch that is decided, and not durable yet."""

    batch: int
    position: Callable[[], SourcePosition]
    """The position after it, with its times."""
    segments: Sequence[tuple[int, EpochSegment]] = ()
    """Each with its subtask."""
    rows: Sequence[Rows] = ()
    call_back: Callable[[], None] = lambda: None
    """Gives rows to those who want them at least once: before the epoch is durable, else they might not get them."""
    done: Callable[[], None] = lambda: None
    """Tells that it is durable."""

    @property
    def size(self) -> int:
        return sum(len(one.content) for _index, one in self.segments) + sum(len(stream) for *_of, stream in self.rows)


@dataclass(slots=True)
class _Waiting:
    epochs: list[DecidedEpoch] = field(default_factory=list)
    size: int = 0


class DurableEpochs:
    """Writes the epochs of one generation in their order, in a thread of its own."""

    def __init__(
        self,
        epoch_log: EpochLog | None,
        rows: StagedRows,
        on_failure: Callable[[StrandlineError], None],
    ) -> None:
        """Without an `epoch_log` epochs become durable with a checkpoint.

        `rows` gets the output rows of the epochs. `on_failure` gets the error after which nothing becomes durable any
        more.
        """
        self._log = epoch_log
        self._rows = rows
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting = _Waiting()
        self._durable = -1
        """The last epoch that is written, or that needs no log."""
        self._segments: list[DurableSegment] = []
        """What became durable and `take_segments` has not returned."""
        self._failure: StrandlineError | None = None
        self._closed = False
        self._left = False
        """Whether nobody waits for the thread any more: it calls no function of the user's."""
        self._thread = BackgroundThread("durable-epochs", self._loop, self._fail)

    @property
    def has_log(self) -> bool:
        """Whether epochs are durable without a checkpoint."""
        return self._log is not None

    def start(self) -> None:
        """Begin. The thread ends after `close`."""
        self._thread.start()

    def add(self, epoch: DecidedEpoch, check: Callable[[], None]) -> None:
        """Take an epoch. Waits while too many wait already; an error of `check` ends the wait."""
        with self._changed:
            self._wait(lambda: len(self._waiting.epochs) < MOST_EPOCHS and self._waiting.size < MOST_BYTES, check)
            self._waiting.epochs.append(epoch)
            self._waiting.size += epoch.size
            self._changed.notify_all()

    def wait(self, batch: int, check: Callable[[], None]) -> None:
        """Return when the epochs up to `batch` are durable. Raises what prevents that, or the error of `check`."""
        with self._changed:
            self._wait(lambda: self._durable >= batch, check)

    def _wait(self, reached: Callable[[], bool], check: Callable[[], None]) -> None:
        while not self._changed.wait_for(lambda: reached() or self._failure is not None or self._closed, LOOK_EVERY):
            check()
        if self._failure is not None:
            raise self._failure
        if not reached():
            raise SlotLostError("the run ends")

    def take_segments(self) -> list[DurableSegment]:
        """The segments that became durable since the last call."""
        with self._changed:
            taken, self._segments = self._segments, []
            return taken

    def give_back(self, segments: list[DurableSegment]) -> None:
        """What `take_segments` gave has not reached the task managers."""
        with self._changed:
            self._segments = [*segments, *self._segments]

    @property
    def untold(self) -> int:
        """How many segments `take_segments` would return."""
        return len(self._segments)

    def close(self, patience: float) -> None:
        """Write what waits, for at most so many seconds, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(patience)
        self._left = True

    # --- the thread ----------------------------------------------------------------------------------

    def _fail(self, error: StrandlineError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self._on_failure(error)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting.epochs) or self._closed)
                taken, self._waiting = self._waiting, _Waiting()
                self._changed.notify_all()
            if not taken.epochs:
                return
            try:
                self._make_durable(taken.epochs)
                for epoch in taken.epochs:
                    epoch.done()
                if self._rows.size > MOST_UNSTAGED:
                    self._rows.stage(self._durable)
            except StrandlineError as error:
                self._fail(error)
                return

    def _make_durable(self, epochs: Sequence[DecidedEpoch]) -> None:
        first, last = epochs[0], epochs[-1]
        for epoch in epochs:
            if self._left:
                raise SlotLostError("the run has ended")
            epoch.call_back()
        segments = [(one, index, epoch.batch) for epoch in epochs for index, one in epoch.segments]
        durable: list[DurableSegment] = []
        if self._log is not None:
            stored = self._log.write(
                first.batch - 1,
                last.batch,
                last.position(),
                [(one.operator, index, batch, one.content) for one, index, batch in segments],
                [one for epoch in epochs for one in epoch.rows],
            )
            durable = [
                DurableSegment(operator, index, file, one.path)
                for (operator, index, file), (one, _index, _batch) in zip(stored, segments, strict=True)
            ]
        for epoch in epochs:
            self._rows.add(epoch.rows)
        with self._changed:
            self._segments += durable
            self._durable = last.batch
            self._changed.notify_all()
