"""The files in the folder of a `ParquetSink`: how they are published, withdrawn and recognized.

A folder has one owner; see `owner`. Files that were withdrawn are gone, and a checkpoint names only the rows since the
one before it, so it does not tell whether all rows that it covers are still there. Therefore a withdrawal leaves a
trace in the folder, an empty file whose name says what was withdrawn. A checkpoint that covers such rows is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from strandline.checkpoint.batch import generation_of
from strandline.checkpoint.job_log import JobLog, WentBack
from strandline.checkpoint.metadata import HIGHEST_KNOWN_GENERATION, CheckpointMetadata, SinkFile
from strandline.checkpoint.restore import ListedSinkFile, SinkRecovery
from strandline.errors import (
    DirectoryNotOursError,
    SinkFilesMissingError,
    StorageError,
)
from strandline.sinks.names import EMPTY_NAME, FINAL_NAME, STAGING_FOLDER
from strandline.sinks.parquet.owner import check_owner, owned_by, read_owner
from strandline.sinks.staging import publish
from strandline.storage import Storage
from strandline.storage.retries import Retries

_MOST_LISTINGS = 12
"""How often a folder is listed and cleared before its recovery fails."""
_LONGEST_PAUSE = 4
"""The number of the try after which the pause between two listings grows no more."""
_WITHDRAWN = re.compile(rf"{STAGING_FOLDER}/withdrawn-(?P<first>\d{{20}})-(?P<generation>\d{{20}})")


@dataclass(slots=True)
class _Listing:
    """What lies in the folder of a sink."""

    ours: list[ListedSinkFile] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Visible files that are not the output of a job."""
    others: set[str] = field(default_factory=set)
    """Other jobs whose output is there."""
    withdrawn: list[tuple[int, int]] = field(default_factory=list)
    """A batch and a generation each: the generation withdrew rows of earlier generations from that batch on."""

    @classmethod
    def of(cls, storage: Storage, sink: str, job: str) -> _Listing:
        found = cls()
        for file in storage.list():
            found._add(file.path, sink, job)
        return found

    def _add(self, path: str, sink: str, job: str) -> None:
        # Only where the job puts its files: a copy that the user keeps in a folder below is the user's.
        folder, _, name = path.rpartition("/")
        staged = name.endswith(".staged") and folder[:1] == "_" and "/" not in folder
        match = FINAL_NAME.fullmatch(name.removesuffix(".staged")) if staged or not folder else None
        if match and generation_of(int(match["batch"])) <= HIGHEST_KNOWN_GENERATION:
            if match["job"] == job:
                self.ours.append(ListedSinkFile(sink, path, int(match["batch"]), not staged))
            else:
                self.others.add(match["job"])
        elif match := EMPTY_NAME.fullmatch(path):
            if match["job"] != job:
                self.others.add(match["job"])
        elif match := _WITHDRAWN.fullmatch(path):
            self.withdrawn.append((int(match["first"]), int(match["generation"])))
        elif not any(part.startswith(("_", ".")) for part in path.split("/")):
            self.foreign.append(path)


def check_sink(
    storage: Storage,
    sink: str,
    job: str,
    restored: CheckpointMetadata | None,
    log: JobLog | None = None,
    retries: Retries | None = None,
    *,
    takes_sinks: bool = False,
) -> int:
    """Raise an error unless the job may write into the folder and can go on from `restored`. Changes nothing.

    `sink` is the place of the sink, and `storage` its folder.

    `DirectoryNotOursError`: the folder belongs to another job or to another log of the job, holds something else, or
    holds rows of this job although it starts without a checkpoint and computes all rows again.
    `SinkFilesMissingError`: rows that the checkpoint covers are gone. `log` is the job's log before the takeover, which
    takes the folder over from another log if `takes_sinks`. Returns the newest generation of the job that is known
    there; 0 if none is.
    """
    found = _Listing.of(storage, sink, job)
    plan = SinkRecovery.plan(restored, found.ours)
    published = [file for file in found.ours if file.published]
    owner = read_owner(storage)
    if owner is not None:
        check_owner(storage, owner, job, log or JobLog(), takes_sinks=takes_sinks)
    elif found.others and not published:
        raise owned_by(storage, min(found.others), job)
    if plan.unaccounted:
        raise DirectoryNotOursError(
            f"{storage.url} holds {len(published)} files that job {job!r} published earlier, but it has "
            "no checkpoint to go on from. Empty the folder, choose another one, or bring the checkpoint back."
        )
    if found.foreign and not published:
        others = f" and {len(found.foreign) - 1} other files" if len(found.foreign) > 1 else ""
        raise DirectoryNotOursError(
            f"{storage.url}, where a sink of job {job!r} should write, is not empty and not ours: it holds "
            f"{found.foreign[0]!r}{others}. Give the sink a folder of its own."
        )
    if restored is not None:
        _check_withdrawn(storage, restored, found.withdrawn)
        _check_rows(storage, sink, restored, plan, retries or Retries(1))
    return max((owner.generation if owner is not None else 0, *(file.generation for file in found.ours)))


