"""The checkpoints that a job could restore: each is read, and checked against the job, before it is chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from strandline.checkpoint.job_log import CheckpointRef, JobLog, Start
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, all_files, file_paths, source_files
from strandline.checkpoint.restore import check_compatible
from strandline.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    IncompatibleCheckpointError,
    MetadataError,
    NewerFormatError,
)
from strandline.operators.base import Operator
from strandline.operators.schema_evolution import check_step
from strandline.runtime.driver.restore.epoch_log import EpochChain
from strandline.runtime.driver.restore.epoch_rows import Stagers, check_rows_have_sinks
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata, read_referenced
from strandline.runtime.driver.restore.later_sink_files import named_by_newer
from strandline.runtime.driver.restore.savepoints import METADATA, open_savepoint
from strandline.runtime.protocol.messages import StorageSettings
from strandline.sinks.base import SinkTarget
from strandline.sinks.names import check_names
from strandline.state.descriptors import StateDescriptor
from strandline.storage import JobPaths, Storage, is_local, open_storage
from strandline.storage.external import list_files, resolve

log = logging.getLogger(__name__)

ClaimMode = Literal["no_claim", "claim"]


@dataclass(frozen=True, slots=True)
class Restore:
    """The path of a checkpoint or savepoint that the user wants restored."""

    path: str
    claim_mode: ClaimMode = "no_claim"
    repeat_rows: bool = False
    """Whether sinks that cannot take rows back may write them a second time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The job that takes over, and what it wants restored. A checkpoint must fit this job."""

    job: str
    operators: Sequence[Operator]
    max_parallelism: int
    sinks: Mapping[str, SinkTarget]
    """The targets of the job's exactly-once sinks, by place."""
    can_go_back: bool
    """Whether the job may go back to an older checkpoint by itself; see `SinkTarget`. With a `ForeachBatchSink` it may
    not."""
    restore: Restore | None = None
    allow_non_restored: bool = False
    """Whether restored state that the job does not declare any more may be dropped."""
    others: tuple[str, ...] = ()
    """The roots of other storages that may hold files of the job's checkpoints: `changelog_dir` and `trusted_dirs`."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """The checkpoints of the job that slots found damaged, each with the error."""
    stagers: Callable[[], Stagers] = dict
    """The stagers of the job's exactly-once sinks, for rows of durable epochs that no sink has yet."""
    num_retained: int = 1
    """How many completed checkpoints are kept."""

    @property
    def uids(self) -> list[str]:
        return [operator.uid for operator in self.operators]


