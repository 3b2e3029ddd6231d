"""Generations of a job without Spark and slots: the driver's own takeover, registry, completion and deletion.

A state is a set of words. Each word is one shared file, which holds the word. Nothing of the driver's code is replaced:
a test decides only what the state is, and after which call of storage the driver dies.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SourceLog,
    SourceLogPiece,
    SourcePosition,
    StateFile,
    SubtaskState,
    all_files,
    source_files,
)
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointError, FencedError
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.job_log import read_metadata
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.driver.restore.takeover import Claim, ClaimMode, Restore, Wanted, take_over
from strandline.runtime.protocol.messages import StorageSettings
from strandline.storage import JobPaths, Storage, StoredFile
from strandline.storage.local import LocalStorage

JOB = "words"
PATHS = JobPaths(JOB)
SUBTASK = ("count", 0)


class Crash(BaseException):
    """The driver dies here. No code that handles errors can handle this."""


class Mortal(LocalStorage):
    """Local files, for one driver. The driver dies, or stalls, at one of its next calls that change something.

    `clock` gives the files their times, so that a run of a test is like any other.
    """

    def __init__(self, url: str, clock: Iterator[int] | None = None) -> None:
        super().__init__(url)
        self.clock = clock if clock is not None else itertools.count(1)
        self.stops_at: int | None = None
        """How many changes are left; None for a driver that lives on."""
        self.counts = ""
        """Which changes count: those whose path, or the word `delete`, has this in it."""
        self.after = False
        """Whether the last change takes effect before the driver stops."""
        self.stop: Callable[[], None] = die
        """How the driver stops. A driver that stalls returns, and goes on."""

    def write(self, path: str, data: bytes) -> None:
        self._change(path, lambda: self._dated(path, super(Mortal, self).write, data))

    def create(self, path: str, data: bytes) -> None:
        self._change(path, lambda: self._dated(path, super(Mortal, self).create, data))

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # one at a time: a driver may die when some of the files are gone
            self._change(f"delete {path}", lambda path=path: super(Mortal, self).delete([path]))  # type: ignore[misc]

    def _dated(self, path: str, put: Callable[[str, bytes], None], data: bytes) -> None:
        put(path, data)
        now = next(self.clock)
        os.utime(self.root / path, (now, now))

    def _change(self, what: str, act: Callable[[], None]) -> None:
        counts = self.counts in what
        now = counts and self.stops_at == 0
        if counts and self.stops_at is not None:
            self.stops_at = None if now else self.stops_at - 1
        if now and not self.after:
            self.stop()
        act()
        if now and self.after:
            self.stop()


def die() -> None:
    """The driver is killed."""
    raise Crash


def take_the_job_over(
    storage: Storage, restore: str | None = None, claim_mode: ClaimMode = "no_claim", job: str = JOB
) -> Claim:
    """Begin a generation, and do nothing else."""
    wanted = Wanted(
        job,
        (),
        1,
        {},
        can_go_back=True,
        restore=Restore(restore, claim_mode) if restore is not None else None,
        allow_non_restored=True,
    )
    return take_over(storage, StorageSettings(storage.url, {}), wanted, None)


class Generation:
    """A driver that has taken the job over, with the state that it restored."""

    def __init__(
        self,
        storage: Mortal,
        restore: str | None = None,
        claim_mode: ClaimMode = "no_claim",
        *,
        num_retained: int = 1,
        job: str = JOB,
    ) -> None:
        self.storage = storage
        self.claim = take_the_job_over(storage, restore, claim_mode, job)
        self.paths = JobPaths(job)
        self.coordinator = CheckpointCoordinator(
            interval=0.0,
            subtasks=[SUBTASK],
            num_retained=num_retained,
            max_concurrent=10,
            tolerable_failures=1_000_000,
            first_checkpoint_id=self.claim.first_checkpoint_id(),
        )
        recover_registry(self.coordinator, self.claim)
        self.durable = DurableCheckpoints(self.claim)
        restored = list(all_files(self.claim.restored)) if self.claim.restored else []
        self.state = {file.identity for _state, file in restored}
        self._confirmed = {file.identity: file.handle for _state, file in restored if file.handle is not None}
        logs = self.claim.restored.source.logs if self.claim.restored else ()
        self._pieces = logs[0].pieces if logs else ()
        if not self.claim.owned:
            self._confirmed, self._pieces = {}, ()
        self._now = 0.0
        self._names = (f"{self.claim.generation:04d}-{n:04d}" for n in itertools.count())

    def change(self, add: str = "", remove: str = "") -> None:
        """Change the state: each letter is a word."""
        self.state = (self.state | set(add)) - set(remove)

    def checkpoint(self, add: str = "", remove: str = "") -> int:
        """Change the state, and take a checkpoint. Returns its number."""
        self.change(add, remove)
        return self.complete(self.upload())

    def upload(self) -> int:
        """Take the barrier of a checkpoint, and upload what no completed checkpoint has. Returns its number."""
        self._now += 1
        pending = self.coordinator.trigger(self._now, self._now, int(self._now))
        uploaded: list[FileHandle] = []
        files = tuple(self._file(word, uploaded) for word in sorted(self.state))
        self._acknowledge(pending.id, files, uploaded)
        return pending.id

    def complete(self, number: int) -> int:
        """Complete a checkpoint, step by step as the driver does.

        Raises `CheckpointError` if another driver was first to write its metadata. The checkpoint has failed then.
        """
        log, uploaded = self._source_log()
        plan = self.coordinator.prepare_completion(
            number,
            self._now,
            shape=JobShape(self.paths.job, self.claim.generation, 1, 1, ("count",)),
            source=SourcePosition(number, {}, (log,)),
            uploaded=uploaded,
        )
        try:
            self.durable.write_metadata(plan.metadata)
        except FencedError:
            raise
        except CheckpointError as error:
            self.durable.tidy_up(self.coordinator.fail(number, str(error), self._now).delete)
            raise
        self.durable.win_log_entry(plan)
        decision = self.coordinator.confirm_completion(number, self._now)
        self._confirmed = {file.identity: file.handle for _state, file in all_files(plan.metadata) if file.handle}
        self._pieces = plan.metadata.source.logs[0].pieces
        self.durable.tidy_up(decision.delete, decision.dropped)
        return number

    def savepoint(self, directory: Path) -> str:
        """Write a savepoint of the state. Returns its path."""
        self._now += 1
        pending = self.coordinator.trigger(self._now, self._now, int(self._now), kind="savepoint")
        target = SavepointTarget.within(str(directory), self.paths.job, "native", {})
        uploaded: list[FileHandle] = []
        files = []
        for word in sorted(self.state):
            name = next(self._names)
            target.storage.write(name, word.encode())
            uploaded.append(_handle(name, word))
            files.append(StateFile(word, word, True, uploaded[-1]))
        self._acknowledge(pending.id, tuple(files), uploaded)
        plan = self.coordinator.prepare_completion(
            pending.id,
            self._now,
            shape=JobShape(self.paths.job, self.claim.generation, 1, 1, ("count",)),
            source=SourcePosition(pending.id, {}),
        )
        path = target.complete(plan.metadata)
        self.coordinator.confirm_completion(pending.id, self._now)
        return path

    def cancel(self) -> None:
        """End the job, and delete its checkpoints."""
        self.durable.tidy_up(self.coordinator.fail_all("cancelled", self._now).delete)
        decision = self.coordinator.drop_all()
        self.durable.delete_all(decision.dropped, decision.delete)

    def _source_log(self) -> tuple[SourceLog, list[FileHandle]]:
        """The log of a source: one piece for the first half of the alphabet, and one for the state of today."""
        uploaded: list[FileHandle] = []
        pieces = []
        for text in ("first a" if "a" in self.state else "first", "".join(["then ", *sorted(self.state)])):
            piece = next((one for one in self._pieces if one.identity == text), None)
            if piece is None:
                handle = _handle(self.paths.shared(f"{next(self._names)}-source"), text)
                self.storage.write(handle.path, text.encode())
                uploaded.append(handle)
                piece = SourceLogPiece(text, len(text), handle)
            pieces.append(piece)
        return SourceLog(0, (("0", sum(piece.length for piece in pieces)),), tuple(pieces)), uploaded

    def _file(self, word: str, uploaded: list[FileHandle]) -> StateFile:
        handle = self._confirmed.get(word)
        if handle is None:
            handle = _handle(self.paths.shared(next(self._names)), word)
            self.storage.write(handle.path, word.encode())
            uploaded.append(handle)
        return StateFile(word, word, True, handle)

    def _acknowledge(self, number: int, files: tuple[StateFile, ...], uploaded: list[FileHandle]) -> None:
        ack = SubtaskAck(
            state=SubtaskState(*SUBTASK, 0, 1, "heap", True, files),
            uploaded=tuple(uploaded),
            barrier_time=0.0,
            ack_time=0.0,
            sync_ms=0.0,
            async_ms=0.0,
            checkpointed_bytes=0,
            full_bytes=0,
        )
        self.coordinator.acknowledge(number, *SUBTASK, ack)


def location(storage: Storage, number: int, job: str = JOB) -> str:
    """What a user writes to restore a checkpoint."""
    return f"{storage.url}/{JobPaths(job).checkpoint_dir(number)}"


def words(storage: Storage, number: int, job: str = JOB) -> set[str]:
    """The state of a checkpoint, read from its files. Raises `NotFoundError` if one is missing."""
    metadata = read_metadata(storage, JobPaths(job), number, others=())
    for _key, handle in source_files(metadata.source):
        storage.read(handle.path)
    return {storage.read(handle.path).decode() for handle in handles(metadata)}


def handles(metadata: CheckpointMetadata) -> Iterator[FileHandle]:
    """The uploaded files of a checkpoint."""
    return (file.handle for _state, file in all_files(metadata) if file.handle is not None)


def data_files(storage: Storage, job: str = JOB) -> set[str]:
    """Every file of the job but its log and its history."""
    files: Iterator[StoredFile] = storage.list(JobPaths(job).root)
    others = (JobPaths(job).log_dir, JobPaths(job).history_dir)
    return {file.path for file in files if not file.path.startswith(others)}


def _handle(path: str, word: str) -> FileHandle:
    return FileHandle(path, len(word.encode()), "crc32:0")
