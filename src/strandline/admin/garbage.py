"""Orphans: files in a job's folder that no retained checkpoint refers to, and that no run can still come to need.

A crash between two steps of a checkpoint leaves files behind: uploads of a checkpoint that never completed, files of
one that was dropped, temporary files of a killed upload. What makes it safe to delete them while a run is alive:

- A run uploads before its checkpoint completes, so a file that nothing refers to may be wanted in a moment. It was
  written after the run took the job over, and only the newest generation can complete anything. So whatever was
  modified since that takeover is kept. Both times are the storage's own, for the log entry is a file, too; if the
  driver's clock says that the takeover was earlier, that counts.
- Files are listed first, the log and the metadata are read afterwards. What completes in between is seen as referenced;
  what completes later consists of files that are referenced now, or were modified since the takeover, or not listed.
- A file must be older than a minimum age as well, whoever wrote it.
- No path is ever written again after it was deleted. Names of uploads are unique. `_metadata` of a checkpoint that
  never completed is kept until one with a higher number has completed: before, its number might be given out again.

The log does not say that a run has ended. Who wants the last run's uploads gone takes the job over: a run that was
alive after all is fenced, so it stops, and cannot complete a checkpoint that has lost files.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from strandline.checkpoint.job_log import Entry, JobLog, Takeover, decode_entry
from strandline.checkpoint.metadata import CheckpointMetadata, file_paths
from strandline.errors import CheckpointError, FencedError, IncompatibleCheckpointError, NotFoundError, StorageError
from strandline.runtime.driver.restore.job_log import KEPT_ENTRIES, JobLogStore, read_metadata
from strandline.storage import JobPaths, Storage, StoredFile
from strandline.storage.base import TEMPORARY
from strandline.storage.external import delete_files, inner_path, list_files
from strandline.storage.local import LocalStorage

log = logging.getLogger(__name__)

MIN_AGE = 3600.0
"""Seconds for which an unreferenced file is left alone, whoever wrote it."""

AT_ONCE = 1000
"""Files deleted between two looks at the log."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The files of a job that are its checkpoints' data, each in one place."""

    orphans: tuple[StoredFile, ...] = ()
    """Nobody refers to them, and nobody will."""
    live: tuple[StoredFile, ...] = ()
    """Nobody refers to them yet, but the newest generation may."""
    young: tuple[StoredFile, ...] = ()
    """Nobody will refer to them, but they have not reached the minimum age."""
    numbers: tuple[StoredFile, ...] = ()
    """Metadata of checkpoints that never completed, kept because their numbers are still to be passed by."""
    referenced: int = 0


def sort_files(
    listing: Iterable[StoredFile],
    retained: Sequence[CheckpointMetadata],
    *,
    paths: JobPaths,
    last_checkpoint_id: int,
    live_since: float,
    now: float,
    min_age: float,
) -> Sorted:
    """Decide for every listed file whether it is an orphan.

    `listing` was made before `retained`, all checkpoints that the log retains, was read. `live_since` is when the
    newest generation began, on the storage's clock: infinity if it is known to have ended, minus infinity if nothing
    is known. Files outside the folders of checkpoint data (the log, anything unknown) are left out.
    """
    referenced = {paths.metadata(metadata.checkpoint_id) for metadata in retained}
    for metadata in retained:
        referenced |= file_paths(metadata)
    orphans: list[StoredFile] = []
    live: list[StoredFile] = []
    young: list[StoredFile] = []
    numbers: list[StoredFile] = []
    known = 0
    for file in listing:
        if not _is_checkpoint_data(paths, inner_path(file.path)):
            continue
        number = paths.parse_metadata(file.path)
        if file.path in referenced:
            known += 1
        elif file.modified >= live_since:
            live.append(file)
        elif file.modified > now - min_age:
            young.append(file)
        elif number is not None and number > last_checkpoint_id:
            numbers.append(file)
        else:
            orphans.append(file)
    return Sorted(tuple(orphans), tuple(live), tuple(young), tuple(numbers), known)


def _is_checkpoint_data(paths: JobPaths, path: str) -> bool:
    """Whether `path` lies in `shared/` or in a checkpoint's folder, or is a temporary file of the job."""
    if not path.startswith(f"{paths.root}/"):
        return False
    if path.rpartition("/")[2].startswith(TEMPORARY):
        return True
    if path.startswith(f"{paths.shared_dir}/"):
        return True
    folder, slash, _rest = path.removeprefix(f"{paths.root}/").partition("/")
    return bool(slash) and paths.parse_metadata(f"{paths.root}/{folder}/_metadata") is not None


@dataclass(frozen=True, slots=True)
class Garbage:
    """What was found in a job's folder, and what the decision rests on."""

    job: str
    generation: int
    owner: str | None
    """Who began the newest generation; None if the log does not reach back so far."""
    live_since: float
    retained: tuple[int, ...]
    files: Sorted


