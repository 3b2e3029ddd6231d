"""The callers who wait for a checkpoint or a savepoint, from their request to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import CheckpointError, StrandlineError
from strandline.runtime.driver.restore.savepoints import SavepointTarget

TRIES = 6
FIRST_RETRY_PAUSE = 0.2


class CheckpointInterruptedError(CheckpointError):
    """A checkpoint was aborted because a slot was lost. The same request can succeed once the slot is back."""


class CheckpointFailedError(CheckpointError):
    """A checkpoint failed by itself. If the job tolerates that, the same request can succeed."""


def take_with_retries(
    request: Callable[[], Future[CheckpointStats] | None],
    heal: Callable[[], None] | None,
    sleep: Callable[[float], None] = time.sleep,
) -> CheckpointStats | None:
    """Make a request and wait for its checkpoint; request it again if a lost slot interrupts it.

    `request` returns None if there is nothing to checkpoint. `heal` replaces lost slots before the next try; without it
    somebody else must replace them.

    The caller must hold neither the lock of `Checkpoints` nor the commit lock, because the checkpoint thread needs both
    to complete the request.
    """
    for attempt in range(TRIES):
        future = request()
        if future is None:
            return None
        try:
            return future.result()
        except CheckpointInterruptedError:
            if attempt == TRIES - 1:
                raise
            sleep(FIRST_RETRY_PAUSE * 2**attempt)
            if heal is not None:
                heal()
    raise AssertionError("unreachable")


class Waiters:
    """The futures of the callers who wait: for a checkpoint to begin, or for one that has begun to end.

    The caller of every method holds the lock of `Checkpoints`.
    """

    def __init__(self) -> None:
        self._requested: list[Future[CheckpointStats]] = []
        self._full = False
        """Whether somebody among them wants a full checkpoint."""
        self._begun: dict[int, list[Future[CheckpointStats]]] = {}

    @property
    def requested(self) -> bool:
        """Whether somebody waits for a checkpoint to begin."""
        return bool(self._requested)

    @property
    def begun(self) -> tuple[int, ...]:
        """The ids of the checkpoints and savepoints that were triggered and have not ended."""
        return tuple(self._begun)

    def request(self, full: bool = False) -> Future[CheckpointStats]:
        """A future for the next checkpoint that begins. If it is to be `full`, it uploads the whole state."""
        future: Future[CheckpointStats] = Future()
        self._requested.append(future)
        self._full |= full
        return future

    def join(self, checkpoint_id: int) -> Future[CheckpointStats]:
        """A future for a checkpoint that has begun."""
        future: Future[CheckpointStats] = Future()
        self._begun[checkpoint_id].append(future)
        return future

    def begin_checkpoint(self, checkpoint_id: int) -> bool:
        """Everybody who waits for a checkpoint to begin waits for this one to end. Returns whether it is to be full."""
        self._begun[checkpoint_id], self._requested = self._requested, []
        full, self._full = self._full, False
        return full

    def begin_savepoint(self, checkpoint_id: int, future: Future[CheckpointStats]) -> None:
        """The one caller who requested this savepoint waits for it to end."""
        self._begun[checkpoint_id] = [future]

    def end(self, checkpoint_ids: Iterable[int]) -> list[Future[CheckpointStats]]:
        """Remove the futures of checkpoints that have ended, and return them. The caller resolves them."""
        return [future for ended in checkpoint_ids for future in self._begun.pop(ended, [])]

    def refuse(self, error: StrandlineError) -> None:
        """No checkpoint will begin any more: everybody who waits for one to begin gets `error`."""
        for future in self._requested:
            future.set_exception(error)
        self._requested.clear()


class SavepointRequests:
    """The savepoints that were requested, and the targets of those that have begun.

    The caller of every method holds the lock of `Checkpoints`, except for `target` and the test for emptiness.
    """

    def __init__(self) -> None:
        self._requested: list[tuple[SavepointTarget, Future[CheckpointStats]]] = []
        self._targets: dict[int, SavepointTarget] = {}

    def __bool__(self) -> bool:
        """Whether a requested savepoint has not begun."""
        return bool(self._requested)

    def request(self, target: SavepointTarget) -> Future[CheckpointStats]:
        """A future for the savepoint that will be written to `target`."""
        future: Future[CheckpointStats] = Future()
        self._requested.append((target, future))
        return future

    def next(self) -> tuple[SavepointTarget, Future[CheckpointStats]] | None:
        """Remove the oldest request that has not begun, and return it."""
        return self._requested.pop(0) if self._requested else None

    def begin(self, checkpoint_id: int, target: SavepointTarget) -> None:
        """The savepoint with this id is written to `target`."""
        self._targets[checkpoint_id] = target

    def target(self, checkpoint_id: int) -> SavepointTarget | None:
        """Where a savepoint that has begun is written to; None if the id is a checkpoint's."""
        return self._targets.get(checkpoint_id)

    def end(self, checkpoint_id: int) -> None:
        """The savepoint with this id is complete or aborted; nothing happens if the id is a checkpoint's."""
        self._targets.pop(checkpoint_id, None)

    def refuse(self, error: StrandlineError) -> None:
        """No savepoint will begin any more: everybody who waits for one to begin gets `error`."""
        for _target, future in self._requested:
            future.set_exception(error)
        self._requested.clear()
