"""Orphans: files in a job's folder that no retained checkpoint refers to, and that no run can need later.

A crash between two steps of a checkpoint leaves files behind: uploads of a checkpoint that never completed, files of a
checkpoint that was dropped, temporary files of a killed upload, staged rows of a batch that was repeated. Orphans can
be deleted while a run is alive, because of these rules:

- A run uploads files before its checkpoint completes, so a file without a reference may get one soon. Such a file was
  written after the run took the job over, because only the newest generation can complete a checkpoint. So every file
  modified since that takeover is kept. Both times come from the storage's clock: the log entry is a file, too. If the
  driver's clock says that the takeover was earlier, the earlier time counts. Every later entry of the generation
  repeats this time, so it is known however long the run lasts. If the driver's clock is put back meanwhile, so is this
  time. If it lies in the future, the clock was put back and the run has not said so yet: nothing is an orphan then.
  The storage of `changelog_dir` has a clock of its own, so its files get an hour more.
- The files are listed first. The log and the metadata are read afterwards. A checkpoint that completes in between is
  seen, with its references. A checkpoint that completes later consists of files that are referenced already, that were
  modified since the takeover, or that were not listed.
- A file must also be older than a minimum age.
- The next takeover goes on from the newest checkpoint and the durable epochs behind it. So the files of these epochs
  are kept, whoever has taken the job over.
- No path is written again after it was deleted. Names of uploads are unique. The `_metadata` of a checkpoint that never
  completed is kept until the log excludes that its number is used again: until a checkpoint with a higher number has
  completed, or somebody has taken the job over to clean up.

The log does not record the end of a run. To delete the last run's uploads, somebody takes the job over: a run that is
still alive is fenced by that, so it stops and cannot complete a checkpoint whose files are gone.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from strandline.checkpoint.batch import numbered
from strandline.checkpoint.job_log import Entry, JobLog, Takeover, decode_entry
from strandline.checkpoint.metadata import CheckpointMetadata, file_paths
from strandline.errors import CheckpointError, FencedError, IncompatibleCheckpointError, NotFoundError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.storage import JobPaths, Storage, StoredFile
from strandline.storage.base import TEMPORARY
from strandline.storage.external import delete_files, inner_path, list_files, root_of

log = logging.getLogger(__name__)

MIN_AGE = 3600.0
"""Seconds for which an unreferenced file is left alone, whoever wrote it."""

CLOCK_DIFFERENCE = 3600.0
"""Seconds by which the clock of another storage may be behind the clock of the storage that holds the log."""

AT_ONCE = 1000
"""Files deleted between two looks at the log."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The files that hold a job's checkpoints, each in exactly one group."""

    orphans: tuple[StoredFile, ...] = ()
    """No checkpoint refers to them, and none can later."""
    live: tuple[StoredFile, ...] = ()
    """No checkpoint refers to them yet, but one of the newest generation may."""
    young: tuple[StoredFile, ...] = ()
    """No checkpoint can refer to them later, but they have not reached the minimum age."""
    numbers: tuple[StoredFile, ...] = ()
    """Metadata of checkpoints that never completed. They are kept as long as their number may be used again."""
    referenced: int = 0
    """How many files checkpoints, or the takeover of the next generation, need."""


def sort_files(
    listing: Iterable[StoredFile],
    retained: Sequence[CheckpointMetadata],
    *,
    paths: JobPaths,
    last_checkpoint_id: int,
    live_since: float,
    now: float,
    min_age: float,
    extended: int | None = None,
) -> Sorted:
    """Decide for every listed file whether it is an orphan.

    `retained` has all checkpoints that the log retains; it was read after `listing` was made. `live_since` is the time
    at which the newest generation began, by the storage's clock: infinity if that generation has ended, minus infinity
    if the time is unknown. `extended` is the batch of the newest checkpoint, if durable epochs behind it belong to the
    job. Files outside the folders of checkpoint data (the log, unknown files) are left out.
    """
    referenced = {paths.metadata(metadata.checkpoint_id) for metadata in retained}
    for metadata in retained:
        referenced |= file_paths(metadata) | {file.staged for file in metadata.sink_files}
    orphans: list[StoredFile] = []
    live: list[StoredFile] = []
    young: list[StoredFile] = []
    numbers: list[StoredFile] = []
    known = 0
    for file in listing:
        if not _is_checkpoint_data(paths, inner_path(file.path)):
            continue
        number = paths.parse_metadata(file.path)
        if file.path in referenced or _extends(paths, file.path, extended):
            known += 1
        elif file.modified >= (live_since if root_of(file.path) is None else live_since - CLOCK_DIFFERENCE):
            live.append(file)
        elif file.modified > now - min_age:
            young.append(file)
        elif number is not None and number > last_checkpoint_id:
            numbers.append(file)
        else:
            orphans.append(file)
    return Sorted(tuple(orphans), tuple(live), tuple(young), tuple(numbers), known)


def _extends(paths: JobPaths, path: str, batch: int | None) -> bool:
    """Whether a file has epochs behind a batch, of its generation."""
    name = paths.parse_epochs(path)
    return name is not None and batch is not None and name[0] == numbered(batch)[0] and name > numbered(batch)


def _is_checkpoint_data(paths: JobPaths, path: str) -> bool:
    """Whether `path` is a file of `shared/`, `staged/`, a checkpoint or epochs, or a temporary file of the job."""
    if not path.startswith(f"{paths.root}/"):
        return False
    if path.rpartition("/")[2].startswith(TEMPORARY):
        return True
    if path.startswith((f"{paths.shared_dir}/", f"{paths.staged_dir}/")) or paths.parse_epochs(path) is not None:
        return True
    folder, slash, _rest = path.removeprefix(f"{paths.root}/").partition("/")
    return bool(slash) and paths.parse_metadata(f"{paths.root}/{folder}/_metadata") is not None


