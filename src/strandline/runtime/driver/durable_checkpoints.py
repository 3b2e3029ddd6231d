"""The checkpoints of a job in durable storage: written, entered into the job's log, deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, encode
from strandline.errors import AlreadyExistsError, CheckpointError, FencedError, StorageError
from strandline.runtime.driver.restore.epoch_log import epochs_of_no_checkpoint
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)

MOST_LEFT_OVER = 100_000
"""How many files wait at most until they can be deleted. What is beyond that is left to `strandline gc`."""


class MetadataTakenError(CheckpointError):
    """Another driver has written a checkpoint with this id. A checkpoint with another id can succeed."""


class DurableCheckpoints:
    """Carries out the steps of a completion in storage. `Checkpoints` calls them, in order.

    Steps that must happen are tried several times. Deleting is never urgent: what cannot be deleted is deleted later.
    """

    def __init__(self, claim: Claim) -> None:
        self._retries = claim.store.retries
        self._job_log = claim.store
        self._storage = claim.storage
        self._paths = claim.paths
        self._others = claim.others
        self._deleting = threading.Lock()
        self._left_over: list[str] = []
        """Files that could not be deleted yet."""

    def hurry(self) -> None:
        """The generation ends: do not pause between tries any more."""
        self._retries.hurry()

    def location(self, checkpoint_id: int) -> str:
        """Where the metadata of a checkpoint is, as a user would write it."""
        return f"{self._storage.url}/{self._paths.metadata(checkpoint_id)}"

    def write_metadata(self, metadata: CheckpointMetadata) -> None:
        """Create `_metadata`. May be repeated with the same metadata.

        Raises `FencedError` if another driver has taken the job over. Raises `MetadataTakenError` if a driver that was
        taken over and does not know it has written a checkpoint with this id. Its file is not replaced: whether this
        driver is still the newest cannot be known at the moment of the write.
        """
        path, data = self._paths.metadata(metadata.checkpoint_id), encode(metadata)

        def attempt() -> None:
            # Otherwise a driver that was taken over could put its file where the user has deleted a checkpoint.
            self.check_not_fenced()
            try:
                self._storage.create(path, data)
            except AlreadyExistsError:
                if self._storage.read(path) != data:
                    raise MetadataTakenError(f"{self._storage.url}/{path} was written by another driver") from None

        self._retries.call(f"job {self._paths.job}: writing {path}", attempt)

    def win_log_entry(self, plan: CompletionPlan) -> None:
        """Win the next entry of the job's log: from then on the checkpoint exists.

        Raises `FencedError`, or `UnknownOutcomeError` if storage does not say whether the entry was written.
        """
        number = plan.metadata.checkpoint_id
        self._job_log.complete(
            number, self._paths.metadata(number), plan.metadata.batch_id, plan.retained, plan.dropped
        )

    def tidy_up(self, handles: Iterable[FileHandle], dropped: Iterable[int] = ()) -> None:
        """Delete files that no checkpoint needs, and then the metadata of dropped checkpoints.

        A failure is only logged, and the files are deleted with the next ones. A driver that was taken over deletes
        nothing.
        """
        doomed = [handle.path for handle in handles] + [self._paths.metadata(number) for number in dropped]
        if not doomed:
            return
        with self._deleting:
            doomed, self._left_over = self._left_over + doomed, []
        try:
            self.check_not_fenced()
            metadata = [path for path in doomed if self._paths.parse_metadata(path) is not None]
            delete_files(self._storage, [path for path in doomed if self._paths.parse_metadata(path) is None])
            self._storage.delete(metadata)
        except FencedError as error:
            log.warning("job %s: %d files are left to the other driver: %s", self._paths.job, len(doomed), error)
        except StorageError as error:
            log.warning("job %s: %d files are deleted later: %s", self._paths.job, len(doomed), error)
            with self._deleting:
                self._left_over = (self._left_over + doomed)[-MOST_LEFT_OVER:]

    def delete_all(self, dropped: Iterable[int], handles: Iterable[FileHandle]) -> None:
        """Delete every checkpoint of the job, and its epochs.

        Raises `FencedError` if another driver has taken the job over.

        The log entry comes first: after it no driver goes on from a checkpoint that is being deleted. The next start
        deletes what cannot be deleted now.
        """
        self._job_log.forget_all()
        doomed = list(handles)
        try:
            doomed += epochs_of_no_checkpoint(self._storage, self._paths, self._job_log, self._others)
        except (CheckpointError, StorageError) as error:
            log.warning("job %s: the files of its epochs are left to the next start: %s", self._paths.job, error)
        self.tidy_up(doomed, dropped)

    def check_not_fenced(self) -> None:
        """Raises `FencedError` if another driver has taken the job over."""
        self._job_log.check_not_fenced()
