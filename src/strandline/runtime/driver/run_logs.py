"""The logs of a run's processes, as the driver reads them: from their hosts, and after the end from what it kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from strandline.errors import StrandlineError
from strandline.redaction import secret_values
from strandline.runtime.driver.log_ring import driver_log
from strandline.runtime.driver.task_managers import TaskManagers
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.logs import (
    DRIVER,
    KEPT_BYTES,
    MOST_READ_BYTES,
    LogText,
    ReadLog,
    as_text,
    in_order,
    write_ends,
)
from strandline.runtime.protocol.messages import RunInfo
from strandline.runtime.protocol.taskmanager_calls import TaskManagerClient

log = logging.getLogger(__name__)

MOST_KEPT: Final = 20_000_000
"""So many characters of the ends of all logs the driver keeps. Further ones stay on their hosts."""


class RunLogs:
    """The logs of one run. Safe to use from several threads."""

    def __init__(self, run: RunInfo, managers: TaskManagers, home_of: Callable[[str], str | None]) -> None:
        """`home_of` gives the task manager that runs a process now, by the name of the process."""
        self._run = run
        self._managers = managers
        self._home_of = home_of
        self._lock = threading.Lock()
        self._kept: dict[str, LogText] = {}
        """The ends that task managers gave when the run ended."""
        self._room = MOST_KEPT
        driver_log().hide([run.secret, *secret_values(run.storage.options)])

    def processes(self) -> tuple[str, ...]:
        """The names of the processes whose logs can be read: the driver, then task managers, then slots."""
        return (DRIVER, *in_order({*self._homes(), *self._kept}))

    def read(self, process: str, max_bytes: int) -> LogText:
        """The end of a log. Raises `StrandlineError` if there is none."""
        wanted = max(1, min(max_bytes, MOST_READ_BYTES))
        if process == DRIVER:
            return driver_log().end(wanted)
        home = self._home_of(process) or self._homes().get(process)
        if home is not None:
            ((_identity, told),) = self._managers.ask([home], TaskManagerClient.read_log, ReadLog(process, wanted))
            if isinstance(told, LogText):
                return told
        with self._lock:
            kept = self._kept.get(process)
        if kept is None:
            known = ", ".join(self.processes())
            raise StrandlineError(f"job {self._run.job!r}: there is no log of {process!r}; there are those of: {known}")
        return _shortened(kept, wanted)

    def _homes(self) -> dict[str, str]:
        """The processes that have a log, and the task manager that can read it."""
        homes: dict[str, str] = {}
        for identity, names in self._managers.ask(self._managers, TaskManagerClient.log_names, NOTHING):
            if not isinstance(names, StrandlineError):
                homes.update(dict.fromkeys(names, identity))
        return homes

    def collect(self, client: TaskManagerClient) -> None:
        """Keep the ends of the logs of a task manager's host, because the task manager is about to end."""
        try:
            self._take(client.log_ends(NOTHING))
        except StrandlineError as error:
            log.info("job %s: the logs of a task manager stay on its host: %s", self._run.job, error)

    def _take(self, ends: Mapping[str, LogText]) -> None:
        with self._lock:
            for name, end in ends.items():
                # Two task managers of one host give the same logs. A slot that has moved has one on each host.
                more = len(end.text) - len(self._kept[name].text) if name in self._kept else len(end.text)
                if name not in self._kept or more > 0:
                    if more > self._room:
                        continue
                    self._room -= more
                    self._kept[name] = end

    def keep_durably(self) -> None:
        """Write the ends of the logs into the job's history, after the run. Errors are only logged."""
        with self._lock:
            ends = {DRIVER: driver_log().end(KEPT_BYTES), **self._kept}
        try:
            write_ends(self._run, ends)
        except (StrandlineError, OSError) as error:
            log.warning("job %s: the ends of its logs are not kept in storage: %s", self._run.job, error)


def _shortened(end: LogText, count: int) -> LogText:
    data = end.text.encode()
    if len(data) <= count:
        return end
    return msgspec.structs.replace(end, text=as_text(data[-count:], cut=True), cut=True)