def _check_rows(
    storage: Storage, sink: str, restored: CheckpointMetadata, plan: SinkRecovery, retries: Retries
) -> None:
    """Raise `SinkFilesMissingError` unless every file that the checkpoint names is staged or published.

    A driver that still runs may have published a file while the folder was listed, and some stores show files late. So
    a file that was not listed is looked for again.
    """
    for file in plan.missing:
        if file.sink == sink and not _appears(storage, file, retries):
            raise SinkFilesMissingError(
                f"{_cannot_restore(restored)}: neither {file.final} nor the staged file {file.staged} is in "
                f"{storage.url}, and it covers the {file.rows} rows of that file. Bring the file back, or restore "
                "another checkpoint."
            )


def _appears(storage: Storage, file: SinkFile, retries: Retries) -> bool:
    for attempt in range(retries.tries):
        if storage.exists(file.final) or storage.exists(file.staged):
            return True
        if attempt < retries.tries - 1:
            retries.pause(attempt)
    return False


def _check_withdrawn(storage: Storage, restored: CheckpointMetadata, withdrawn: Iterable[tuple[int, int]]) -> None:
    """Raise `SinkFilesMissingError` if rows that the checkpoint covers were withdrawn."""
    for first, generation in withdrawn:
        if first <= restored.batch_id and generation_of(restored.batch_id) < generation:
            raise SinkFilesMissingError(
                f"{_cannot_restore(restored)}: generation {generation} of the job went back behind it, and withdrew "
                f"rows from {storage.url} that it covers. Restore one that covers no batch from {first} on, or a newer "
                "one; or give the job another output folder."
            )


def _cannot_restore(restored: CheckpointMetadata) -> str:
    return f"{restored.kind} {restored.checkpoint_id} of job {restored.job!r} cannot be restored"


def recover_sink(
    storage: Storage,
    sink: str,
    job: str,
    restored: CheckpointMetadata | None,
    generation: int,
    check_not_fenced: Callable[[], None],
    retries: Retries | None = None,
    went_back: Sequence[WentBack] = (),
    named: Iterable[SinkFile] = (),
) -> None:
    """Publish the files that the restored checkpoint covers. Delete published files of later batches, and other staged
    files: the job computes their rows again.

    Only files of generations before `generation` are deleted, and only after `check_not_fenced`, which raises if the
    job was taken over meanwhile. A driver that was taken over may still publish a file after the folder was listed, so
    the folder is listed until it holds nothing that has to go. Raises `StorageError` if that takes too often.

    A store may list files late. So files that have to go are also known by `went_back`, which the job's log repeats
    until they are listed, and by `named`, the files that newer checkpoints name.
    """
    retries = retries or Retries()
    known = [file for file in named if file.sink == sink and _is_later(file, restored, generation)]
    deleted: set[str] = set()
    for attempt in range(_MOST_LISTINGS):
        if attempt > 1:
            retries.pause(min(attempt, _LONGEST_PAUSE))
        found = _Listing.of(storage, sink, job)
        if restored is not None:
            # A driver that was fenced by our takeover entry may have checked the fence just before it.
            _check_withdrawn(storage, restored, found.withdrawn)
        plan = SinkRecovery.plan(restored, found.ours, generation, went_back)
        publish(storage, [file for file in (*plan.publish, *plan.missing) if file.sink == sink])
        # The traces come before the check: whoever takes over after the check sees them.
        later = [file.batch for file in plan.withdraw if restored is not None and file.batch > restored.batch_id]
        traces = {(one.first, one.generation) for one in went_back}
        if later and all(one.generation != generation for one in went_back):
            traces.add((min(later), generation))
        for first, by in traces - set(found.withdrawn):
            storage.write(f"{STAGING_FOLDER}/withdrawn-{first:020d}-{by:020d}", b"")
        doomed = [file.name for file in (*plan.withdraw, *plan.discard)]
        # A listing may show a deleted file for a while.
        doomed = [name for name in doomed if name not in deleted or storage.exists(name)]
        if not doomed and not known:
            return
        check_not_fenced()
        # Once the staged file is gone, nobody can publish it.
        storage.delete([*(file.staged for file in known), *doomed])
        storage.delete([file.final for file in known])
        known = []
        deleted.update(doomed)
    raise StorageError(
        f"{storage.url} still holds files that were deleted {_MOST_LISTINGS} times, such as {min(deleted)}; wait until "
        "its listings are current, and start the job again"
    )


def _is_later(file: SinkFile, restored: CheckpointMetadata | None, generation: int) -> bool:
    """Whether a file that a checkpoint names is of a batch that is computed again."""
    match = FINAL_NAME.fullmatch(file.final)
    batch = int(match["batch"]) if match else -1
    return restored is not None and batch > restored.batch_id and generation_of(batch) < generation