class Candidates:
    """The checkpoints that one job could restore now."""

    def __init__(
        self, storage: Storage, settings: StorageSettings, paths: JobPaths, store: JobLogStore, wanted: Wanted
    ) -> None:
        self.storage = storage
        self.options = settings.options
        self._paths = paths
        self._store = store
        self._wanted = wanted
        self._states: dict[str, list[StateDescriptor]] = {}

    def choose(self) -> tuple[Start, CheckpointMetadata | None]:
        """The checkpoint that the generation restores; None if the job has none.

        Raises `CheckpointError` if the job has checkpoints and none can be used.
        """
        if self._wanted.restore is not None:
            start, found = self._named(self._wanted.restore)
            return replace(start, takes_sinks=found.job == self._wanted.job), found
        known = self._store.job_log
        if known.latest is None:
            return known.resume(), None
        try:
            return known.resume(), self._usable(known.latest)
        except NewerFormatError:
            raise
        except (MetadataError, CheckpointNotFoundError, DamagedFileError) as damage:
            return self._older(damage)

    def epochs(self, start: Start, found: CheckpointMetadata | None) -> EpochChain | None:
        """The durable epochs behind the checkpoint, as far as they are there now; None if none belong to the job.

        Most are read here, while an earlier driver may still run: so the job stands still for a shorter time.
        """
        if found is None or not start.epochs:
            return None
        epochs = EpochChain(self.storage, self._paths, self._store, found)
        epochs.read_on()
        if epochs.rows:
            allow = self._wanted.allow_non_restored
            check_rows_have_sinks(self._wanted.job, epochs.rows, self._wanted.stagers(), allow_non_restored=allow)
        return epochs

    def later_sink_files(self, start: Start, restored: CheckpointMetadata | None) -> list[SinkFile]:
        """The sink files that checkpoints of the job name and that have to go, if the job goes back to `restored`."""
        if not self._store.job_log.goes_back(start):
            return []
        return named_by_newer(self.storage, self._paths, self._store.job_log, restored, self._wanted.others)

    def _older(self, damage: CheckpointError) -> tuple[Start, CheckpointMetadata]:
        """The newest retained checkpoint that is not damaged. Raises `damage`, that of the newest, if there is none."""
        known = self._store.job_log
        assert known.latest is not None
        newest = known.latest.checkpoint_id
        older = [number for number in reversed(known.retained) if number < newest]
        if not known.latest.ours or not older:
            raise damage
        if not self._wanted.can_go_back:
            raise type(damage)(
                f"{damage} Checkpoint {older[0]} is still there, but a sink of the job (a ForeachBatchSink, or a "
                "target that only appends) cannot take back the rows that were written after it, so the job does not "
                "go back by itself. If these rows may arrive again, start with "
                f"restore='{self.storage.url}/{self._paths.checkpoint_dir(older[0])}', and with repeat_rows=True if a "
                "target only appends."
            )
        for number in older:
            try:
                metadata = read_metadata(self.storage, self._paths, number, self._wanted.others)
                self._check(self.storage, metadata, any_job=False)
            except (MetadataError, CheckpointNotFoundError, DamagedFileError) as error:
                log.warning("job %s: checkpoint %d cannot be used either: %s", self._paths.job, number, error)
                continue
            log.warning(
                "job %s: checkpoint %d is damaged, so the job goes back to checkpoint %d. Its sinks withdraw the rows "
                "that they published since then, or replace them when they arrive again: %s",
                self._paths.job,
                newest,
                number,
                damage,
            )
            return known.go_back(CheckpointRef(number, self._paths.metadata(number), metadata.batch_id)), metadata
        raise damage

    def _named(self, restore: Restore) -> tuple[Start, CheckpointMetadata]:
        """The checkpoint or savepoint at the path that the user gave."""
        parts = JobPaths.split_checkpoint(restore.path)
        if parts is None:
            return self._savepoint(restore)
        root, paths, number = parts
        storage = self.storage if _same_place(root, self.storage.url) else open_storage(root, self.options)
        path = paths.metadata(number)
        if not storage.exists(path):
            raise CheckpointNotFoundError(
                f"restore={restore.path!r}: {storage.url}/{path} is missing, so there is no completed checkpoint. "
                f"`strandline checkpoints ls {storage.url}/{paths.job}` shows those that are there."
            )
        metadata = read_metadata(storage, paths, number, self._wanted.others)
        self._check(storage, metadata, any_job=True)
        ref = CheckpointRef(number, path, metadata.batch_id)
        if storage is self.storage and paths.job == self._paths.job:
            return self._store.job_log.restore_own(ref, claim=restore.claim_mode == "claim"), metadata
        if restore.claim_mode == "claim":
            raise CheckpointError(
                f"restore={restore.path!r}: claim_mode='claim' is for checkpoints in the job's own folder, "
                f"{self.storage.url}/{self._paths.root}: another job may still use these files, so this job must not "
                "delete them. Use claim_mode='no_claim', and delete the original yourself once the job has a "
                "checkpoint of its own."
            )
        if storage is not self.storage:
            ref = msgspec.structs.replace(ref, origin=storage.url)
        other = _other_log(storage, paths)
        above = max(metadata.generation, other.generation)
        same_job = other if paths.job == self._paths.job else None
        return self._store.job_log.restore_other(ref, above, same_job), metadata

    def _savepoint(self, restore: Restore) -> tuple[Start, CheckpointMetadata]:
        """The savepoint at the path that the user gave."""
        try:
            storage, metadata = open_savepoint(restore.path, self.options)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"restore={restore.path!r} is not the path of a checkpoint or savepoint: give the directory of a "
                "checkpoint (…/<job>/chk-N) or of a savepoint (…/savepoint-<job>-<id>), or the _metadata file in it. "
                "`strandline checkpoints ls CHECKPOINT_DIR` shows the checkpoints that are there."
            ) from error
        if restore.claim_mode == "claim":
            raise CheckpointError(
                f"restore={restore.path!r}: claim_mode='claim' is for checkpoints in the job's own folder; a savepoint "
                "stays yours. Use claim_mode='no_claim', and dispose of it once the job has a checkpoint of its own."
            )
        self._check(storage, metadata, any_job=True)
        ref = CheckpointRef(metadata.checkpoint_id, METADATA, metadata.batch_id, origin=storage.url)
        return self._store.job_log.restore_other(ref, metadata.generation), metadata

    def _usable(self, ref: CheckpointRef) -> CheckpointMetadata:
        if ref.ours and ref.metadata_path != self._paths.metadata(ref.checkpoint_id):
            raise IncompatibleCheckpointError(
                f"{self.storage.url}/{self._paths.root} belongs to another job, not to job {self._paths.job!r}: its "
                f"log names {ref.metadata_path!r} as the newest checkpoint. Start the job under the name it had, with "
                "its folder where it was; or use a name that has no folder yet."
            )
        if ref.ours and ref.checkpoint_id in self._wanted.damaged:
            raise DamagedFileError(self._wanted.damaged[ref.checkpoint_id])
        storage = open_storage(ref.origin, self.options) if ref.origin is not None else self.storage
        metadata = read_referenced(storage, ref, self._wanted.others)
        self._check(storage, metadata, any_job=not ref.ours)
        return metadata

    def _check(self, storage: Storage, metadata: CheckpointMetadata, *, any_job: bool) -> None:
        wanted = self._wanted
        check_compatible(
            metadata,
            wanted.job,
            wanted.uids,
            wanted.max_parallelism,
            any_job,
            wanted.allow_non_restored,
        )
        steps = {step.operator: step for step in metadata.steps}
        for operator in wanted.operators:
            described: list[tuple[dict[str, Any], ...]] = []
            for state in metadata.subtasks:
                # All subtasks of a checkpoint describe their states in the same way, unless it is crafted.
                if state.operator == operator.uid and state.states not in described:
                    described.append(state.states)
                    check_step(
                        operator, self._declared(operator), steps.get(operator.uid), state, wanted.allow_non_restored
                    )
        check_names(metadata)
        check_files(storage, metadata)

    def _declared(self, operator: Operator) -> list[StateDescriptor]:
        """The states that an operator declares. Cached, because the answer may need the user's code to run."""
        if operator.uid not in self._states:
            self._states[operator.uid] = operator.check()
        return self._states[operator.uid]


