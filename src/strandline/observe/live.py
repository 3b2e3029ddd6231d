"""A job that runs in this process, for those who look at it and steer it."""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import StrandlineError
from strandline.observe.facts import (
    CheckpointsFacts,
    DriverFacts,
    FailureFacts,
    JobFacts,
    StatusChange,
    job_id,
)
from strandline.observe.graph import vertices_of, with_parallelism
from strandline.observe.health import findings
from strandline.observe.run_entries import user_name
from strandline.observe.samples import Samples
from strandline.observe.subtasks import SlotWindow
from strandline.observe.views import JobControl, LogText
from strandline.redaction import shown
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.recoveries import Began, Rescaling, first_line
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from strandline.runtime.driver.run import Run
from strandline.runtime.driver.run_records import RunFailure
from strandline.runtime.liveness.threads import BackgroundThread
from strandline.runtime.protocol.profiles import Folded
from strandline.storage import open_storage
from strandline.version import VERSION

log = logging.getLogger(__name__)

FACTS_EVERY = 1.0
"""Seconds between two times that the facts are taken."""
LOOK_EVERY = 0.2
"""Seconds between two looks whether something went wrong or the status changed. Then facts are taken at once."""


class LiveJob:
    """The run of a job: what is known about it (`JobView`), and what can be asked of it (`JobControl`).

    A thread takes the facts once a second while the run lives, at once when something has gone wrong, and once more at
    its end. It asks no slot: the run itself takes figures once a second. So looking at a job costs the job nothing,
    however many look.
    """

    def __init__(self, run: Run, graph: Graph, spark_version: str = "") -> None:
        self._run = run
        self._vertices = vertices_of(graph)
        self._driver = DriverFacts(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=user_name(),
            strandline=VERSION,
            spark=spark_version,
            python=platform.python_version(),
        )
        self._location = open_storage(run.config.checkpoint_dir, run.config.storage_options).url
        self._id = job_id(self._location, run.name)
        self._window = SlotWindow()
        self._samples = Samples()
        self._closed = threading.Event()
        self._ending = threading.Lock()
        """Protects the next two."""
        self._at_end: list[Callable[[], None]] = []
        self._ended = False
        self._told: tuple[Callable[[], None], ...] = ()
        self._thread = BackgroundThread(f"facts of {run.name}", self._watch, self._died)
        self._facts = self._taken()

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take facts from now on."""
        self._thread.start()

    def served_at(self, ui_url: str) -> None:
        """The page of the job is at this address."""
        self._driver = msgspec.structs.replace(self._driver, ui_url=ui_url)

    def when_taken(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread of the facts whenever facts were taken. It must not wait, and raises nothing."""
        self._told += (act,)

    def at_end(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread of the facts, after the last facts were taken. Its errors are only logged.

        If the last facts were taken already, `act` is called at once.
        """
        with self._ending:
            if not self._ended:
                self._at_end.append(act)
                return
        self._tell_end(act)

    def close(self) -> None:
        """Take no more facts, whether or not the run is over."""
        self._closed.set()

    def join(self, patience: float) -> None:
        """Wait for the last facts and for those who are told then, for at most `patience` seconds."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _watch(self) -> None:
        try:
            due = time.monotonic() + FACTS_EVERY
            while not self._closed.is_set() and not self._run.wait_until_over(LOOK_EVERY):
                if self._run.records.noted.is_set() or time.monotonic() >= due - LOOK_EVERY / 2:
                    due = time.monotonic() + FACTS_EVERY
                    self._refresh()
            self._refresh()
        finally:
            with self._ending:
                self._ended = True
            for act in self._at_end:
                self._tell_end(act)

    def _tell_end(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whoever looks at a job must never disturb it
            log.warning("job %s: %s: %s", self.name, type(error).__name__, error)

    def _refresh(self) -> None:
        self._run.records.noted.clear()  # before the facts are taken: what is noted meanwhile is not lost
        try:
            facts = self._taken()
            self._facts = msgspec.structs.replace(facts, health=findings(facts))
        except Exception:
            log.exception("job %s: its facts cannot be taken; the last ones stay", self.name)
            return
        for act in self._told:
            try:
                act()
            except Exception:
                log.exception("job %s: whoever waits for its facts has failed", self.name)

    def _died(self, error: StrandlineError) -> None:
        log.error("job %s can be seen only as it was, but it goes on: %s", self.name, error)

    # --- JobView ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The id of the job."""
        return self._id

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._run.name

    @property
    def control(self) -> JobControl | None:
        """None when the run is over."""
        return None if self._run.status.ended else self

    def facts(self) -> JobFacts:
        """The newest facts, at most a second old while the job runs. Never waits."""
        return self._facts

    def processes(self) -> Sequence[str]:
        """The names of the processes whose logs can be read."""
        return self._run.log_processes()

    def log(self, process: str, max_bytes: int = 100_000) -> LogText:
        """The end of the log of a process. Raises `StrandlineError` if there is none."""
        return self._run.read_log(process, max_bytes)

    # --- JobControl ------------------------------------------------------------------------------

    def trigger_checkpoint(self, full: bool = False) -> CheckpointStats:
        """Take a checkpoint now, and return its figures when it is complete. A `full` one uploads the whole state."""
        return self._run.trigger_checkpoint(full)

    def savepoint(self, directory: str | None, format: SavepointFormat) -> str:
        """Write a savepoint, and return its path. Without a directory, it goes to the option `savepoint_dir`."""
        return self._run.savepoint(directory, format)

    def stop(self, directory: str | None, format: SavepointFormat, *, drain: bool = False) -> str | None:
        """End the run after a last checkpoint, and after a savepoint if there is a directory; return its path.

        With `drain`, event time moves to its end before: all windows close, and all event-time timers fire.
        """
        return self._run.stop(directory, format, drain=drain)

    def cancel(self) -> None:
        """End the run at once, without a last checkpoint."""
        self._run.cancel()

    def rescale(self, parallelism: int, step: Callable[[str], None] = lambda _text: None) -> Rescaling:
        """Go on with another parallelism. `step` is told what is being done next."""
        return self._run.rescale(parallelism, step)

    def profile(self, subtask: int, seconds: float) -> Folded:
        """Sample the Python threads of a slot."""
        return self._run.profile(subtask, seconds)

    # --- facts -----------------------------------------------------------------------------------

    def _taken(self) -> JobFacts:
        now, run = Began.now(), self._run
        figures, records, ended = run.last_figures(), run.records, run.status.ended
        graph = with_parallelism(self._vertices, figures.parallelism or run.config.parallelism or 1, figures.sources)
        steps = [vertex for vertex in graph if vertex.kind == "step"]
        self._window.add(run.slot_samples())
        watermarks = {uid: step.watermark_ms for uid, step in figures.steps.items()}
        subtasks = () if ended else self._window.subtasks(steps, watermarks)
        self._samples.take(now, figures, subtasks)
        statuses = tuple(StatusChange(int(when * 1000), status) for when, status in records.statuses)
        return JobFacts(
            id=self._id,
            name=run.name,
            run=run.id,
            status=run.status,
            taken_ms=int(now.time * 1000),
            start_ms=statuses[0].time_ms,
            end_ms=statuses[-1].time_ms if ended else None,
            error="" if run.error is None else shown(f"{type(run.error).__name__}: {first_line(str(run.error))}"),
            checkpoint_dir=shown(self._location),
            driver=self._driver,
            config=run.config.shown(),
            graph=graph,
            figures=figures,
            subtasks=subtasks,
            key_group_rows=self._window.key_group_rows(steps, run.config.max_parallelism),
            checkpoints=_checkpoints(run),
            recoveries=tuple(run.recoveries()),
            rescalings=tuple(records.rescalings),
            failures=tuple(map(_failure, records.failures)),
            statuses=statuses,
            samples=self._samples.all(),
        )


def _checkpoints(run: Run) -> CheckpointsFacts:
    history = run.history()
    return CheckpointsFacts(
        counts=history.counts,
        history=tuple(history.checkpoints()),
        last_completed=history.last_completed,
        last_failed=history.last_failed,
        last_savepoint=history.last_savepoint,
        restored=history.restored,
    )


def _failure(failure: RunFailure) -> FailureFacts:
    text = shown(failure.text)
    return FailureFacts(
        int(failure.time * 1000), failure.kind, first_line(text), text, failure.slots, failure.checkpoint
    )
