"""The staged and published rows that a job knows to be void when it goes back to an older checkpoint."""

from __future__ import annotations

from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.errors import CheckpointError, StorageError
from strandline.runtime.driver.restore.job_log import read_metadata
from strandline.sinks.names import check_names
from strandline.storage import JobPaths, Storage


def named_by_newer(
    storage: Storage, paths: JobPaths, log: JobLog, restored: CheckpointMetadata | None, others: tuple[str, ...]
) -> list[SinkFile]:
    """The sink files of later batches that checkpoints of the job name, as far as these can be read.

    A job that goes back withdraws them even if the sinks' folders do not list them yet.
    """
    files: list[SinkFile] = []
    for number in sorted({*log.retained, *log.released}):
        try:
            metadata = read_metadata(storage, paths, number, others)
            check_names(metadata)
        except (CheckpointError, StorageError):
            continue  # It may be why the job goes back. What it names is withdrawn when the folder lists it.
        if restored is not None and metadata.batch_id > restored.batch_id:
            files += metadata.sink_files
    return files
