"""Rows that a checkpoint covers and that are staged for a sink which the job does not have any more."""

from __future__ import annotations

from collections.abc import Mapping

from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.errors import IncompatibleCheckpointError, StorageError
from strandline.sinks.base import SinkTarget
from strandline.sinks.iceberg.data_files import described_folder, open_folder
from strandline.sinks.names import folder_in, is_folder
from strandline.sinks.parquet.target import ParquetTarget
from strandline.storage import Storage, open_storage


def check_former_sinks(
    found: CheckpointMetadata | None, sinks: Mapping[str, SinkTarget], storage: Storage, options: Mapping[str, str]
) -> None:
    """Raise `IncompatibleCheckpointError` if rows of a sink that the job does not have any more would be lost.

    Rows for a folder of Parquet files are published without the sink, the others are not: only the sink knows how.
    """
    if found is None:
        return
    for place in _former_places(found, sinks):
        files = [file for file in found.sink_files if file.sink == place]
        staged = [file for file in files if not is_folder(place) and _is_staged(file, found.job, storage, options)]
        if staged:
            raise IncompatibleCheckpointError(
                f"{found.kind} {found.checkpoint_id} of job {found.job!r} covers {sum(file.rows for file in staged)} "
                f"rows for {place}, which are staged and not yet there, and the job has no such sink. Start the job "
                "once with that sink; or, to drop these rows, start it with allow_non_restored_state=True."
            )


def _is_staged(file: SinkFile, job: str, storage: Storage, options: Mapping[str, str]) -> bool:
    if not file.final:
        return storage.exists(file.staged)
    try:
        location = described_folder(storage, job, file.sink) or folder_in(file.sink)
        return open_folder(location, options).exists(file.staged)
    except StorageError as error:
        raise StorageError(
            f"job {job!r}: it is not known whether {file.rows} rows are still staged for {file.sink}, a sink that the "
            f"job does not have any more: {error}. Start the job once with that sink; or, to drop rows that may be "
            "staged, start it with allow_non_restored_state=True."
        ) from error


def publish_for_former_sinks(
    found: CheckpointMetadata | None, sinks: Mapping[str, SinkTarget], options: Mapping[str, str]
) -> None:
    """Publish the rows that the checkpoint covers in the folders of Parquet sinks that the job does not have any more.

    The folder may be that of one of the job's sinks now, because it was moved or has another name.
    """
    if found is None:
        return
    known = [target for target in sinks.values() if isinstance(target, ParquetTarget)]
    for place in filter(is_folder, _former_places(found, sinks)):
        files = [file for file in found.sink_files if file.sink == place]
        former = ParquetTarget(open_storage(place, dict(options), private=False), place, found.job)
        for target in (former, *known):
            target.adopt(files)


def _former_places(found: CheckpointMetadata, sinks: Mapping[str, SinkTarget]) -> list[str]:
    """The sinks for which the checkpoint has rows, and which the job does not have."""
    return sorted({file.sink for file in found.sink_files} - sinks.keys())
