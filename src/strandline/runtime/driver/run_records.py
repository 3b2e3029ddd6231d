"""What a run notes for those who look at it: the statuses it came to, its rescalings, and what went wrong."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from strandline.errors import StrandlineError
from strandline.runtime.driver.events import CheckpointEnded, Recovered, RunEvent
from strandline.runtime.driver.recoveries import Rescaling
from strandline.runtime.driver.status import RunStatus

FailureKind = Literal["run", "restart", "slots", "checkpoint", "rescale"]

KEPT_RECORDS = 200
"""How many records of each kind a run keeps. The oldest go first."""
MAX_TEXT = 20_000
"""How many characters of an error are kept. A traceback may be long."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Something that went wrong. The time is seconds since the epoch."""

    time: float
    kind: FailureKind
    """What failed: the `run` for good, the generation (`restart`), `slots`, a `checkpoint`, a `rescale`."""
    text: str
    slots: tuple[int, ...] = ()
    checkpoint: int | None = None


class RunRecords:
    """The newest records of a run, oldest first. Any thread may add to them; reading them copies them."""

    def __init__(self) -> None:
        self._statuses: deque[tuple[float, RunStatus]] = deque(maxlen=KEPT_RECORDS)
        self._rescalings: deque[Rescaling] = deque(maxlen=KEPT_RECORDS)
        self._failures: deque[RunFailure] = deque(maxlen=KEPT_RECORDS)
        self.noted = threading.Event()
        """Set when a status, a failure, a recovery or a rescaling is noted. Who looks at the records clears it."""

    @property
    def statuses(self) -> list[tuple[float, RunStatus]]:
        """The statuses that the run came to, and when, in seconds since the epoch."""
        return list(self._statuses)

    @property
    def rescalings(self) -> list[Rescaling]:
        """The changes of parallelism that succeeded."""
        return list(self._rescalings)

    @property
    def failures(self) -> list[RunFailure]:
        """What went wrong."""
        return list(self._failures)

    def status(self, status: RunStatus) -> None:
        """The run came to a status."""
        if not self._statuses or self._statuses[-1][1] is not status:
            self._statuses.append((time.time(), status))
            self.noted.set()

    def rescaled(self, rescaling: Rescaling) -> None:
        """The run was rescaled."""
        self._rescalings.append(rescaling)
        self.noted.set()

    def failed(self, kind: FailureKind, error: StrandlineError) -> None:
        """The run, a generation or a rescale has failed."""
        self._failures.append(RunFailure(time.time(), kind, f"{type(error).__name__}: {error}"[:MAX_TEXT]))
        self.noted.set()

    def event(self, event: RunEvent) -> None:
        """Note a checkpoint that failed, or slots that were lost."""
        match event:
            case CheckpointEnded(stats) if stats.status == "failed":
                text = (stats.failure or "")[:MAX_TEXT]
                self._failures.append(RunFailure(time.time(), "checkpoint", text, checkpoint=stats.id))
                self.noted.set()
            case Recovered(recovery) if recovery.kind == "slots":
                text = recovery.reason[:MAX_TEXT]
                self._failures.append(RunFailure(recovery.time, "slots", text, recovery.slots))
                self.noted.set()
            case _:
                pass
