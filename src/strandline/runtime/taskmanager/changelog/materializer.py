"""Materializes the state of slots: uploads the state itself, so that the changelog before it can be truncated."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointError, StrandlineError
from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.taskmanager.changelog.files import SubtaskFiles
from strandline.runtime.taskmanager.changelog.shared import Shared
from strandline.runtime.taskmanager.changelog.tuning import ChangelogTuning
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.storage import Storage

log = logging.getLogger(__name__)


class FrozenSlots(Protocol):
    """How the changelog reaches the slots."""

    def freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        """Freeze the state of a slot under a number. The returned function waits until its files are on disk."""

    def release(self, index: int, number: int) -> None:
        """Let a frozen state go: its files are not needed any more."""

    def compact(self, index: int) -> None:
        """Make the state of a slot smaller before it is materialized, if it has many deleted entries."""


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A slot's state that is being materialized."""

    index: int
    number: int
    subtasks: dict[str, SubtaskFiles]
    """The files of each operator when the state was frozen."""
    snapshots: Callable[[], list[SubtaskSnapshot]]
    """Waits until the files of the state are on disk."""


@dataclass(slots=True)
class MaterializationFigures:
    """What materializations cost so far."""

    materializations: int = 0
    failed_materializations: int = 0
    early_materializations: int = 0
    last_materialization_ms: float = 0.0
    materialized_bytes: int = 0


