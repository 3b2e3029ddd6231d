"""Writes the history of a run beside the job's log, in the background.

Every few seconds a part is written with what is new. Every so many parts, a whole part repeats all of them, and they
are deleted. So a crash between any two calls loses what was not written yet and nothing else, and two drivers never
write the same file. The history is not needed to go on with a job: whatever fails here, the job does not notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from strandline.config import Config
from strandline.observe.background import Background
from strandline.observe.facts import JobFacts
from strandline.observe.history_format import encode_part
from strandline.observe.history_record import HistoryRecord
from strandline.observe.views import JobView
from strandline.storage import JobPaths, Storage, StoredFile, open_storage

log = logging.getLogger(__name__)

WRITE_SECONDS = 12.0
"""How often a part is written. With the heartbeats of the run's entry, that makes eleven writes a minute."""
LOCAL_WRITE_SECONDS = 2.0
"""The same for a local disk, where a write costs little."""
MOST_AT_ONCE = 3
"""How many parts may come early in a row, because something happened that is worth saving at once."""
PARTS_PER_WHOLE = 24
"""How many parts a whole part stands for."""
KEPT_RUNS = 20
KEPT_BYTES = 64 << 20
"""How many bytes the earlier runs of a job may have in its history; the oldest runs are deleted first."""
QUIET_SECONDS = 600.0
"""The files of a run that has written something since are not deleted, because its driver may be alive."""


def keep_history(job: JobView, config: Config) -> HistoryWriter:
    """Keeps the history of a run of this process, until the writer is closed. Never raises.

    Call it when the run has taken the job over.
    """
    return HistoryWriter(job, open_storage(config.checkpoint_dir, config.storage_options))


class HistoryWriter:
    """Looks at the facts of a run every second, and has what is new written. See `RunHistory`."""

    def __init__(self, job: JobView, storage: Storage) -> None:
        self._job = job
        self._history = RunHistory(storage, job.facts())
        self._background = Background("strandline-history", f"job {job.name}: writing its history", self._act)

    def finish(self) -> None:
        """Has what is left written, in the background. `close` waits for that."""
        self._background.finish()

    def close(self) -> None:
        """Writes what is left, and returns within some seconds. Never raises."""
        if not self._background.close():
            log.warning("job %s: the end of its history is still being written; it may be lost", self._job.name)

    def _act(self, last: bool) -> bool:
        self._history.offer(self._job.facts())
        if not last and not self._history.is_due():
            return False
        self._history.write(whole=last)
        return True


class RunHistory:
    """The history of one run in storage, without a thread: `offer` takes facts, `write` writes what is new in them."""

    def __init__(self, storage: Storage, facts: JobFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._paths = JobPaths(facts.name)
        self._run = (facts.start_ms, facts.run)
        self._clock = clock
        self._record = HistoryRecord()
        self._number = 0
        self._files: set[str] = set()
        """The files that the next whole part stands for."""
        self._every = LOCAL_WRITE_SECONDS if storage.root is not None else WRITE_SECONDS
        self._next = clock()
        self._early = float(MOST_AT_ONCE)
        self._refilled = clock()
        self._soon = False
        self._trimmed = False

    def offer(self, facts: JobFacts) -> None:
        """Takes the newest facts of the run."""
        self._soon |= self._record.offer(facts)

    def is_due(self) -> bool:
        """Whether it is time to write a part: the last one was written long ago, or something has happened."""
        now = self._clock()
        self._early = min(float(MOST_AT_ONCE), self._early + (now - self._refilled) / self._every)
        self._refilled = now
        return now >= self._next or (self._soon and self._early >= 1.0)

    def write(self, *, whole: bool = False) -> None:
        """Writes a part, or a whole part. Raises `StorageError`; what could not be written is in the next part."""
        # Also after a failure: a storage that fails is not asked more often.
        self._next = self._clock() + self._every
        self._early -= 1.0
        self._soon = False
        # A whole part of this number may be there, if a write failed.
        tried = self._paths.history_part(*self._run, self._number, whole=True) in self._files
        whole = whole or tried or self._number % PARTS_PER_WHOLE == PARTS_PER_WHOLE - 1
        path = self._paths.history_part(*self._run, self._number, whole=whole)
        events = self._record.all() if whole else self._record.fresh()
        # Known before it is written: a write that fails may have happened all the same.
        self._files.add(path)
        self._storage.write(path, encode_part(self._number, whole, self._record.head(), events))
        self._record.saved()
        self._number += 1
        if whole:
            self._storage.delete(sorted(self._files - {path}))
            self._files = {path}
        if not self._trimmed:
            self.trim()

    def trim(self) -> None:
        """Deletes the earlier runs that are too many. Raises `StorageError`."""
        files = list(self._storage.list(self._paths.history_dir))
        self._storage.delete(file.path for file in too_many(files, self._paths, self._run))
        self._trimmed = True


def too_many(files: list[StoredFile], paths: JobPaths, own: tuple[int, str]) -> list[StoredFile]:
    """The files of the runs that the history has no room for. `own` is the run that has just written to it."""
    runs: dict[tuple[int, str], list[StoredFile]] = {}
    for file in files:
        part = paths.parse_history(file.path)
        if part is not None:
            runs.setdefault((part.started_ms, part.run), []).append(file)
    now = max((file.modified for file in files), default=0.0)
    kept = {own}
    doomed: list[StoredFile] = []
    size = 0
    for run in sorted(runs.keys() - {own}, reverse=True):
        size += sum(file.size for file in runs[run])
        quiet = max(file.modified for file in runs[run]) <= now - QUIET_SECONDS
        if quiet and (len(kept) >= KEPT_RUNS or size > KEPT_BYTES):
            doomed += runs[run]
        else:
            kept.add(run)
    names = {run for _started, run in kept}
    logs = [(file, paths.parse_history_log(file.path)) for file in files if file.modified <= now - QUIET_SECONDS]
    return doomed + [file for file, of in logs if of is not None and of[0] not in names]
