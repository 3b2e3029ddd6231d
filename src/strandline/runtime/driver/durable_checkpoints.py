"""The checkpoints of a job in durable storage: written, entered into the job's log, published, deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SinkFile, encode
from strandline.errors import AlreadyExistsError, CheckpointError, StorageError
from strandline.runtime.driver.restore.sink_files import publish
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)

PUBLISH_TRIES = 4


class DurableCheckpoints:
    """Carries out the steps of a completion in storage. `Checkpoints` calls them, in order."""

    def __init__(self, claim: Claim, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._job_log = claim.store
        self._storage = claim.storage
        self._paths = claim.paths
        self._sinks = claim.sinks

    def location(self, checkpoint_id: int) -> str:
        """Where the metadata of a checkpoint is, as a user would write it."""
        return f"{self._storage.url}/{self._paths.metadata(checkpoint_id)}"

    def write_metadata(self, metadata: CheckpointMetadata) -> None:
        """Create `_metadata`. May be repeated with the same metadata.

        Raises `FencedError` or `CheckpointError` if another driver wrote a checkpoint with this id.
        """
        path, data = self._paths.metadata(metadata.checkpoint_id), encode(metadata)
        try:
            self._storage.create(path, data)
        except AlreadyExistsError:
            if self._storage.read(path) != data:
                self.check_not_fenced()
                raise CheckpointError(f"{self._storage.url}/{path} was written by another driver") from None

    def win_log_entry(self, plan: CompletionPlan) -> None:
        """Win the next entry of the job's log: from then on the checkpoint exists. Raises `FencedError`."""
        number = plan.metadata.checkpoint_id
        self._job_log.complete(
            number, self._paths.metadata(number), plan.metadata.batch_id, plan.retained, plan.dropped
        )

    def publish(self, files: Iterable[SinkFile]) -> None:
        """Make the rows of a completed checkpoint visible.

        The log entry is won, so this has to happen. If storage refuses, the run fails and its restart publishes them.
        """
        files = list(files)
        for attempt in range(PUBLISH_TRIES):
            try:
                for sink, storage in self._sinks.items():
                    publish(storage, [file for file in files if file.sink == sink])
                return
            except StorageError as error:
                if attempt == PUBLISH_TRIES - 1:
                    raise
                log.warning("job %s: publishing failed and is tried again: %s", self._paths.job, error)
                self._sleep(0.2 * 2**attempt)

    def delete_files(self, handles: Iterable[FileHandle]) -> None:
        """Delete files that no checkpoint needs. A failure leaves the files behind and is only logged."""
        self._try_to_delete([handle.path for handle in handles])

    def delete_metadata(self, checkpoint_ids: Iterable[int]) -> None:
        """Delete the metadata of dropped checkpoints. A failure leaves it behind and is only logged."""
        self._try_to_delete([self._paths.metadata(dropped) for dropped in checkpoint_ids])

    def _try_to_delete(self, paths: list[str]) -> None:
        if not paths:
            return
        try:
            delete_files(self._storage, paths)
        except StorageError as error:
            log.warning("job %s: could not delete %d files: %s", self._paths.job, len(paths), error)

    def delete_all(self, dropped: Iterable[int], handles: Iterable[FileHandle]) -> None:
        """Delete every checkpoint of the job. Raises `FencedError` if another driver has taken the job over.

        The log entry comes first: after it no driver goes on from a checkpoint that is being deleted.
        """
        self._job_log.forget_all()
        self.delete_files(handles)
        self._storage.delete([self._paths.metadata(number) for number in dropped])

    def check_not_fenced(self) -> None:
        """Raises `FencedError` if another driver has taken the job over."""
        self._job_log.check_not_fenced()