class Materializer:
    """Decides when a slot is materialized, and does it. One slot at a time is uploaded."""

    def __init__(
        self,
        shared: Shared,
        storage: Storage,
        uploader: SnapshotUploader,
        slots: FrozenSlots,
        *,
        interval: float,
        max_amplification: float,
        tuning: ChangelogTuning,
    ) -> None:
        """Materialize every slot each `interval` seconds.

        A slot is materialized earlier when state and segments together are more than `max_amplification` times as large
        as the state.
        """
        self.figures = MaterializationFigures()
        self._shared = shared
        self._lock = shared.lock
        self._storage = storage
        self._uploader = uploader
        self._slots = slots
        self._interval = interval
        self._max_amplification = max_amplification
        self._tuning = tuning
        self._due: dict[int, float] = {}
        """When each slot is materialized next."""
        self._rest_until: dict[int, float] = {}
        """Slots whose materialization failed: until then, large segments are no reason to try again."""
        self._last_number = 0
        self._reserved = 0
        """For how many checkpoints state is frozen that is not uploaded yet. The shared lock protects it."""
        self._freezing = threading.Lock()
        """Held while the upkeep freezes a state. Taken before the shared lock, and before any slot is asked."""
        self._uploading = threading.Lock()
        """Held during an upload. Whoever holds it may take the shared lock, never the other way round."""

    # --- when ----------------------------------------------------------------------------------------

    def schedule(self, spec: SlotSpec) -> None:
        """Plan the first materialization of a slot that has come up. The caller holds the lock."""
        # The subtasks are spread over the interval, so that they do not all upload at once.
        first = time.monotonic() + self._interval * (spec.index + 1) / spec.parallelism
        self._due.setdefault(spec.index, first)
        self._rest_until.pop(spec.index, None)

    def clear(self) -> None:
        """Forget all slots: the generation ends. The caller holds the lock."""
        self._due.clear()
        self._rest_until.clear()

    def materialize_due(self) -> bool:
        """Materialize the slot whose turn it is; False if it is nobody's turn. A failure is logged."""
        with self._lock:
            index = self._next_due()
        if index is None:
            return False
        try:
            self.materialize(index)
        except Exception as error:  # whatever it is, the thread must go on
            # Checkpoints go on with the longer changelog.
            self.figures.failed_materializations += 1
            with self._lock:
                self._rest_until[index] = time.monotonic() + self._tuning.rest
            unknown = not isinstance(error, (StrandlineError, OSError))
            log.warning("slot %d could not be materialized: %s", index, error, exc_info=unknown)
        return True

    def _next_due(self) -> int | None:
        """The slot whose time has come, or whose segments have become too large for its state."""
        now = time.monotonic()
        for index in sorted(self._shared.slots, key=self._due.__getitem__):
            if self._due[index] <= now:
                return index
            if self._rest_until.get(index, 0.0) <= now and any(map(self._too_large, self._subtasks(index).values())):
                self.figures.early_materializations += 1
                return index
        return None

    def _too_large(self, known: SubtaskFiles) -> bool:
        allowed = max(self._tuning.early_bytes, (self._max_amplification - 1) * known.base_bytes)
        return known.segment_bytes > allowed

    def _subtasks(self, index: int) -> dict[str, SubtaskFiles]:
        operators = self._shared.slots[index].spec.operators
        return {operator.uid: self._shared.files[operator.uid, index] for operator in operators}

    # --- how -----------------------------------------------------------------------------------------

    def materialize(self, index: int) -> None:
        """Upload a slot's state and truncate its changelog; nothing happens if nothing changed.

        Raises whatever prevents it: `StorageError`, `SlotLostError`, or `CheckpointError`.
        """
        with self._lock:
            if index not in self._shared.slots:
                return
            self._due[index] = time.monotonic() + self._interval
            if all(known.base is not None and not known.segments for known in self._subtasks(index).values()):
                return
        self._slots.compact(index)
        with self._freezing:
            with self._lock:
                if self._reserved:
                    return  # a checkpoint has frozen an older state: it could not use that behind a newer one
            frozen = self.freeze(index)
        try:
            self.upload(frozen)
        finally:
            self.release([frozen])

    def freeze_for_checkpoint(self, indexes: Iterable[int]) -> tuple[FrozenState, ...]:
        """Freeze the states of some slots for a checkpoint that waits for their upload; see `release_checkpoint`.

        Until then nobody else materializes a state: one that is newer would make the frozen ones useless.
        """
        wanted = tuple(indexes)
        if not wanted:
            return ()
        frozen: list[FrozenState] = []
        with self._freezing, self._lock:
            self._reserved += 1
        try:
            for index in wanted:
                frozen.append(self.freeze(index))
        except BaseException:
            self.release_checkpoint(frozen, reserved=True)
            raise
        return tuple(frozen)

    def release_checkpoint(self, frozen: Sequence[FrozenState], *, reserved: bool = False) -> None:
        """Let the states go that were frozen for a checkpoint. `reserved`: there may be none, because one failed."""
        if frozen or reserved:
            with self._lock:
                self._reserved -= 1
        self.release(frozen)

    def freeze(self, index: int) -> FrozenState:
        """Freeze a slot's state as it is now. Whoever calls it must call `release`."""
        with self._lock:
            if index not in self._shared.slots:
                raise CheckpointError(f"slot {index} is not here any more")
            subtasks = self._subtasks(index)
            # Numbers grow even if somebody sets the clock back: slots keep the snapshot with the greatest one.
            number = self._last_number = max(self._last_number + 1, time.time_ns() // 1000)
        return FrozenState(index, number, subtasks, self._slots.freeze(index, number))

    def upload(self, frozen: FrozenState, *, full: bool = False) -> list[SubtaskAck]:
        """Upload a frozen state and truncate the changelog before it. With `full`, all files are uploaded anew.

        Raises `CheckpointError`, and deletes what was uploaded, if the changelog cannot use the state any more.
        """
        started = time.monotonic()
        with self._uploading:
            try:
                snapshots = frozen.snapshots()
                acks = self._uploader.upload(frozen.number, snapshots, lasting=True, full=full)
                states = [
                    (frozen.subtasks[ack.state.operator], ack.state, snapshot.report.batch)
                    for snapshot, ack in zip(snapshots, acks, strict=True)
                ]
                with self._lock:
                    used = self._shared.files.materialized(states)
                    if used:
                        self._uploader.completed(frozen.number, {})
                        self._shared.forget_local()
            finally:
                self._uploader.aborted(frozen.number)
        if not used:
            delete_unneeded(self._storage, {handle.path for ack in acks for handle in ack.uploaded})
            raise CheckpointError(f"slot {frozen.index} was started anew while its state was materialized")
        self.figures.materializations += 1
        self.figures.materialized_bytes += sum(ack.checkpointed_bytes for ack in acks)
        self.figures.last_materialization_ms = (time.monotonic() - started) * 1000
        return acks

    def release(self, frozen: Iterable[FrozenState]) -> None:
        """Let frozen states go."""
        for state in frozen:
            self._slots.release(state.index, state.number)
