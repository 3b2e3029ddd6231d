"""Takes a job over: chooses the checkpoint to restore, checks it, and only then fences other drivers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.checkpoint.restore import left_out
from strandline.errors import CheckpointError
from strandline.runtime.driver.restore.candidates import Candidates, ClaimMode, Restore, Wanted
from strandline.runtime.driver.restore.epoch_log import EpochChain
from strandline.runtime.driver.restore.epoch_rows import check_rows_have_sinks, stage_rows
from strandline.runtime.driver.restore.former_sinks import check_former_sinks, publish_for_former_sinks
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.driver.restore.merged_checkpoint import MergedCheckpoint
from strandline.runtime.protocol.messages import StorageSettings
from strandline.sinks.base import SinkStart, SinkTakeover, SinkTarget
from strandline.sinks.positions import without_positions
from strandline.storage import JobPaths, Storage
from strandline.storage.retries import Retries

log = logging.getLogger(__name__)

__all__ = ["Claim", "ClaimMode", "Restore", "Wanted", "take_over"]


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
    found, named, epochs = _win_takeover(Candidates(storage, settings, paths, store, wanted), store, wanted, after)
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
    candidates: Candidates, store: JobLogStore, wanted: Wanted, after: int | None
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
