"""The files in the folder of a `ParquetSink`: how they are published, withdrawn and recognized."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.checkpoint.restore import ListedSinkFile, SinkRecovery
from strandline.errors import DirectoryNotOursError, MetadataError, NotFoundError
from strandline.storage import Storage

RENAMES_AT_ONCE = 16

_FINAL = re.compile(r"part-(?P<job>.+)-(?P<batch>\d{20})-[0-9a-f]{32}\.parquet")


def check_names(metadata: CheckpointMetadata) -> None:
    """Raise `MetadataError` unless all sink files have names that the job's own writer gives.

    Publication renames files, so other names in crafted metadata could replace any file in the folder of a sink.
    """
    for file in metadata.sink_files:
        match = _FINAL.fullmatch(file.final)
        folder, _, name = file.staged.partition("/")
        if match is None or match["job"] != metadata.job or folder[:1] != "_" or name != f"{file.final}.staged":
            raise MetadataError(
                f"checkpoint {metadata.checkpoint_id} of job {metadata.job!r} would publish {file.staged!r} as "
                f"{file.final!r}. The job gives no file such a name, so the checkpoint is refused. Restore another one."
            )


def publish(storage: Storage, files: Iterable[SinkFile]) -> None:
    """Make staged files visible by renaming them. May be repeated: published files stay as they are.

    An object store copies a file to rename it, so many files are renamed at the same time. If one cannot be published,
    the others are, and its error is raised.
    """
    with ThreadPoolExecutor(RENAMES_AT_ONCE, thread_name_prefix="publish") as pool:
        renamed = [pool.submit(_publish_one, storage, file) for file in files]
    for one in renamed:
        one.result()


def _publish_one(storage: Storage, file: SinkFile) -> None:
    try:
        storage.rename(file.staged, file.final)
    except NotFoundError:
        if not storage.exists(file.final):
            raise NotFoundError(
                f"{storage.url}: neither the staged file {file.staged} nor {file.final} is there, though a completed "
                f"checkpoint covers its {file.rows} rows. Bring the file back, or restore an older checkpoint."
            ) from None


def _listed(storage: Storage, sink: str, job: str) -> tuple[list[ListedSinkFile], list[str]]:
    """The job's files in a sink's folder, and the paths of visible files that are not the job's."""
    ours: list[ListedSinkFile] = []
    foreign: list[str] = []
    for file in storage.list():
        name = file.path.rsplit("/", 1)[-1]
        match = _FINAL.fullmatch(name.removesuffix(".staged"))
        if match is None:
            if not any(part.startswith(("_", ".")) for part in file.path.split("/")):
                foreign.append(file.path)
        elif match["job"] == job:
            ours.append(ListedSinkFile(sink, file.path, int(match["batch"]), not name.endswith(".staged")))
    return ours, foreign


def check_sink(storage: Storage, sink: str, job: str, restored: CheckpointMetadata | None) -> None:
    """Raise `DirectoryNotOursError` unless the folder is empty or holds files of this job.

    A job that starts without a checkpoint computes all rows again, so its folder must not hold published rows.
    """
    ours, foreign = _listed(storage, sink, job)
    published = [file for file in ours if file.published]
    if SinkRecovery.plan(restored, ours).unaccounted:
        raise DirectoryNotOursError(
            f"{storage.url} holds {len(published)} files that job {job!r} published earlier, but it has "
            "no checkpoint to go on from. Empty the folder, choose another one, or bring the checkpoint back."
        )
    if foreign and not published:
        raise DirectoryNotOursError(
            f"{storage.url}, where a sink of job {job!r} should write, is not empty and not ours: it holds "
            f"{foreign[0]!r}{f' and {len(foreign) - 1} other files' if len(foreign) > 1 else ''}. "
            "Give the sink a folder of its own."
        )


def recover_sink(storage: Storage, sink: str, job: str, restored: CheckpointMetadata | None) -> None:
    """Publish the files that the restored checkpoint covers. Delete published files of later batches, and other staged
    files: the job computes their rows again."""
    ours, _foreign = _listed(storage, sink, job)
    plan = SinkRecovery.plan(restored, ours)
    publish(storage, [file for file in (*plan.publish, *plan.missing) if file.sink == sink])
    storage.delete([file.name for file in (*plan.withdraw, *plan.discard)])
