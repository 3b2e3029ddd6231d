"""Verifies checkpoints: reads every file that they refer to, and compares its size and checksum."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from strandline.admin.reading import Reading, bytes_in
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    Kind,
    all_files,
    file_paths,
    registered_files,
    source_files,
)
from strandline.errors import CheckpointError, CheckpointNotFoundError, NotFoundError, StorageError, StorageFullError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.storage import JobPaths, Storage
from strandline.storage.checksums import checksum
from strandline.storage.external import fetch_file, resolve

THREADS = 8

_AT_ONCE = 10_000
"""How many files wait for a thread at a time; a checkpoint may have millions."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A file because of which a checkpoint cannot be restored."""

    path: str
    """Relative to the storage's root."""
    problem: str
    operator: str | None = None
    subtask: int | None = None
    """The subtask whose state the file holds; None for `_metadata` and for a piece of a source's log."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint or savepoint whose files were all read."""

    job: str
    id: int
    kind: Kind
    path: str
    files: int
    """Uploaded files, as `checkpoints ls` counts them. Inline files are covered by the checksum of `_metadata`."""
    bytes: int
    damage: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        """The findings as plain values."""
        return asdict(self)


class Verification:
    """Checkpoints of one job that are verified: one, all retained ones, or a savepoint. `run` reads their files."""

    def __init__(
        self,
        storage: Storage,
        root: str,
        job: str,
        found: Mapping[int, CheckpointMetadata | str],
        retained: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """`found` has the metadata of each checkpoint, or why it cannot be read; `root` says where they are.

        With `retained`, checkpoints that it does not name at the end are left out: a running job has dropped them.
        """
        self._storage = storage
        self._root = root
        self._job = job
        self._found = found
        self._retained = retained
        known = (metadata for metadata in found.values() if isinstance(metadata, CheckpointMetadata))
        self.handles = {handle for metadata in known for handle in _handles(metadata)}
        """The files to read. A file that several checkpoints share is among them once."""

    @classmethod
    def of_job(cls, storage: Storage, job: str, others: tuple[str, ...] = ()) -> Verification:
        """Verifies all checkpoints that the job's log retains.

        `others` are the roots of other storages that may hold files of the job. A checkpoint that names files elsewhere
        counts as damaged, and these files are not read.
        """

        def retained() -> list[int]:
            store = JobLogStore(storage, JobPaths(job))
            return sorted({*store.load().retained, *store.released()})

        return cls(storage, storage.url, job, _read(storage, job, retained(), others), retained)

    @classmethod
    def of_checkpoint(cls, storage: Storage, job: str, checkpoint: int, others: tuple[str, ...] = ()) -> Verification:
        """Verifies one checkpoint, which need not be in the job's log. `others` are as in `of_job`."""
        return cls(storage, storage.url, job, _read(storage, job, (checkpoint,), others))

    @classmethod
    def of_savepoint(cls, storage: Storage, metadata: CheckpointMetadata) -> Verification:
        """Verifies a savepoint; `storage` is its folder."""
        return cls(storage, storage.url, metadata.job, {metadata.checkpoint_id: metadata})

    def run(self, reading: Reading | None = None) -> list[Verified]:
        """Read every file. A checkpoint that a running job drops meanwhile is left out. `reading` counts the bytes."""
        problems = verify_files(self._storage, self.handles, reading)
        found = [self._verified(number, problems) for number in sorted(self._found)]
        if self._retained is not None and any(checkpoint.damage for checkpoint in found):
            retained = set(self._retained())
            found = [checkpoint for checkpoint in found if checkpoint.id in retained]
        return found

    def _verified(self, number: int, problems: Mapping[FileHandle, str]) -> Verified:
        metadata, paths = self._found[number], JobPaths(self._job)
        path = f"{self._root}/{paths.checkpoint_dir(number)}"
        if isinstance(metadata, str):
            bad = Damage(paths.metadata(number), metadata)
            return Verified(self._job, number, "checkpoint", path, 0, 0, (bad,))
        damage = tuple(
            Damage(file.handle.path, problems[file.handle], state.operator, state.subtask)
            for state, file in all_files(metadata)
            if file.handle is not None and file.handle in problems
        ) + tuple(
            Damage(handle.path, problems[handle])
            for _key, handle in source_files(metadata.source)
            if handle in problems
        )
        if metadata.kind == "savepoint":
            path = self._root
        size = sum(handle.size for handle in set(_handles(metadata)))
        return Verified(self._job, number, metadata.kind, path, len(file_paths(metadata)), size, damage)


def _read(
    storage: Storage, job: str, numbers: Iterable[int], others: tuple[str, ...]
) -> dict[int, CheckpointMetadata | str]:
    """The metadata of each checkpoint, or why it cannot be read."""
    found: dict[int, CheckpointMetadata | str] = {}
    for number in numbers:
        try:
            found[number] = read_metadata(storage, JobPaths(job), number, others)
        except CheckpointNotFoundError:
            found[number] = "is missing"
        except CheckpointError as error:
            found[number] = f"cannot be read: {error}"
    return found


def _handles(metadata: CheckpointMetadata) -> Iterator[FileHandle]:
    return (handle for _key, handle in registered_files(metadata))


def verify_files(
    storage: Storage,
    handles: Iterable[FileHandle],
    reading: Reading | None = None,
    threads: int = THREADS,
) -> dict[FileHandle, str]:
    """Read the files in several threads, and return the problem of each file that has one.

    No file is read into memory as a whole. `reading` counts the bytes. Raises `StorageFullError` if the local disk has
    no room for files of an object store.
    """
    problems: dict[FileHandle, str] = {}
    counted = reading or Reading()
    with (
        tempfile.TemporaryDirectory(prefix="strandline-verify-") as folder,
        ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool,
    ):
        numbered = enumerate(handles)
        try:
            while some := list(islice(numbered, _AT_ONCE)):
                running = {
                    pool.submit(_problem, storage, handle, Path(folder, str(n)), counted, n): handle
                    for n, handle in some
                }
                for done in as_completed(running):
                    problem = done.result()
                    if problem is not None:
                        problems[running[done]] = problem
        except BaseException:
            # Also on Ctrl-C: reading terabytes to the end would be useless.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return problems


def _problem(storage: Storage, handle: FileHandle, scratch: Path, reading: Reading, number: int) -> str | None:
    """The problem of one file, or None. A file of an object store is fetched into a folder, to save memory."""
    try:
        place, path = resolve(storage, handle.path)
        if place.root is not None:
            whole = (place.root / path).stat().st_size
            if whole != handle.stored_size:
                return f"has {whole} bytes instead of {handle.stored_size}"
            if not handle.whole:
                return _compare(handle, place.root / path, partial(reading.read, number))
        # What is not on a disk takes its time while it is fetched; the checksum is quick then.
        scratch.mkdir()
        reading.begin(number, lambda: bytes_in(scratch))
        fetch_file(storage, handle.path, scratch / "file", handle.part)
        return _compare(handle, scratch / "file")
    except (NotFoundError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return "is missing"
    except StorageFullError:
        raise  # The local disk is full, which says nothing about the file.
    except (OSError, StorageError) as error:
        return f"cannot be read: {error}"
    finally:
        reading.end(number, handle.size)
        shutil.rmtree(scratch, ignore_errors=True)


def _compare(handle: FileHandle, file: Path, note: Callable[[int], None] = lambda _count: None) -> str | None:
    size = file.stat().st_size
    if size != handle.size:
        return f"has {size} bytes instead of {handle.size}"
    found = checksum(file, note)
    return None if found == handle.checksum else f"has the checksum {found} instead of {handle.checksum}"
