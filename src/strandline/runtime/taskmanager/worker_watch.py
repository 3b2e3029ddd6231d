"""Kills Spark's Python workers that are frozen: Spark waits for them for ever, and repeats the task of a dead one."""

from __future__ import annotations

import logging
from contextlib import suppress

import psutil

from strandline.runtime.liveness.processes import stopped_python_workers
from strandline.runtime.liveness.silence import Silence

log = logging.getLogger(__name__)


class WorkerWatch:
    """Watches the Python workers of one executor. A relay runs in one of them, and any may get the next task."""

    def __init__(self, executor: int, timeout: float) -> None:
        """`executor` is the process id of the executor. A worker that was stopped for `timeout` seconds is killed."""
        self._executor = executor
        self._timeout = timeout
        self._stopped: dict[psutil.Process, Silence] = {}

    def look(self) -> None:
        """Kill the workers that are stopped since long. To be called every few seconds."""
        found = stopped_python_workers(self._executor)
        self._stopped = {worker: self._stopped.get(worker) or Silence() for worker in found}
        for worker, silence in self._stopped.items():
            if silence.seconds() > self._timeout:
                log.warning("Python worker %d is killed: it has been stopped for %g s", worker.pid, self._timeout)
                with suppress(psutil.Error):
                    worker.kill()