@dataclass(frozen=True, slots=True)
class Garbage:
    """The sorted files of a job, and the facts that the sorting is based on."""

    job: str
    generation: int
    owner: str | None
    """Who began the newest generation; None if that entry of the log was deleted."""
    live_since: float
    retained: tuple[int, ...]
    files: Sorted


def find_garbage(
    storage: Storage,
    job: str,
    *,
    now: float,
    min_age: float = MIN_AGE,
    take_over: bool = False,
    others: tuple[str, ...] = (),
) -> Garbage:
    """Find the orphans of a job without deleting anything.

    With `take_over`, the job is taken over first. A run that is alive then ends with `FencedError`, so its uploads are
    orphans, too. `others` are the roots of other storages that may hold files of the job. Raises `CheckpointError` if a
    retained checkpoint cannot be read or names files elsewhere, because the files it needs are unknown then.
    """
    paths = JobPaths(job)
    store = JobLogStore(storage, paths)
    store.load()
    _check_ours(storage, paths, store.job_log)
    ours = None
    if take_over:
        numbers = (paths.parse_metadata(file.path) for file in storage.list(paths.root))
        ours = store.take_over(max((number for number in numbers if number is not None), default=0)).generation
        log.info("job %s: taken over as generation %d to clean up", job, ours)
    needed = [path for metadata in _readable(storage, paths, store, others) for path in file_paths(metadata)]
    listing = list(list_files(storage, paths.root, needed))
    while True:
        known = store.load()
        _check_ours(storage, paths, known)
        try:
            kept = (*known.retained, *store.released())
            retained = [read_metadata(storage, paths, number, others) for number in kept]
            since, owner = _began(storage, paths, known, now)
            break
        except (CheckpointError, NotFoundError) as error:
            # A run that is alive may have dropped the checkpoint, or deleted old entries of the log.
            if store.load().position != known.position:
                continue
            raise CheckpointError(
                f"job {job!r}: nothing was deleted, because a retained checkpoint cannot be read: {error}"
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
        extended=known.latest.batch_id if known.epochs and known.latest is not None else None,
    )
    return Garbage(job, known.generation, owner, since, known.retained, files)


def delete_garbage(
    storage: Storage,
    garbage: Garbage,
    progress: Callable[[int], None] = lambda _count: None,
    at_once: int = AT_ONCE,
) -> None:
    """Delete the orphans, and call `progress` with the number of files after each step.

    Raises `FencedError` if a driver takes the job over meanwhile; the files that are left must be sorted again.
    """
    paths = JobPaths(garbage.job)
    store = JobLogStore(storage, paths)
    orphans = iter(garbage.files.orphans)
    while some := [file.path for file in islice(orphans, at_once)]:
        if store.load().generation != garbage.generation:
            raise FencedError(
                f"job {garbage.job!r}: a driver took the job over as generation {store.job_log.generation} while "
                "orphans were being deleted. Those that are left were not touched; run the command again."
            )
        delete_files(storage, some)
        progress(len(some))


def _readable(
    storage: Storage, paths: JobPaths, store: JobLogStore, others: tuple[str, ...]
) -> Iterator[CheckpointMetadata]:
    """The retained checkpoints that can be read."""
    for number in (*store.job_log.retained, *store.released()):
        with suppress(CheckpointError, NotFoundError):
            yield read_metadata(storage, paths, number, others)


# --- what is read ----------------------------------------------------------------------------------


def _check_ours(storage: Storage, paths: JobPaths, known: JobLog) -> None:
    """Refuse a renamed folder: the paths in its metadata lead elsewhere, so all its files would look like orphans."""
    latest = known.latest
    if latest is not None and latest.ours and latest.metadata_path != paths.metadata(latest.checkpoint_id):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{paths.root} belongs to another job, not to job {paths.job!r}: its log names "
            f"{latest.metadata_path!r} as the newest checkpoint. Nothing was deleted. Give the folder the name "
            "it had."
        )


def _began(storage: Storage, paths: JobPaths, known: JobLog, now: float) -> tuple[float, str | None]:
    """When the newest generation began, and who began it.

    A time in the future is as good as unknown: the clock was put back since.
    """
    since, owner = _began_by_the_log(storage, paths, known)
    return since if since <= now else -math.inf, owner


def _began_by_the_log(storage: Storage, paths: JobPaths, known: JobLog) -> tuple[float, str | None]:
    times: dict[int, float] = {}
    for file in storage.list(paths.log_dir):
        number = paths.parse_log_entry(file.path)
        if number is not None and number <= known.position:
            times[number] = file.modified
    if known.began is not None:
        return min(known.began, times.get(known.position, math.inf)), known.owner or None
    return _began_by_takeover(storage, paths, known, times)


def _began_by_takeover(
    storage: Storage, paths: JobPaths, known: JobLog, times: dict[int, float]
) -> tuple[float, str | None]:
    """When a generation of an older release began, whose completions do not say it.

    If the entry of its takeover was deleted, the time is unknown, and every file may be one that the run is writing.
    """
    numbers = sorted(times)

    def read(number: int) -> Entry:
        path = paths.log_entry(number)
        return decode_entry(storage.read(path), f"{storage.url}/{path}")

    place = bisect_left(numbers, known.generation, key=lambda number: read(number).generation)
    first = read(numbers[place]) if place < len(numbers) else None
    if not isinstance(first, Takeover):
        return -math.inf, None
    return min(first.time, times[first.sequence]), first.owner
