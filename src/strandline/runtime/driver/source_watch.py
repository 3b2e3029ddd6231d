"""Notices a source that does not answer when Spark asks it for new rows: Spark itself waits in silence.

A Kafka broker that is down, for instance, keeps Spark waiting for minutes before it reports an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds without an answer after which there is a warning."""
LEAST_LOOKS = 50
"""An idle query asks its sources many times a second, so a few looks in a row may find it asking by chance."""
_ASKING = "Getting offsets from "


@dataclass(frozen=True, slots=True)
class Silence:
    """A source that has not answered for longer than `PATIENCE`."""

    source: str
    """Spark's description of it."""
    since: float
    """By `time.monotonic`."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class SourceWatch:
    """Looks again and again at what the query does, and warns once for every silence of a source."""

    def __init__(
        self,
        job: str,
        doing: Callable[[], str],
        clock: Callable[[], float],
        tell: Callable[[Silence | None], None] = lambda _silence: None,
    ) -> None:
        """`doing` gives the query's own words for what it does at the moment. `tell` is called when a silence is
        noticed, and with None when it has ended."""
        self._job = job
        self._doing = doing
        self._clock = clock
        self._tell = tell
        self._source = ""
        self._since = 0.0
        self._looks = 0
        self._warned = False

    def look(self) -> None:
        words = self._doing()
        self._note(words.removeprefix(_ASKING) if words.startswith(_ASKING) else "")

    def answered(self) -> None:
        """A batch runs, so all sources have answered."""
        if self._source:
            self._note("")

    def close(self) -> None:
        """The query is over, and waits for nobody."""
        if self._warned:
            self._tell(None)

    def _note(self, source: str) -> None:
        """The query waits for `source`; empty if it waits for none."""
        now = self._clock()
        if source != self._source or not source:
            if self._warned:
                log.warning("job %s: %s answers again after %.0f s", self._job, self._source, now - self._since)
                self._tell(None)
            self._source, self._since, self._looks, self._warned = source, now, 0, False
            return
        self._looks += 1
        if not self._warned and self._looks >= LEAST_LOOKS and now - self._since >= PATIENCE:
            self._warned = True
            self._tell(Silence(source, self._since))
            log.warning(
                "job %s: %s has not answered for %.0f s; the job waits. Look whether the servers of the source run, "
                "and whether the driver reaches them",
                self._job,
                source,
                now - self._since,
            )
