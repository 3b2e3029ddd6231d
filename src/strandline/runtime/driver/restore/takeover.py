"""Takes a job over: chooses the checkpoint to restore, checks it, and only then fences other drivers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec

from strandline.checkpoint.job_log import CheckpointRef, JobLog, Start
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, all_files, file_paths, source_files
from strandline.checkpoint.restore import check_compatible, left_out
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
from strandline.runtime.driver.restore.epoch_rows import Stagers, check_rows_have_sinks, stage_rows
from strandline.runtime.driver.restore.former_sinks import check_former_sinks, publish_for_former_sinks
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata, read_referenced
from strandline.runtime.driver.restore.later_sink_files import named_by_newer
from strandline.runtime.driver.restore.merged_checkpoint import MergedCheckpoint
from strandline.runtime.driver.restore.savepoints import METADATA, open_savepoint
from strandline.runtime.protocol.messages import StorageSettings
from strandline.sinks.base import SinkStart, SinkTakeover, SinkTarget
from strandline.sinks.names import check_names
from strandline.sinks.positions import without_positions
from strandline.state.descriptors import StateDescriptor
from strandline.storage import JobPaths, Storage, is_local, open_storage
from strandline.storage.external import list_files, resolve
from strandline.storage.retries import Retries

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


@dataclass(frozen=True, slots=True)
class Claim:
    """What a driver has after it took a job over, at the beginning of a generation."""

    storage: Storage
    paths: JobPaths
    store: JobLogStore
    sinks: Mapping[str, SinkTarget]
    restored: CheckpointMetadata | None
    """The checkpoint that the generation restores; None if the job begins without state."""
    origin: StorageSettings | None = None
    """Where the files of the restored checkpoint are, if not in the job's own storage."""
    others: tuple[str, ...] = ()
    """As in `Wanted`."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """What the metadata of every checkpoint of the generation contains: its owner, and what the user had restored."""

    @property
    def generation(self) -> int:
        return self.store.job_log.generation

    @property
    def owned(self) -> bool:
        """Whether the restored checkpoint belongs to the job, so that the next checkpoint may refer to its files."""
        latest = self.store.job_log.latest
        return latest is None or latest.ours

    @property
    def restored_batch(self) -> int:
        """The last batch that the restored checkpoint covers; -1 if nothing is restored."""
        return self.restored.batch_id if self.restored is not None else -1

    @property
    def restored_path(self) -> str | None:
        """Where the metadata of the restored checkpoint is; None if nothing is restored."""
        latest = self.store.job_log.latest
        return f"{latest.origin or self.storage.url}/{latest.metadata_path}" if latest is not None else None

    def check_not_fenced(self, sink: SinkTarget) -> None:
        """Raise `FencedError` if another driver has taken the job over, or the target of the sink."""
        self.store.check_not_fenced()
        sink.check_still_ours(self.store.job_log)

    def first_checkpoint_id(self) -> int:
        """An id above those of all completed checkpoints and of all folders that fenced drivers have left."""
        found = (self.paths.parse_metadata(file.path) for file in self.storage.list(self.paths.root))
        highest = max((number for number in found if number is not None), default=0)
        return max(self.store.job_log.next_checkpoint_id, highest + 1)


def take_over(
    storage: Storage,
    settings: StorageSettings,
    wanted: Wanted,
    after: int | None,
    *,
    run: str | None = None,
    on_won: Callable[[int], None] = lambda _generation: None,
    retries: Retries | None = None,
) -> Claim:
    """Begin a generation, and bring the sinks' targets to the state of the restored checkpoint.

    `run` is the id of the run, and `after` the generation that it began last, if it restarts the job; see
    `JobLogStore.try_take_over`. `on_won` is called with the new generation's number as soon as the job's log has it,
    because everything after that may fail and be tried again. If the checkpoint or a sink's target does not fit the
    job, this raises before any driver is fenced.
    """
    paths = JobPaths(wanted.job)
    store = JobLogStore(storage, paths, run=run, retries=retries)
    found, named, epochs = _win_takeover(_Candidates(storage, settings, paths, store, wanted), store, wanted, after)
    on_won(store.job_log.generation)
    claim = _claim(storage, settings, paths, store, wanted, found)
    if found is not None:
        _log_differences(wanted, found)
    for place, sink in wanted.sinks.items():
        store.retries.call(f"job {wanted.job}: claiming {place}", partial(sink.claim, store.job_log))
    if epochs is not None:
        claim = _with_epochs(claim, wanted, epochs)
    restored = _as_sinks_see(claim.restored, wanted.job)
    # Before the sinks are recovered, which deletes staged files: a folder may have been moved, or have a new name.
    if claim.origin is None:  # in a checkpoint from elsewhere, the folders are those of somebody who may still run
        publish_for_former_sinks(restored, wanted.sinks, settings.options)
    for place, sink in wanted.sinks.items():
        takeover = SinkTakeover(
            restored, store.job_log, partial(claim.check_not_fenced, sink), store.retries, tuple(named)
        )
        store.retries.call(f"job {wanted.job}: recovering {place}", partial(sink.recover, takeover))
    return claim


def _with_epochs(claim: Claim, wanted: Wanted, epochs: EpochChain) -> Claim:
    """The claim with the checkpoint that the durable epochs make of the restored one, if there are any.

    Every earlier driver is fenced, and every driver looks at the fence before it believes its epochs durable. So there
    are no others than those that are there now.
    """
    epochs.read_on()
    if claim.restored is None or not epochs.files:
        return claim
    stagers = wanted.stagers()
    check_rows_have_sinks(wanted.job, epochs.rows, stagers, allow_non_restored=wanted.allow_non_restored)
    # Under the last batch, which is later than all that the sinks have.
    files = stage_rows(wanted.job, epochs.rows, stagers, epochs.files[-1].entry.batch, claim.store.retries)
    merged = MergedCheckpoint(claim.storage, claim.paths, claim.store, wanted.others, wanted.num_retained)
    number = claim.store.retries.call(f"job {wanted.job}: listing checkpoints", claim.first_checkpoint_id)
    return replace(claim, restored=merged.complete(claim.restored, epochs, files, number, claim.properties))


def _win_takeover(
    candidates: _Candidates, store: JobLogStore, wanted: Wanted, after: int | None
) -> tuple[CheckpointMetadata | None, list[SinkFile], EpochChain | None]:
    """Choose a checkpoint, check it and the sinks against the job, and enter the takeover into the job's log.

    Returns the checkpoint, the sink files that are known to be later if the job goes back to it, and the epochs behind
    it, as far as they were there.
    """
    store.load()
    while True:
        position = store.job_log.position
        try:
            start, found = candidates.choose()
            restored = _as_sinks_see(found, wanted.job)
            repeat_rows = wanted.restore is not None and wanted.restore.repeat_rows
            sink_start = SinkStart(
                restored, store.job_log, store.retries, start.takes_sinks, repeat_rows, reached=after is not None
            )
            if not wanted.allow_non_restored:
                check_former_sinks(restored, wanted.sinks, candidates.storage, candidates.options)
            seen = [sink.check(sink_start) for sink in wanted.sinks.values()]
            named = candidates.later_sink_files(start, restored) if wanted.sinks else []
            epochs = candidates.epochs(start, found)
        except CheckpointError:
            # A running driver may have completed a checkpoint meanwhile, and deleted the one that was checked.
            if store.load().position == position:
                raise
            continue
        # The sinks may know newer generations than the log, for instance if the job goes on from a savepoint and its
        # old checkpoint directory is lost. Only files of earlier generations are withdrawn.
        start = replace(start, generation_above=max(start.generation_above, *seen, 0))
        if store.try_take_over(start, after):
            return found, named, epochs
        store.load()


def _claim(
    storage: Storage,
    settings: StorageSettings,
    paths: JobPaths,
    store: JobLogStore,
    wanted: Wanted,
    found: CheckpointMetadata | None,
) -> Claim:
    latest = store.job_log.latest
    properties = {"owner": wanted.job}
    if wanted.restore is not None and latest is not None:
        properties["restored_from"] = f"{latest.origin or storage.url}/{latest.metadata_path}"
        properties["claim_mode"] = wanted.restore.claim_mode
    origin = latest.origin if latest is not None else None
    return Claim(
        storage,
        paths,
        store,
        wanted.sinks,
        found,
        StorageSettings(origin, settings.options) if origin is not None else None,
        wanted.others,
        properties,
    )


class _Candidates:
    """The checkpoints that a job could restore. Each is read and checked before it is chosen."""

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
        _check_files(storage, metadata)

    def _declared(self, operator: Operator) -> list[StateDescriptor]:
        """The states that an operator declares. Cached, because the answer may need the user's code to run."""
        if operator.uid not in self._states:
            self._states[operator.uid] = operator.check()
        return self._states[operator.uid]


def _exists(storage: Storage, path: str) -> bool:
    holder, inside = resolve(storage, path)
    return holder.exists(inside)


def _check_files(storage: Storage, metadata: CheckpointMetadata) -> None:
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


def _log_differences(wanted: Wanted, metadata: CheckpointMetadata) -> None:
    what = f"job {wanted.job}: checkpoint {metadata.checkpoint_id}"
    for uid in left_out(metadata, wanted.uids):
        log.warning("%s has state of step %s, which the job does not have; the state is dropped", what, uid)
    for uid in wanted.uids:
        if uid not in metadata.operators:
            log.info("%s has no state of step %s, which begins empty", what, uid)


def _as_sinks_see(metadata: CheckpointMetadata | None, job: str) -> CheckpointMetadata | None:
    """The restored checkpoint without notes on sinks if it comes from another job, whose rows are not in our sinks."""
    if metadata is None or metadata.job == job:
        return metadata
    return msgspec.structs.replace(metadata, sink_files=(), properties=without_positions(metadata.properties))


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
