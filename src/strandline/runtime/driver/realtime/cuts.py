"""The relays that have rows, and the cuts that they are asked for.

A relay takes part in an epoch only if it has rows for it. The rows of a relay that is not asked come with a later
epoch: a source partition is read in order, so every epoch ends with a prefix of every partition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.protocol.cuts import Cut, CutOrder, RelayNews

ASK_AGAIN = 1.0
"""Seconds after which a relay that waits is told to ask again."""
LOOK_EVERY = 0.1
"""Seconds between two looks at the query while relays cut."""
NO_ORDER = CutOrder(None)


class Cuts:
    """What the relays of one query ask and answer. Safe to use from several threads."""

    def __init__(self, job: str, patience: float) -> None:
        """A relay that was told to cut, and does not answer for `patience` seconds, is lost."""
        self._job = job
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        """The relays that have rows and wait for their next cut."""
        self._orders: dict[str, int] = {}
        """The relays that have been told to cut and have not answered, with the epoch."""
        self._cuts: dict[str, Cut] = {}
        """The answers of the running epoch."""
        self._decided: int | None = None
        """What slots are told with the rows of the running epoch; see `CutOrder`."""
        self._failure: StrandlineError | None = None
        """The error of the first relay that reported one."""

    def next_cut(self, news: RelayNews) -> CutOrder:
        """What a relay is to do now. Waits a while if it has rows and no epoch begins."""
        deadline = time.monotonic() + ASK_AGAIN
        with self._changed:
            if news.failure is not None and self._failure is None:
                self._failure = news.failure.error()
                self._changed.notify_all()
            if news.cut is not None and self._orders.get(news.relay) == news.cut.batch:
                del self._orders[news.relay]
                self._cuts[news.relay] = news.cut
                self._changed.notify_all()
            if not news.has_rows:
                return NO_ORDER
            while news.relay not in self._orders:
                if news.relay not in self._waiting:
                    self._waiting.add(news.relay)
                    self._changed.notify_all()
                left = deadline - time.monotonic()
                if left <= 0:
                    # It asks again at once. If it never does, it is told to cut all the same, and found to be lost.
                    return NO_ORDER
                self._changed.wait(left)
            return CutOrder(self._orders[news.relay], self._decided)

    def wait_for_rows(self, seconds: float) -> bool:
        """Whether some relay has rows, now or within so many seconds. Raises the failure of a relay."""
        with self._changed:
            found = self._changed.wait_for(lambda: bool(self._waiting) or self._failure is not None, seconds)
            self._raise_failure()
            return found

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def cut(self, batch: int, decided: int | None, check: Callable[[], None]) -> list[Cut]:
        """Have every relay that has rows deliver them for an epoch; returns what each delivered.

        `decided` is the epoch before, if the slots have not heard that it is decided: they hear it with the rows.

        `check` is called while relays work; its error ends the wait. Raises `SlotLostError` if a relay is silent, and
        the failure of a relay that fails.
        """
        deadline = time.monotonic() + self._patience
        with self._changed:
            self._cuts = {}
            self._decided = decided
            self._orders = dict.fromkeys(self._waiting, batch)
            self._waiting = set()
            self._changed.notify_all()
            while self._orders:
                self._changed.wait(LOOK_EVERY)
                self._raise_failure()
                if not self._orders:
                    break
                check()
                if time.monotonic() > deadline:
                    raise SlotLostError(
                        f"job {self._job}, batch {batch}: {len(self._orders)} of Spark's tasks were told to deliver "
                        f"their rows and have been silent for {self._patience:g} s (heartbeat_timeout). Look at the "
                        "logs of Spark's executors, or raise heartbeat_timeout."
                    )
            return [cut for _relay, cut in sorted(self._cuts.items())]
