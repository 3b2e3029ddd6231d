"""The job's log in durable storage: a sequence of entries, each created only if it is absent.

A driver that creates an entry has won it. A driver that finds another driver's entry in its place is fenced.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from strandline.checkpoint.home import Home
from strandline.checkpoint.job_log import (
    CheckpointRef,
    Completed,
    Entry,
    JobLog,
    Start,
    Takeover,
    Verdict,
    decode_entry,
    encode_entry,
    fenced_error,
    judge_conflict,
)
from strandline.checkpoint.metadata import CheckpointMetadata, decode
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryNotOursError,
    FencedError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    UnknownOutcomeError,
)
from strandline.storage import JobPaths, Storage
from strandline.storage.retries import Retries

log = logging.getLogger(__name__)

KEPT_ENTRIES = 100
"""How many entries are kept; older ones are deleted. It must be more than the entries that other drivers can win while
one driver is stopped inside a single call."""


class JobLogStore:
    """Reads and extends the log of one job.

    An entry is won when it is known that its file is this driver's and that no later entry exists. Every call either
    finds that out, or raises: `FencedError` if another driver was first, `UnknownOutcomeError` if storage fails for too
    long. After the latter nobody may act as if the entry did not exist, or as if it did.
    """

    def __init__(
        self,
        storage: Storage,
        paths: JobPaths,
        *,
        run: str | None = None,
        kept_entries: int = KEPT_ENTRIES,
        retries: Retries | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` is the id of the run that writes the entries. A run recognizes the entries of its own generations."""
        self._storage = storage
        self._paths = paths
        self._run = run or uuid.uuid4().hex
        self._kept_entries = kept_entries
        self.retries = retries or Retries()
        self.job_log = JobLog()
        """Where the job stands after the last entry that this driver has read or won."""
        self._clock = clock
        self._began = 0.0
        """When the generation began. If the clock is put back, so is this time: see `_began_by_now`."""
        self._began_monotonic = 0.0
        self._oldest = 0
        """Entries before this one are deleted."""

    def load(self) -> JobLog:
        """Read where the job stands now. Raises `DirectoryNotOursError` if the folder holds files but no log."""
        return self.retries.call(f"job {self._paths.job}: reading the log", self._load)

    def _load(self) -> JobLog:
        entries = [
            n
            for file in self._storage.list(self._paths.log_dir)
            if (n := self._paths.parse_log_entry(file.path)) is not None
        ]
        newest = max(entries, default=None)
        self._oldest = min(entries, default=0)
        if newest is None:
            # The probe comes before the first entry. A driver that was killed in between has left it.
            listed = (file.path for file in self._storage.list(self._paths.root))
            # A history belongs to runs whose log somebody deleted.
            found = [path for path in listed if not self._paths.is_probe(path) and not self._paths.is_of_history(path)]
            if any(self._paths.parse_log_entry(path) is not None for path in found):
                return self._load()  # Another driver began the job meanwhile.
            if found:
                raise DirectoryNotOursError(
                    f"{self._storage.url}/{self._paths.root} is not empty, but not a job's checkpoint folder: it holds "
                    f"{found[0]!r} but no log. Choose another checkpoint_dir or job name, or empty the folder."
                )
            self.job_log = JobLog()
        else:
            self.job_log = JobLog.replay([self._read(newest)])
        return self.job_log

    def released(self) -> list[int]:
        """The checkpoints in the job's folder that belong to the user and that the user has not deleted."""
        return [number for number in self.job_log.released if self._storage.exists(self._paths.metadata(number))]

    def take_over(self, number_above: int = 0) -> JobLog:
        """Begin a new generation from where the job stands. This fences the drivers of all earlier generations.

        The ids of later checkpoints are greater than `number_above`.
        """
        while not self.try_take_over(replace(self.job_log.resume(), number_above=number_above)):
            self.load()
        return self.job_log

    def try_take_over(self, start: Start, after: int | None = None) -> bool:
        """Begin a generation from `start`. Returns False if other entries were added since the log was loaded.

        `after` is the generation that this run began last, if it restarts the job. Raises `FencedError` if another run
        has taken the job over since then: a restart does not take the job back.
        """
        if after is not None and not self._is_ours(self.job_log.nonce):
            raise fenced_error(self._paths.job, after, self._read(self.job_log.position))
        owner = f"{socket.gethostname()}/{os.getpid()}"
        began = time.monotonic()
        entry = self.job_log.takeover_entry(owner, self._clock(), self._nonce(), start)
        if self._create(entry) is not Verdict.OURS or self._later_than(entry) is not None:
            return False
        self._apply(entry)
        self._began = min(entry.time, self._modified(entry.sequence))
        self._began_monotonic = began
        return True

    def complete(
        self, checkpoint_id: int, metadata_path: str, batch_id: int, retained: tuple[int, ...], dropped: tuple[int, ...]
    ) -> JobLog:
        """Enter a completed checkpoint. Raises `FencedError` if another driver has taken the job over."""
        self._began = self._began_by_now()
        entry = self.job_log.completion_entry(
            checkpoint_id, metadata_path, batch_id, self._clock(), self._nonce(), retained, dropped, self._began
        )
        return self._win(entry)

    def _began_by_now(self) -> float:
        """When the generation began, by the clock as it is now. If the clock was put back, that is earlier.

        Otherwise files that the run has written since would look older than the run.
        """
        return min(self._began, self._clock() - (time.monotonic() - self._began_monotonic))

    def forget_all(self) -> JobLog:
        """Begin a generation without checkpoints, so that all can be deleted.

        Raises `FencedError` if another driver has taken the job over.
        """
        while True:
            known = self.job_log
            entry = Takeover(
                sequence=known.next_sequence,
                generation=known.generation + 1,
                owner=f"{socket.gethostname()}/{os.getpid()}",
                time=self._clock(),
                nonce=self._nonce(),
                last_checkpoint_id=known.last_checkpoint_id,
                latest=None,
                retained=(),
                dropped=known.retained,
                released=known.released,
                log_id=known.log_id,
                sinks_since=known.sinks_since,
            )
            try:
                return self._win(entry)
            except FencedError:
                own = self._read(entry.sequence)
                if not self._is_ours(own.nonce) or self._later(entry.sequence) is not None:
                    raise
                self.job_log = known.apply(own)  # a completion whose outcome was unknown, and that took effect

    def check_not_fenced(self) -> None:
        """Raise `FencedError` if another driver's entries follow ours.

        Any thread may call this. Another thread may have created our next entry, and not have noted it yet. Entries are
        looked for by their names, because a listing may be late, and in a listing, because old entries are deleted.
        """
        known = self.job_log
        number = known.next_sequence
        while self._storage.exists(self._paths.log_entry(number)):
            self._check_ours(known, self._read(number))
            number += 1
        later = self._later(number - 1)
        if later is not None:
            self._check_ours(known, self._read(later))

    def _check_ours(self, known: JobLog, entry: Entry) -> None:
        if not self._is_ours(entry.nonce) or entry.generation != known.generation:
            raise fenced_error(self._paths.job, known.generation, entry)

    def _nonce(self) -> str:
        """A nonce for one entry. It says which run wrote the entry."""
        return f"{self._run}-{uuid.uuid4().hex}"

    def _is_ours(self, nonce: str) -> bool:
        return nonce.startswith(f"{self._run}-")

    def _win(self, entry: Entry) -> JobLog:
        generation = self.job_log.generation
        if self._create(entry) is Verdict.FENCED:
            self._fenced(generation, entry.sequence)
        later = self._later_than(entry)
        if later is not None:
            self._fenced(generation, later)
        return self._apply(entry)

    def _fenced(self, generation: int, by: int) -> NoReturn:
        raise fenced_error(self._paths.job, generation, self._read(by))

    def _later_than(self, entry: Entry) -> int | None:
        """Like `_later`, for an entry that was created just now."""
        try:
            return self.retries.call(f"job {self._paths.job}: listing the log", lambda: self._later(entry.sequence))
        except StorageError as error:
            raise self._unknown(entry) from error

    def _modified(self, number: int) -> float:
        """When an entry was written, by the storage's clock; 0 if the storage does not say."""
        path = self._paths.log_entry(number)
        return next((file.modified for file in self._storage.list(self._paths.log_dir) if file.path == path), 0.0)

    def _later(self, number: int) -> int | None:
        """The newest entry after `number`; None if there is none.

        A driver that was stopped for long could find its next entry absent because it was deleted as an old one. Later
        entries show that the driver is fenced.
        """
        files = self._storage.list(self._paths.log_dir, after=self._paths.log_entry(number))
        return max((n for file in files if (n := self._paths.parse_log_entry(file.path)) is not None), default=None)

    def _apply(self, entry: Entry) -> JobLog:
        self.job_log = self.job_log.apply(entry)
        if isinstance(entry, Completed):
            self._trim(entry.sequence - self._kept_entries)
        return self.job_log

    def _trim(self, last: int) -> None:
        """Delete the entries up to `last`. What cannot be deleted now is deleted with a later entry."""
        try:
            self._storage.delete([self._paths.log_entry(number) for number in range(self._oldest, last + 1)])
            self._oldest = max(self._oldest, last + 1)
        except StorageError as error:
            log.warning("job %s: old entries of the log are deleted later: %s", self._paths.job, error)

    def _create(self, entry: Entry) -> Verdict:
        """Create an entry; says whose entry is there now.

        Any error leaves open whether the entry was written. The next try then finds it, and recognizes its nonce.
        """
        path, data = self._paths.log_entry(entry.sequence), encode_entry(entry)
        decode_entry(data, f"{path}, before it is written")  # an entry that nobody can read would end the log for ever

        def attempt() -> Verdict:
            try:
                self._storage.create(path, data)
                return Verdict.OURS
            except AlreadyExistsError:
                return judge_conflict(entry.nonce, self._read(entry.sequence))

        try:
            return self.retries.call(f"job {self._paths.job}: log entry {entry.sequence}", attempt)
        except (StorageFullError, StorageRefusedError):
            raise
        except StorageError as error:
            raise self._unknown(entry) from error

    def _unknown(self, entry: Entry) -> UnknownOutcomeError:
        where = f"{self._storage.url}/{self._paths.log_entry(entry.sequence)}"
        return UnknownOutcomeError(f"{where}: cannot tell whether the log entry was written")

    def _read(self, number: int) -> Entry:
        path = self._paths.log_entry(number)
        where = f"{self._storage.url}/{path}"
        entry = decode_entry(self._storage.read(path), where)
        if entry.sequence != number:
            raise CheckpointError(f"{where} says that it is entry {entry.sequence}: the log is damaged")
        return entry


