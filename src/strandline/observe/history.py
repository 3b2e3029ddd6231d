"""Writes the history of a run beside the job's log, in the background.

What is new goes into the newest part, which is written again and again for some seconds. Every so many parts, a whole
part repeats all of them, and they are deleted. So a crash between any two calls loses what was not written yet and
nothing else, and two drivers never write the same file. The history is not needed to go on with a job: whatever fails
here, the job does not notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from strandline.config import Config
from strandline.observe.background import Background
from strandline.observe.facts import JobFacts
from strandline.observe.history_format import encode_part
from strandline.observe.history_record import HistoryRecord, News
from strandline.observe.views import JobView
from strandline.storage import JobPaths, Storage, StoredFile, open_storage

log = logging.getLogger(__name__)

PART_SECONDS = 12.0
"""For how long what is new goes into the same part. Then the next part begins."""
MOST_AT_ONCE = 10.0
"""How many writes may follow each other as fast as there is something new."""
FOR_EVENTS = 3.0
"""How many of these are left for failures, recoveries and the like."""
PARTS_PER_WHOLE = 24
"""How many parts a whole part stands for."""
KEPT_RUNS = 20
KEPT_BYTES = 64 << 20
"""How many bytes the earlier runs of a job may have in its history; the oldest runs are deleted first."""
QUIET_SECONDS = 600.0
"""The files of a run that has written something since are not deleted, because its driver may be alive."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a storage is written to. The facts of a run, and so what is new, are taken once a second."""

    seconds: float
    """A write in so many seconds, in the long run: the bound of requests."""
    figures_seconds: float
    """After how many seconds a write is due if nothing but figures has changed."""
    failed_seconds: float
    """After how many seconds a write that failed is tried again."""


LOCAL = Pace(0.5, 0.5, 2.0)
"""Whatever changes is written at once: a local disk takes that without cost."""
REMOTE = Pace(2.0, 12.0, 12.0)
"""An object store asks money for each request: at most 30 a minute in the long run, and 5 if rows alone come in."""


def keep_history(job: JobView, config: Config) -> HistoryWriter:
    """Keeps the history of a run of this process, until the writer is closed. Never raises.

    Call it when the run has taken the job over.
    """
    return HistoryWriter(job, open_storage(config.checkpoint_dir, config.storage_options))


class HistoryWriter:
    """Looks at the facts of a run, and has what is new written. See `RunHistory`."""

    def __init__(self, job: JobView, storage: Storage) -> None:
        self._job = job
        self._history = RunHistory(storage, job.facts())
        self._background = Background("strandline-history", f"job {job.name}: writing its history", self._act)

    def look(self) -> None:
        """Has the facts looked at now, in the background. Without this call, that happens once a second."""
        self._background.now()

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
        self._pace = LOCAL if storage.root is not None else REMOTE
        self._news = News.NOTHING
        self._left = MOST_AT_ONCE
        """How many writes may follow each other now."""
        self._counted = self._written = clock()
        self._not_before = self._part_began = clock()
        self._trimmed = False

    def offer(self, facts: JobFacts) -> None:
        """Takes the newest facts of the run."""
        self._news = max(self._news, self._record.offer(facts))

    def is_due(self) -> bool:
        """Whether it is time to write what is new. If nothing is new, it never is."""
        now = self._clock()
        self._left = min(MOST_AT_ONCE, self._left + (now - self._counted) / self._pace.seconds)
        self._counted = now
        if now < self._not_before:
            return False
        match self._news:
            case News.NOTHING:
                return False
            case News.FIGURES:
                return now >= self._written + self._pace.figures_seconds
            case News.CHECKPOINT:
                return self._left >= FOR_EVENTS + 1
            case News.EVENT:
                return self._left >= 1

    def write(self, *, whole: bool = False) -> None:
        """Writes what is new, or a whole part. Raises `StorageError`; what could not be written is written later."""
        now = self._clock()
        self._left -= 1
        self._not_before = now + self._pace.failed_seconds
        news, self._news = self._news, News.NOTHING
        try:
            self._write(whole, now)
        except BaseException:
            self._news = news
            raise
        self._not_before = self._written = now

    def _write(self, whole: bool, now: float) -> None:
        # A whole part of this number may be there, if a write failed.
        tried = self._paths.history_part(*self._run, self._number, whole=True) in self._files
        whole = whole or tried or self._number % PARTS_PER_WHOLE == PARTS_PER_WHOLE - 1
        path = self._paths.history_part(*self._run, self._number, whole=whole)
        events = self._record.all() if whole else self._record.fresh()
        # Known before it is written: a write that fails may have happened all the same.
        self._files.add(path)
        self._storage.write(path, encode_part(self._number, whole, self._record.head(), events))
        if whole or now - self._part_began >= PART_SECONDS:
            self._record.saved()
            self._number += 1
            self._part_began = now
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
