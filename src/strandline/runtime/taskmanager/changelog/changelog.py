"""The changelog of one task manager: every slot's segments become durable before their batch commits.

A checkpoint has nothing left to upload: it names the files that are durable already. If uploads fail, checkpoints fail
until everything that was committed is durable. The parts with one duty each are `SegmentQueue`, `Materializer` and
`SegmentMerger`; `shared` says how they share a lock, and which thread runs what.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strandline.checkpoint.metadata import StateFile, last_batch
from strandline.checkpoint.pending import Subtask, SubtaskAck
from strandline.runtime.liveness.threads import BackgroundThread, OnFailure
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.messages import ChangelogSettings, SlotSpec
from strandline.runtime.protocol.taskmanager_calls import DurableSegment
from strandline.runtime.taskmanager.acknowledgement import StateOwner
from strandline.runtime.taskmanager.changelog.local_segments import LocalSegments
from strandline.runtime.taskmanager.changelog.materializer import FrozenSlots, FrozenState, Materializer
from strandline.runtime.taskmanager.changelog.merger import SegmentMerger
from strandline.runtime.taskmanager.changelog.segment_queue import QueuedSegment, SegmentQueue
from strandline.runtime.taskmanager.changelog.segment_uploader import SegmentUploader
from strandline.runtime.taskmanager.changelog.shared import OpenSlot, Shared
from strandline.runtime.taskmanager.changelog.tuning import PRODUCTION, ChangelogTuning
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader
from strandline.storage import JobPaths, Storage, open_storage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Barrier:
    """The barrier of a checkpoint, and what the checkpoint needs that was not durable then."""

    checkpoint_id: int
    time: float
    """Seconds since the epoch."""
    steady_time: float
    """The same moment, by a clock that nobody sets."""
    behind: tuple[QueuedSegment, ...]
    frozen: tuple[FrozenState, ...]
    full: bool = False
    """Whether the checkpoint uploads the whole state."""

    @property
    def durable(self) -> bool:
        """Whether `Changelog.acknowledge` has nothing to wait for."""
        return not self.behind and not self.frozen


class Changelog:
    """Keeps the changelog of a task manager's slots."""

    def __init__(
        self,
        storage: Storage,
        job: str,
        settings: ChangelogSettings,
        snapshots: SnapshotUploader,
        slots: FrozenSlots,
        scratch: Path,
        *,
        copies: LocalCopies | None = None,
        tuning: ChangelogTuning = PRODUCTION,
        on_failure: OnFailure,
    ) -> None:
        """`snapshots` uploads materializations. `copies` keeps every segment on local disk, too.

        `on_failure` gets the error of a thread that has died.
        """
        self._storage = storage
        self._snapshots = snapshots
        self._copies = copies
        self._tuning = tuning
        self._shared = Shared(LocalSegments(scratch, copies))
        self._lock = self._shared.lock
        external = settings.storage is not None
        place = open_storage(settings.storage.url, settings.storage.options) if settings.storage else storage
        self._uploader = SegmentUploader(
            place,
            JobPaths(job),
            settings.upload_timeout,
            settings.upload_attempts,
            external=external,
            retry_delay=tuning.retry_delay,
        )
        self.files = self._shared.files
        self.queue = SegmentQueue(self._shared, storage, self._uploader, settings.max_behind_bytes)
        self.merger = SegmentMerger(self._shared, self.queue, self._uploader, tuning)
        self.materializer = Materializer(
            self._shared,
            storage,
            snapshots,
            slots,
            interval=settings.materialization_interval,
            max_amplification=settings.max_amplification,
            tuning=tuning,
        )
        self._threads = [
            BackgroundThread("segment-upload-loop", self.queue.upload_loop, on_failure),
            BackgroundThread("changelog-upkeep", self._upkeep_loop, on_failure),
        ]

    def start(self) -> None:
        """Start the threads. They end after `close`."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all work at once. Uploaded files stay: the slots may go on with them on another task manager."""
        with self._lock:
            self._shared.closed = True
            self._lock.notify_all()
        self._uploader.close()

    def join(self) -> None:
        """Wait until the threads have ended, after `close`."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """End the run: files that no checkpoint can refer to are deleted."""
        with self._lock:
            unneeded = self._begin_generation(-1)
        delete_unneeded(self._storage, unneeded)

    # --- slots -----------------------------------------------------------------------------------

    def slot_starting(self, spec: SlotSpec) -> None:
        """Prepare for a slot that is about to come up: what its predecessor prepared will never commit."""
        unneeded: list[str] = []
        with self._lock:
            if spec.generation > self._shared.generation:
                unneeded = self._begin_generation(spec.generation)
            # The slot may have died after the decision, and before the commit was heard of here.
            self.queue.commit(spec.decided_batch)
            for operator in spec.operators:
                self.queue.void((operator.uid, spec.index))
        delete_unneeded(self._storage, unneeded)

    def slot_opened(self, spec: SlotSpec, states: dict[str, list[dict[str, Any]]], changed: Container[str]) -> None:
        """Take in a slot that has come up. `states` has the descriptors of each operator's states.

        Operators in `changed` declare their states otherwise than the checkpoint that they were restored from.
        """
        with self._lock:
            self._shared.slots[spec.index] = OpenSlot(spec, {uid: tuple(some) for uid, some in states.items()})
            self.materializer.schedule(spec)
            for operator in spec.operators:
                subtask = (operator.uid, spec.index)
                if subtask not in self.files:
                    self._open(subtask, spec, operator.uid in changed)

    def _open(self, subtask: Subtask, spec: SlotSpec, changed: bool) -> None:
        """Begin the changelog of a subtask, with the restored files if a later checkpoint may build on them."""
        restored = [state for state in spec.restore if state.operator == subtask[0]]
        files = [file for state in restored for file in state.files] if spec.restore_owned else []
        base: list[StateFile] | None = None
        segments: list[StateFile] = []
        whole = spec.restore_owned and not changed and not spec.rescaled
        if whole and (spec.segments_complete or spec.decided_batch == spec.restore_batch):
            base = [file for file in files if not file.is_segment]
            segments = [file for file in files if file.is_segment] + [
                file for uid, file in spec.segments if uid == subtask[0]
            ]
        self.files.open(subtask, base, segments, restored=files)
        self._snapshots.forget([subtask])
        self._snapshots.start_from(subtask, restored, spec.restore_owned)

    def take_in(self, segments: Iterable[DurableSegment]) -> None:
        """Make segments part of the changelog that the driver has made durable. Those that are known are left out."""
        with self._lock:
            for one in segments:
                subtask = (one.operator, one.subtask)
                if subtask in self.files and last_batch(one.file) > self.files.newest(subtask):
                    self.files.take_in(subtask, one.file)
                    self._shared.local.keep(one.file, Path(one.path))

    def _begin_generation(self, generation: int) -> list[str]:
        """Forget the older generation; returns the paths of its files that no checkpoint can refer to."""
        self.queue.clear()
        self.materializer.clear()
        unneeded = self.files.clear()
        self._shared.slots.clear()
        self._shared.forget_local()
        self._shared.generation = generation
        return unneeded

    # --- checkpoints -----------------------------------------------------------------------------

    def barrier(self, checkpoint_id: int, full: bool = False) -> Barrier:
        """Take the barrier of a checkpoint: it names what is committed now, whatever is committed later.

        The caller makes sure that nothing commits meanwhile. Slots with a state that was never materialized are frozen,
        so that `acknowledge` can upload that state. For a `full` checkpoint all slots are.
        """
        with self._lock:
            self.files.barrier(checkpoint_id, full)
            behind = self.queue.behind_at_barrier()
            needed = self.files.subtasks() if full else self.files.without_base()
        frozen = self.materializer.freeze_for_checkpoint(sorted({index for _operator, index in needed}))
        return Barrier(checkpoint_id, time.time(), time.monotonic(), behind, frozen, full)

    def acknowledge(self, barrier: Barrier) -> list[SubtaskAck]:
        """Wait until everything that was committed at the barrier is durable; returns the acknowledgements.

        Raises whatever prevents that: `StorageError`, or `CheckpointError` if the checkpoint was given up meanwhile.
        """
        late = {} if barrier.durable else self._catch_up(barrier)
        with self._lock:
            named = self.files.acknowledge(barrier.checkpoint_id, late)
            acks = []
            for at, entry in enumerate(named.entries):
                operator, index = entry.subtask
                slot = self._shared.slots[index]
                acks.append(
                    StateOwner.in_slot(slot.spec, operator, slot.states.get(operator, ())).acknowledge(
                        entry.files,
                        barrier_time=barrier.time,
                        sync_ms=0.0,
                        async_ms=(time.monotonic() - barrier.steady_time) * 1000,
                        checkpointed_bytes=entry.new_bytes,
                        # One acknowledgement reports for all subtasks of the task manager.
                        beforehand=named.beforehand if at == 0 else (),
                        obsolete=named.obsolete if at == 0 else (),
                    )
                )
            return acks

    def _catch_up(self, barrier: Barrier) -> dict[Subtask, list[StateFile]]:
        """Make durable what was not durable at the barrier; returns the new files of each subtask."""
        late: dict[Subtask, list[StateFile]] = {}
        try:
            with self._lock:
                self.queue.persist(barrier.behind)
                failed = next((segment.error for segment in barrier.behind if segment.error), None)
            if failed is not None:
                raise failed
            for frozen in barrier.frozen:
                for ack in self.materializer.upload(frozen, full=barrier.full):
                    late[ack.state.operator, frozen.index] = list(ack.state.files)
        finally:
            self.materializer.release_checkpoint(barrier.frozen)
        materialized = set(late)
        for segment in barrier.behind:
            if segment.subtask not in materialized and segment.file is not None:
                late.setdefault(segment.subtask, []).append(segment.file)
        return late

    def completed(self, checkpoint_id: int) -> None:
        """Note that a checkpoint is complete."""
        with self._lock:
            lost = self.files.completed(checkpoint_id)
            # Files that these subtasks uploaded may be deleted by now.
            self._snapshots.forget(lost)
        if self._copies is not None:
            self._copies.prune(self._identities)
        if lost:
            log.warning("checkpoint %d names other files of %s: they are materialized anew", checkpoint_id, lost)

    def _identities(self) -> set[str]:
        with self._lock:
            return self.files.identities()

    def aborted(self, checkpoint_id: int) -> None:
        """Note that a checkpoint was given up. The changelog goes on as it is."""
        with self._lock:
            self.files.aborted(checkpoint_id)

    # --- upkeep ----------------------------------------------------------------------------------

    def _upkeep_loop(self) -> None:
        """Materialize slots that are due; merge segments when no slot is due."""
        merge_from = 0.0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._shared.closed, self._tuning.upkeep_interval)
                if self._shared.closed:
                    return
            if not self.materializer.materialize_due() and time.monotonic() >= merge_from:
                merged = self.merger.merge_next()
                merge_from = time.monotonic() + (0.0 if merged else self._tuning.rest)

    def figures(self) -> ChangelogFigures:
        """What the changelog takes up, and what it cost so far."""
        with self._lock:
            subtasks = [self.files[subtask] for subtask in self.files.subtasks()]
            uploads = {f"upload_{name}": value for name, value in asdict(self._uploader.figures).items()}
            return ChangelogFigures(
                wait_ms=self.queue.wait_ms,
                merges=self.merger.merges,
                segments=sum(len(one.segments) for one in subtasks),
                segment_bytes=sum(one.segment_bytes for one in subtasks),
                base_bytes=sum(one.base_bytes for one in subtasks),
                behind_bytes=self.queue.behind_bytes,
                **asdict(self.materializer.figures),
                **uploads,
            )