def read_metadata(storage: Storage, paths: JobPaths, number: int, others: tuple[str, ...] | None) -> CheckpointMetadata:
    """The metadata of a checkpoint in the folder of its job. `others` are other roots that may hold its files.

    With None the files may be anywhere, so the caller must not touch them. Raises `MetadataError` if the metadata is
    damaged or names files elsewhere, `CheckpointNotFoundError` if it is missing.
    """
    return _read(storage, paths.metadata(number), Home(paths.job, number, others))


def read_referenced(storage: Storage, ref: CheckpointRef, others: tuple[str, ...]) -> CheckpointMetadata:
    """The metadata of the checkpoint or savepoint that an entry of a job's log names: see `read_metadata`."""
    job = ref.metadata_path.partition("/")[0]
    if job == ref.metadata_path:
        return _read(storage, ref.metadata_path, Home(None))
    return _read(storage, ref.metadata_path, Home(job, ref.checkpoint_id, others))


def _read(storage: Storage, path: str, home: Home) -> CheckpointMetadata:
    where = f"{storage.url}/{path}"
    try:
        return decode(storage.read(path), where, home)
    except NotFoundError as error:
        raise CheckpointNotFoundError(
            f"{where} is missing, though the job's log names it as a completed checkpoint. Bring the file back; or, to "
            "begin anew without its state, use another job name or empty the job's folder."
        ) from error
