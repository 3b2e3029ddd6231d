"""Makes a run visible: takes its facts, and serves them. Whatever fails here never touches the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from strandline.config import ports_of
from strandline.errors import ConfigError, StrandlineError
from strandline.observe.facts import Finding
from strandline.observe.history import HistoryWriter, keep_history
from strandline.observe.live import LiveJob
from strandline.observe.registration import Registration, register
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.run import Run

if TYPE_CHECKING:
    from strandline.rest.server import Served

log = logging.getLogger(__name__)

END_PATIENCE = 5.0
"""For how many seconds the end of a run waits for its last facts to be written."""


class Observation:
    """What a run has beside itself for those who look at it. Every part may be missing."""

    def __init__(self, run: Run, graph: Graph, spark_version: str) -> None:
        """Raises `ConfigError` if the user asked for a port that is taken, or for an address that is not this host's.

        Other failures are only logged.
        """
        self.job: LiveJob | None = None
        """What is known about the run; None if that cannot be found out."""
        self._served: Served | None = None
        self._claimed = False
        self._join_until: float | None = None
        self._config = run.config
        self._keep_logs = run.keep_logs
        try:
            self.job = LiveJob(run, graph, spark_version)
            self.job.start()
        except Exception as error:  # noqa: BLE001 - the run goes on; what is wrong with the job, its start will say
            log.warning("job %s cannot be seen: %s: %s", run.name, type(error).__name__, error)
            return
        self._serve(self.job)

    def _serve(self, job: LiveJob) -> None:
        if ports_of(self._config.rest_port) is None:
            return
        try:
            from strandline.rest.server import serve  # only here: a web framework takes a while to import

            self._served = served = serve(job, self._config)
        except ConfigError:
            job.close()
            raise
        except StrandlineError as error:
            log.warning("job %s has no page: %s", job.name, error)
        except Exception:
            log.exception("job %s has no page", job.name)
        else:
            job.served_at(served.url)

    @property
    def ui_url(self) -> str | None:
        """The address of the run's page."""
        return None if self._served is None else self._served.url

    def claimed(self) -> None:
        """The run has taken the job over, and restores state. It can be found from now on."""
        if self.job is None:
            return
        self._claimed = True
        url, token = ("", "") if self._served is None else (self._served.url, self._served.token)
        if url:
            log.info("job %s: %s", self.job.name, url)
        kept: list[HistoryWriter | Registration] = []
        for what, begin in (
            ("has no history", lambda job: keep_history(job, self._config)),
            ("is not registered", lambda job: register(job, self._config, url, token)),
        ):
            try:
                one = begin(self.job)
            except Exception:
                log.exception("job %s %s", self.job.name, what)
            else:
                kept.append(one)
                self.job.when_taken(one.look)
        # All of them write their ends at the same time: one that takes long must not hold up the others.
        for end in (*(one.finish for one in kept), *(one.close for one in kept), self._keep_logs):
            self.job.at_end(end)

    def health(self) -> list[Finding]:
        """The rules of health that the run breaks."""
        return [] if self.job is None else list(self.job.facts().health)

    def close(self) -> None:
        """The run has not begun after all."""
        if self.job is not None:
            self.job.close()
        if self._claimed:
            self.join()  # its entry and its history say that it has failed
        if self._served is not None:
            self._served.close()

    def join(self) -> None:
        """Wait a moment until the end of the run is noted: the program may end next. All calls together wait once."""
        if self.job is None:
            return
        if self._join_until is None:
            self._join_until = time.monotonic() + END_PATIENCE
        self.job.join(max(0.0, self._join_until - time.monotonic()))