def find_garbage(
    storage: Storage, job: str, *, now: float, min_age: float = MIN_AGE, take_over: bool = False
) -> Garbage:
    """Look for the orphans of a job; nothing is deleted.

    With `take_over`, the job is taken over first: a run that is alive ends with `FencedError`, and so the newest
    generation is known to have ended. Raises `CheckpointError` if a retained checkpoint cannot be read: nobody knows
    what it needs then.
    """
    paths = JobPaths(job)
    store = JobLogStore(storage, paths)
    store.load()
    _check_ours(storage, paths, store.log)
    ours = None
    if take_over:
        ours = store.take_over().generation
        log.info("job %s: taken over as generation %d to clean up", job, ours)
    needed = [path for metadata in _readable(storage, paths, store) for path in file_paths(metadata)]
    listing = [*list_files(storage, paths.root, needed), *_temporary_files(storage, paths)]
    while True:
        known = store.load()
        _check_ours(storage, paths, known)
        try:
            kept = (*known.retained, *store.released())
            retained = [_read_retained(storage, paths, number) for number in kept]
            since, owner = _began(storage, paths, known)
            break
        except (CheckpointError, NotFoundError) as error:
            # A run that is alive may have dropped the checkpoint since, or cut off the log.
            if store.load().position != known.position:
                continue
            raise CheckpointError(
                f"job {job!r}: nothing was deleted, for what the retained checkpoints need cannot be read: {error}"
            ) from error
    if known.generation == ours:
        since = math.inf
    files = sort_files(
        listing,
        retained,
        paths=paths,
        last_checkpoint_id=known.last_checkpoint_id,
        live_since=since,
        now=now,
        min_age=min_age,
    )
    return Garbage(job, known.generation, owner, since, known.retained, files)


def delete_garbage(
    storage: Storage,
    garbage: Garbage,
    progress: Callable[[int], None] = lambda _count: None,
    at_once: int = AT_ONCE,
) -> None:
    """Delete the orphans; `progress` hears how many went with each step.

    Raises `FencedError` if a driver takes the job over meanwhile: what is left may be looked at anew.
    """
    paths = JobPaths(garbage.job)
    store = JobLogStore(storage, paths)
    orphans = iter(garbage.files.orphans)
    while some := [file.path for file in islice(orphans, at_once)]:
        if store.load().generation != garbage.generation:
            raise FencedError(
                f"job {garbage.job!r}: a driver took the job over as generation {store.log.generation} while orphans "
                "were being deleted. Those that are left were not touched; run the command again."
            )
        temporary = [path for path in some if path.rpartition("/")[2].startswith(TEMPORARY)]
        delete_files(storage, set(some).difference(temporary))
        _delete_temporary(storage, temporary)
        progress(len(some))


def _readable(storage: Storage, paths: JobPaths, store: JobLogStore) -> Iterator[CheckpointMetadata]:
    """The retained checkpoints, as far as they can be read now."""
    for number in (*store.log.retained, *store.released()):
        with suppress(CheckpointError, NotFoundError):
            yield _read_retained(storage, paths, number)


# --- what is read ----------------------------------------------------------------------------------


def _check_ours(storage: Storage, paths: JobPaths, known: JobLog) -> None:
    """A folder under another name than its job's: every path in its metadata leads elsewhere, so all looks orphaned."""
    latest = known.latest
    if latest is not None and latest.ours and latest.metadata_path != paths.metadata(latest.checkpoint_id):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{paths.root} belongs to another job, not to job {paths.job!r}: its log names "
            f"{latest.metadata_path!r} as the newest checkpoint. Nothing was deleted. Give the folder the name "
            "it had."
        )


def _read_retained(storage: Storage, paths: JobPaths, number: int) -> CheckpointMetadata:
    metadata = read_metadata(storage, paths.metadata(number))
    if (metadata.job, metadata.checkpoint_id) != (paths.job, number):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{paths.metadata(number)} is checkpoint {metadata.checkpoint_id} of job {metadata.job!r}. "
            "Bring back the file that belongs there."
        )
    return metadata


def _began(storage: Storage, paths: JobPaths, known: JobLog) -> tuple[float, str | None]:
    """When the newest generation began, and who began it.

    A long run cuts off its own takeover. Then its oldest entry serves as well, for `KEPT_ENTRIES` checkpoints have
    completed since: one that is still pending has a higher number than all of them, so to have uploaded anything
    earlier it would have to have been under way together with all of them.
    """
    times: dict[int, float] = {}
    for file in storage.list(paths.log_dir):
        number = paths.parse_log_entry(file.path)
        if number is not None and number <= known.position:
            times[number] = file.modified

    def read(number: int) -> Entry:
        path = paths.log_entry(number)
        return decode_entry(storage.read(path), f"{storage.url}/{path}")

    numbers = sorted(times)
    place = bisect_left(numbers, known.generation, key=lambda number: read(number).generation)
    if place == len(numbers):
        return -math.inf, None  # The log went on and was cut off meanwhile: nothing is known.
    first = read(numbers[place])
    owner = first.owner if isinstance(first, Takeover) else None
    if owner is None and len(numbers) - place < KEPT_ENTRIES:
        return -math.inf, None
    return min(first.time, times[first.sequence]), owner


# --- temporary files -------------------------------------------------------------------------------


def _temporary_files(storage: Storage, paths: JobPaths) -> list[StoredFile]:
    """What killed writers left half-written. Only file systems have such files: an object store shows whole objects."""
    if not isinstance(storage, LocalStorage):
        return []
    found: list[StoredFile] = []
    for folder, _folders, names in os.walk(storage.root / paths.root):
        for name in names:
            if name.startswith(TEMPORARY):
                file = Path(folder, name)
                with suppress(FileNotFoundError):  # Finished since the folder was read.
                    stat = file.stat()
                    found.append(StoredFile(file.relative_to(storage.root).as_posix(), stat.st_size, stat.st_mtime))
    return found


def _delete_temporary(storage: Storage, paths: list[str]) -> None:
    if not isinstance(storage, LocalStorage):
        return
    for path in paths:
        file = storage.root / path
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot delete {file}: {error.strerror or error}; check the rights there") from error
        with suppress(OSError):  # Not empty: somebody's folder.
            file.parent.rmdir()
