"""Taking a job over: what it goes on from, known to be whole and to fit before anybody is fenced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strandline.checkpoint.metadata import CheckpointMetadata, all_files, decode
from strandline.checkpoint.restore import check_compatible
from strandline.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    IncompatibleCheckpointError,
    NotFoundError,
)
from strandline.operators.base import Operator
from strandline.runtime.joblog import JobLogStore
from strandline.runtime.parquet_files import check_sink, recover_sink
from strandline.runtime.rebuild import check_states
from strandline.storage import JobPaths, Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """A job in the hands of this driver, at the beginning of a generation."""

    storage: Storage
    paths: JobPaths
    store: JobLogStore
    sinks: Mapping[str, Storage]
    restored: CheckpointMetadata | None
    """The checkpoint that the generation goes on from; None if the job begins."""

    @property
    def generation(self) -> int:
        return self.store.log.generation

    @property
    def restored_batch(self) -> int:
        """The last batch that the restored checkpoint covers, -1 without one."""
        return self.restored.batch_id if self.restored is not None else -1

    @property
    def restored_path(self) -> str | None:
        latest = self.store.log.latest
        return f"{self.storage.url}/{latest.metadata_path}" if latest is not None else None

    def first_checkpoint_id(self) -> int:
        """Above every completed checkpoint, and every folder that exists: a fenced driver may have left one behind."""
        found = (self.paths.parse_metadata(file.path) for file in self.storage.list(self.paths.root))
        highest = max((number for number in found if number is not None), default=0)
        return max(self.store.log.next_checkpoint_id, highest + 1)

    def retained(self) -> list[CheckpointMetadata]:
        """All retained checkpoints that can be read."""
        kept = [self.restored] if self.restored is not None else []
        others = [number for number in self.store.log.retained if not kept or number != kept[0].checkpoint_id]
        return kept + [metadata for number in others for metadata in self._older(number)]

    def dropped(self) -> list[CheckpointMetadata]:
        """Checkpoints that the last completion dropped, and whose deletion did not come to its end."""
        there = [number for number in self.store.log.dropped if self.storage.exists(self.paths.metadata(number))]
        return [metadata for number in there for metadata in self._older(number)]

    def _older(self, number: int) -> list[CheckpointMetadata]:
        """A checkpoint that the job does not start from: if it cannot be read, nothing depends on it.

        Its files stay, for nobody knows them.
        """
        try:
            return [read_metadata(self.storage, self.paths.metadata(number))]
        except CheckpointError as error:
            log.warning("job %s: checkpoint %d is not retained any more: %s", self.paths.job, number, error)
            return []


def take_over(
    job: str,
    storage: Storage,
    sinks: Mapping[str, Storage],
    operators: Sequence[Operator],
    parallelism: int,
    max_parallelism: int,
    after: int | None,
) -> Claim:
    """Begin a generation, and bring the sinks to what its checkpoint says.

    `after` is the generation that this driver ran last, if it is a restart; see `JobLogStore.take_over`.

    Nothing is taken over, and nobody is fenced, when the checkpoint or a sink's folder does not fit the job.
    """
    paths = JobPaths(job)
    store = JobLogStore(storage, paths)

    def latest() -> CheckpointMetadata | None:
        found = _read_latest(storage, paths, store)
        if found is not None:
            check_compatible(found, job, [operator.uid for operator in operators], parallelism, max_parallelism)
            for operator in operators:
                for state in found.subtasks:
                    if state.operator == operator.uid:
                        check_states(operator, state)
            _check_files(storage, paths, found)
        for path, sink in sinks.items():
            check_sink(sink, path, job, found)
        return found

    store.load()
    while True:
        position = store.log.position
        try:
            latest()
            break
        except CheckpointError:
            # A run that is alive may have completed a checkpoint since, and deleted the one that was looked at.
            if store.load().position == position:
                raise
    store.take_over(after)
    claim = Claim(storage, paths, store, sinks, latest())
    for path, sink in sinks.items():
        recover_sink(sink, path, job, claim.restored)
    return claim


def read_metadata(storage: Storage, path: str) -> CheckpointMetadata:
    """The metadata of a checkpoint. Raises `MetadataError` if damaged, `CheckpointNotFoundError` if it is gone."""
    where = f"{storage.url}/{path}"
    try:
        return decode(storage.read(path), where)
    except NotFoundError as error:
        raise CheckpointNotFoundError(
            f"{where} is missing, though the job's log names it as a completed checkpoint. Bring the file back; or, to "
            "begin anew without its state, use another job name or empty the job's folder."
        ) from error


def _read_latest(storage: Storage, paths: JobPaths, store: JobLogStore) -> CheckpointMetadata | None:
    latest = store.log.latest
    if latest is None:
        return None
    if latest.metadata_path != paths.metadata(latest.checkpoint_id):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{paths.root} belongs to another job, not to job {paths.job!r}: its log names "
            f"{latest.metadata_path!r} as the newest checkpoint. Start the job under the name it had, with its folder "
            "where it was; or use a name that has no folder yet."
        )
    return read_metadata(storage, latest.metadata_path)


def _check_files(storage: Storage, paths: JobPaths, metadata: CheckpointMetadata) -> None:
    """Raise `DamagedFileError` unless every file of the checkpoint is there with its size; slots check the content."""
    sizes = {file.path: file.size for file in storage.list(paths.root)}
    for state, file in all_files(metadata):
        if file.handle is None or sizes.get(file.handle.path) == file.handle.size:
            continue
        found = sizes.get(file.handle.path)
        what = "is missing" if found is None else f"has {found} bytes instead of {file.handle.size}"
        raise DamagedFileError(
            f"job {metadata.job}, operator {state.operator}, subtask {state.subtask}: {storage.url}/{file.handle.path} "
            f"{what}, and checkpoint {metadata.checkpoint_id} needs it. Bring the file back; or, to begin anew without "
            "the state, use another job name or empty the job's folder."
        )
