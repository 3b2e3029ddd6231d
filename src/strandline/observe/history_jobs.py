"""Jobs seen through their history in storage: jobs that have ended, whose driver is gone, or that run elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from strandline.errors import HistoryError, JobFailedError, StorageError
from strandline.observe.facts import JobFacts, job_id
from strandline.observe.history_reader import HistoryReader, JobHistory
from strandline.observe.registration import jobs_in
from strandline.observe.views import JobControl, JobView, LogText
from strandline.storage import JobPaths, Storage, open_storage

log = logging.getLogger(__name__)

REFRESH_SECONDS = 3.0
"""Storage is looked at again after so many seconds, however often somebody asks."""


class HistoryJob:
    """One job, as its history shows it. Nobody can steer it from here."""

    control: JobControl | None = None

    def __init__(self, storage: Storage, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._paths = JobPaths(name)
        self._clock = clock
        self._reader = HistoryReader(storage, name, clock)
        self._lock = threading.Lock()
        self._read_at = -REFRESH_SECONDS
        self._history: JobHistory | None = None

    @property
    def id(self) -> str:
        """See `facts.job_id`."""
        return job_id(self._storage.url, self.name)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._paths.job

    def is_in(self, storage: Storage) -> bool:
        """Whether the job has its checkpoints in that storage."""
        return self._storage is storage

    def facts(self) -> JobFacts:
        """The facts of the newest run. Raises `HistoryError` if the job has no history, or `StorageError`."""
        return self.history().facts

    def history(self) -> JobHistory:
        """What the history tells, some seconds old at most. Raises like `facts`."""
        with self._lock:
            if self._clock() - self._read_at >= REFRESH_SECONDS:
                self._refresh()
            if self._history is None:
                raise HistoryError(
                    f"job {self.name!r} has no history in {self._storage.url}/{self._paths.history_dir}: it was "
                    "deleted, or an earlier release of strandline ran the job. Its checkpoints can be listed with: "
                    f"strandline checkpoints ls {self._storage.url}/{self._paths.root}"
                )
            return self._history

    def _refresh(self) -> None:
        try:
            self._history = self._reader.read()
        except StorageError as error:
            if self._history is None:
                raise
            log.warning("job %s: its history cannot be read just now; the last one stays: %s", self.name, error)
        self._read_at = self._clock()

    def processes(self) -> Sequence[str]:
        """The names of the processes of the newest run whose logs were kept."""
        return tuple(self._logs())

    def log(self, process: str, max_bytes: int = 100_000) -> LogText:
        """The end of the log of a process. Raises `JobFailedError` if it was not kept."""
        sizes = self._logs()
        if process not in sizes:
            kept = ", ".join(sizes) or "none"
            raise JobFailedError(f"job {self.name!r}: no log of {process!r} was kept; logs that were kept: {kept}")
        start = max(0, sizes[process] - max(0, max_bytes))
        path = self._paths.history_log(self.history().facts.run, process)
        data = self._storage.read_range(path, start, max_bytes) if max_bytes > 0 else b""
        text = data.decode("utf-8", "replace")
        return LogText(process, text.partition("\n")[2] if start else text, start > 0)

    def _logs(self) -> dict[str, int]:
        folder = self._paths.history_logs_dir(self.history().facts.run)
        found = ((self._paths.parse_history_log(file.path), file.size) for file in self._storage.list(folder))
        return {named[1]: size for named, size in found if named is not None}


class HistoryJobs:
    """The jobs below some checkpoint directories that have a history: what `strandline ui DIR` shows."""

    def __init__(
        self,
        checkpoint_dirs: Sequence[str],
        storage_options: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for a directory that cannot be opened. Contacts no storage."""
        self._storages = [open_storage(place, storage_options) for place in checkpoint_dirs]
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = -REFRESH_SECONDS
        self._jobs: dict[str, HistoryJob] = {}
        self._order: dict[str, tuple[int, str]] = {}

    def all(self) -> Sequence[JobView]:
        """The jobs, newest first. Raises `StorageError` if no directory can be read."""
        with self._lock:
            if self._clock() - self._read_at >= REFRESH_SECONDS:
                self._look()
                self._read_at = self._clock()
            return [self._jobs[one] for one in sorted(self._order, key=self._order.__getitem__, reverse=True)]

    def get(self, job: str) -> JobView | None:
        """The job of that id or name; of several jobs of one name, the one that ran last."""
        return next((one for one in self.all() if job in (one.id, one.name)), None)

    def _look(self) -> None:
        order: dict[str, tuple[int, str]] = {}
        failures: list[StorageError] = []
        for storage in self._storages:
            found: dict[str, tuple[int, str]] = {}
            try:
                for name in jobs_in(storage):
                    self._add(storage, name, found)
            except StorageError as error:  # what is known stays, and the other directories are shown
                log.warning("%s cannot be read just now: %s", storage.url, error)
                failures.append(error)
                found = {one: self._order[one] for one in self._order if self._jobs[one].is_in(storage)}
            order |= found
        if failures and len(failures) == len(self._storages) and not order:
            raise failures[0]
        self._order = order
        self._jobs = {one: self._jobs[one] for one in order}

    def _add(self, storage: Storage, name: str, order: dict[str, tuple[int, str]]) -> None:
        paths = JobPaths(name)
        files = (paths.parse_history(file.path) for file in storage.list(paths.history_runs_dir))
        started = max((file.started_ms for file in files if file is not None), default=None)
        if started is not None:
            one = job_id(storage.url, name)
            order[one] = (started, name)
            if one not in self._jobs:
                self._jobs[one] = HistoryJob(storage, name, self._clock)
