"""Fills the registry of a new generation with every checkpoint that anybody may restore, then deletes what was dropped.

Three kinds of checkpoints can be restored: those that the job retains, those that were released to the user, and the
one that the generation restores. A file that one of them needs is never deleted, whatever else is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from strandline.checkpoint.coordinator import CheckpointCoordinator
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle
from strandline.errors import CheckpointError, CheckpointNotFoundError, StorageError
from strandline.runtime.driver.restore.job_log import read_metadata
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)


def recover_registry(coordinator: CheckpointCoordinator, claim: Claim) -> None:
    """Tell the coordinator of all checkpoints in the job's folder, and delete what an earlier driver could not delete.

    A deletion that fails is only logged. The next start tries again, or `gc` does. Raises `FencedError`, and deletes
    nothing, if another driver has taken the job over.
    """
    found = _Checkpoints(claim)
    leftovers = coordinator.recover(found.retained(), found.dropped(), found.held())
    if found.unreadable:
        # Its files are unknown. Any file that exists now may be one of them; gc deletes the rest once it is readable.
        coordinator.registry.hold_all()
        return
    leftovers = (*leftovers, *_old_epochs(coordinator, claim))
    if leftovers or found.to_delete:
        claim.store.check_not_fenced()
    try:
        delete_files(claim.storage, [handle.path for handle in leftovers])
        claim.storage.delete([claim.paths.metadata(number) for number in found.to_delete])
    except StorageError as error:
        log.warning("job %s: files of dropped checkpoints could not be deleted: %s", claim.paths.job, error)


def _old_epochs(coordinator: CheckpointCoordinator, claim: Claim) -> tuple[FileHandle, ...]:
    """The files of epochs of earlier generations that no checkpoint names.

    The takeover has read those that extended the newest checkpoint. A driver that was taken over may still write one,
    but has learnt that it is fenced before it believes it durable.
    """
    try:
        listed = list(claim.storage.list(claim.paths.epochs_dir))
    except StorageError as error:
        log.warning("job %s: epochs of earlier generations are deleted later: %s", claim.paths.job, error)
        return ()
    parsed = [(file, claim.paths.parse_epochs(file.path)) for file in listed]
    old = [FileHandle(file.path, file.size, "") for file, name in parsed if name and name[0] < claim.generation]
    return coordinator.registry.unused(old)


class _Checkpoints:
    """Reads the checkpoints of the job's folder, one at a time, so that only one is in memory."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self.to_delete: list[int] = []
        """The dropped checkpoints whose metadata is still there."""
        self.unreadable: list[int] = []
        """Checkpoints whose metadata is damaged, refused, or of a newer release. It may become readable later."""

    def retained(self) -> Iterator[CheckpointMetadata]:
        """The retained checkpoints. One that cannot be read is not retained any more."""
        claim = self._claim
        for number in claim.store.job_log.retained:
            if claim.owned and claim.restored is not None and number == claim.restored.checkpoint_id:
                yield claim.restored
            else:
                yield from self._read(number, "is not retained any more")

    def held(self) -> Iterator[CheckpointMetadata]:
        """The checkpoints that belong to somebody else."""
        claim = self._claim
        if claim.restored is not None and not claim.owned:
            yield claim.restored
        for number in claim.store.released():
            yield from self._read(number, "was released to the user, and cannot be read")

    def dropped(self) -> Iterator[CheckpointMetadata]:
        """The checkpoints that the last completion dropped and whose deletion was not finished."""
        claim = self._claim
        for number in claim.store.job_log.dropped:
            if claim.storage.exists(claim.paths.metadata(number)):
                for metadata in self._read(number, "was dropped, and its files stay until gc deletes them"):
                    self.to_delete.append(number)
                    yield metadata

    def _read(self, number: int, otherwise: str) -> Iterator[CheckpointMetadata]:
        claim = self._claim
        try:
            metadata = read_metadata(claim.storage, claim.paths, number, claim.others)
        except CheckpointError as error:
            log.warning("job %s: checkpoint %d %s: %s", claim.paths.job, number, otherwise, error)
            if not isinstance(error, CheckpointNotFoundError) and number not in claim.store.job_log.dropped:
                self.unreadable.append(number)
            return
        yield metadata