def _exists(storage: Storage, path: str) -> bool:
    holder, inside = resolve(storage, path)
    return holder.exists(inside)


def check_files(storage: Storage, metadata: CheckpointMetadata) -> None:
    """Raise `DamagedFileError` unless every file of the checkpoint exists with its size. Slots check the content."""
    # A savepoint's storage is its own folder, so its files are at the root.
    root = "" if metadata.kind == "savepoint" else JobPaths(metadata.job).root
    listing = list_files(storage, root, file_paths(metadata))
    sizes = {file.path: file.size for file in listing}
    for state, file in all_files(metadata):
        if file.handle is None or sizes.get(file.handle.path) == file.handle.stored_size:
            continue
        found = sizes.get(file.handle.path)
        if found is None and _exists(storage, file.handle.path):
            continue  # The listing was late.
        what = "is missing" if found is None else f"has {found} bytes instead of {file.handle.stored_size}"
        raise DamagedFileError(
            f"job {metadata.job}, operator {state.operator}, subtask {state.subtask}: {storage.url}/{file.handle.path} "
            f"{what}, and checkpoint {metadata.checkpoint_id} needs it. Bring the file back; or, to begin anew without "
            "the state, use another job name or empty the job's folder."
        )
    for _key, handle in source_files(metadata.source):
        found = sizes.get(handle.path)
        if found != handle.stored_size and (found is not None or not _exists(storage, handle.path)):
            raise DamagedFileError(
                f"job {metadata.job}: {storage.url}/{handle.path}, a part of the list of files that the source has "
                f"read, is missing or has another size than checkpoint {metadata.checkpoint_id} says. Bring the file "
                "back; or, to begin anew without the state, use another job name or empty the job's folder."
            )


def _other_log(storage: Storage, paths: JobPaths) -> JobLog:
    """The log of the job that a checkpoint comes from. It is empty if the log was not copied with the checkpoint."""
    try:
        return JobLogStore(storage, paths).load()
    except CheckpointError:
        return JobLog()


def _same_place(one: str, other: str) -> bool:
    if is_local(one) and is_local(other):
        return os.path.realpath(open_storage(one).url) == os.path.realpath(open_storage(other).url)
    return one.rstrip("/") == other.rstrip("/")
