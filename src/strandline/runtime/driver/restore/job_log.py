"""The job's log in durable storage: entries created only if absent, one after the other. Who wins an entry, decides."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid

from strandline.checkpoint.job_log import (
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
    NotFoundError,
    UnknownOutcomeError,
)
from strandline.storage import JobPaths, Storage

log = logging.getLogger(__name__)

KEPT_ENTRIES = 100
"""Entries further back are deleted. Never so few that a driver could be as far behind as a pause in one call."""


class JobLogStore:
    """Reads and extends the log of one job."""

    def __init__(self, storage: Storage, paths: JobPaths, kept_entries: int = KEPT_ENTRIES) -> None:
        self._storage = storage
        self._paths = paths
        self._kept_entries = kept_entries
        self.log = JobLog()

    def load(self) -> JobLog:
        """Where the job stands now. A folder that holds files but no log is not ours."""
        newest = max(
            (
                n
                for file in self._storage.list(self._paths.log_dir)
                if (n := self._paths.parse_log_entry(file.path)) is not None
            ),
            default=None,
        )
        if newest is None:
            stranger = next(iter(self._storage.list(self._paths.root)), None)
            if stranger is not None:
                raise DirectoryNotOursError(
                    f"{self._storage.url}/{self._paths.root} is not empty, but not a job's checkpoint folder: it holds "
                    f"{stranger.path!r} but no log. Choose another checkpoint_dir or job name, or empty the folder."
                )
            self.log = JobLog()
        else:
            self.log = JobLog.replay([self._read(newest)])
        return self.log

    def released(self) -> list[int]:
        """The checkpoints in the job's folder that belong to the user, as far as the user has not deleted them."""
        return [number for number in self.log.released if self._storage.exists(self._paths.metadata(number))]

    def take_over(self) -> JobLog:
        """Begin a new generation from where the job stands; every earlier one is fenced from here on."""
        while not self.try_take_over(self.log.resume()):
            self.load()
        return self.log

    def try_take_over(self, start: Start, after: int | None = None) -> bool:
        """Begin a generation from `start`, if the log still ends where it was loaded; False if it has gone on.

        `after` is the generation that this driver ran last: it restarts only its own. If another driver has taken the
        job over meanwhile, that is a `FencedError`, not a reason to take it back.
        """
        if after is not None and self.log.generation != after:
            raise fenced_error(self._paths.job, after, self._read(self.log.position))
        owner = f"{socket.gethostname()}/{os.getpid()}"
        entry = self.log.takeover_entry(owner, time.time(), uuid.uuid4().hex, start)
        if self._create(entry) is not Verdict.OURS or self._later(entry.sequence) is not None:
            return False
        self._apply(entry)
        return True

    def complete(
        self, checkpoint_id: int, metadata_path: str, batch_id: int, retained: tuple[int, ...], dropped: tuple[int, ...]
    ) -> JobLog:
        """Make a checkpoint count. Raises `FencedError` if another driver has taken the job over."""
        entry = self.log.completion_entry(
            checkpoint_id, metadata_path, batch_id, time.time(), uuid.uuid4().hex, retained, dropped
        )
        return self._win(entry)

    def forget_all(self) -> JobLog:
        """Begin a generation without any checkpoint, so that all of them may be deleted. Raises `FencedError`."""
        known = self.log
        entry = Takeover(
            sequence=known.next_sequence,
            generation=known.generation + 1,
            owner=f"{socket.gethostname()}/{os.getpid()}",
            time=time.time(),
            nonce=uuid.uuid4().hex,
            last_checkpoint_id=known.last_checkpoint_id,
            latest=None,
            retained=(),
            dropped=known.retained,
            released=known.released,
        )
        return self._win(entry)

    def check_not_fenced(self) -> None:
        """Raises `FencedError` if entries of another driver follow ours."""
        later = self._later(self.log.position)
        if later is not None:
            raise fenced_error(self._paths.job, self.log.generation, self._read(later))

    def _win(self, entry: Entry) -> JobLog:
        if self._create(entry) is Verdict.FENCED:
            raise fenced_error(self._paths.job, self.log.generation, self._read(entry.sequence))
        generation = self.log.generation
        self._apply(entry)
        later = self._later(entry.sequence)
        if later is not None:
            raise fenced_error(self._paths.job, generation, self._read(later))
        return self.log

    def _later(self, number: int) -> int | None:
        """The first entry behind `number`, if there is one.

        Old entries are deleted, so a driver that slept very long might find its place free again: it looks behind it.
        """
        files = self._storage.list(self._paths.log_dir, after=self._paths.log_entry(number))
        return next((n for file in files if (n := self._paths.parse_log_entry(file.path)) is not None), None)

    def _apply(self, entry: Entry) -> JobLog:
        self.log = self.log.apply(entry)
        if isinstance(entry, Completed) and entry.sequence >= self._kept_entries:
            self._storage.delete([self._paths.log_entry(entry.sequence - self._kept_entries)])
        return self.log

    def _create(self, entry: Entry) -> Verdict:
        path = self._paths.log_entry(entry.sequence)
        for attempt in range(5):
            try:
                self._storage.create(path, encode_entry(entry))
                return Verdict.OURS
            except AlreadyExistsError:
                return judge_conflict(entry.nonce, self._read(entry.sequence))
            except UnknownOutcomeError as error:
                log.warning(
                    "job %s: outcome of log entry %d unknown, reading it back: %s",
                    self._paths.job,
                    entry.sequence,
                    error,
                )
                time.sleep(0.2 * 2**attempt)
                try:
                    return judge_conflict(entry.nonce, self._read(entry.sequence))
                except NotFoundError:
                    continue
        raise UnknownOutcomeError(f"{self._storage.url}/{path}: cannot tell whether the log entry was written")

    def _read(self, number: int) -> Entry:
        path = self._paths.log_entry(number)
        where = f"{self._storage.url}/{path}"
        entry = decode_entry(self._storage.read(path), where)
        if entry.sequence != number:
            raise CheckpointError(f"{where} says that it is entry {entry.sequence}: the log is damaged")
        return entry


def read_metadata(storage: Storage, path: str) -> CheckpointMetadata:
    """The metadata of a checkpoint. Raises `MetadataError` if damaged, `CheckpointNotFoundError` if it is gone."""
    where = f"{storage.url}/{path}"
    try:
        return decode(storage.read(path), where)
    except NotFoundError as error:
        raise CheckpointNotFoundError(
            f"{where} is missing, though the job's log names it as a completed checkpoint. Bring the file back; or, to "
            "begin anew without its state, use another job name or empty the job's folder."
        ) from error
