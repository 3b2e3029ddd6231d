"""Makes checkpoints durable in the background, and tells the driver how that ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.liveness.threads import BackgroundThread, OnFailure
from strandline.runtime.protocol.coordinator_calls import Acknowledgement, CoordinatorCalls, Decline
from strandline.runtime.protocol.taskmanager_calls import SlotAnswers
from strandline.runtime.taskmanager.slot_processes import SlotProcess, SlotProcesses
from strandline.runtime.taskmanager.snapshot_uploads import SubtaskSnapshot

log = logging.getLogger(__name__)

Upload = Callable[[list[SubtaskSnapshot]], list[SubtaskAck]]
"""Makes snapshots durable."""


class BackgroundUploads:
    """Every checkpoint and savepoint has a thread of its own."""

    def __init__(
        self, slots: SlotProcesses, coordinator: CoordinatorCalls, identity: str, on_failure: OnFailure
    ) -> None:
        """`identity` names the task manager in messages. `on_failure` gets the error of a thread that has died."""
        self._on_failure = on_failure
        self._slots = slots
        self._coordinator = coordinator
        self._identity = identity

    def start_upload(self, frozen: SlotAnswers[None], checkpoint_id: int, upload: Upload) -> None:
        """Upload what slots froze. `frozen` has the answers of the slots."""
        slots = [slot for index in frozen.values if (slot := self._slots.get(index)) is not None]
        if slots:
            self._start(checkpoint_id, lambda: self.upload(slots, checkpoint_id, time.time(), upload))

    def upload(self, slots: Sequence[SlotProcess], checkpoint_id: int, barrier_time: float, upload: Upload) -> None:
        """Upload what `slots` froze, and report it."""

        def uploaded() -> list[SubtaskAck]:
            reported = self._slots.pool.map(lambda slot: slot.snapshots(checkpoint_id, barrier_time), slots)
            return upload([snapshot for snapshots in reported for snapshot in snapshots])

        try:
            self.report(slots[0].spec.generation, checkpoint_id, uploaded)
        finally:
            for slot in slots:
                slot.release(checkpoint_id)

    def start_report(self, generation: int, checkpoint_id: int, work: Callable[[], list[SubtaskAck]]) -> None:
        """Do the rest of a checkpoint's work, and report it."""
        self._start(checkpoint_id, lambda: self.report(generation, checkpoint_id, work))

    def _start(self, checkpoint_id: int, work: Callable[[], None]) -> None:
        BackgroundThread(f"checkpoint-{checkpoint_id}", work, self._on_failure).start()

    def report(self, generation: int, checkpoint_id: int, work: Callable[[], list[SubtaskAck]]) -> None:
        """Acknowledge each subtask for which `work` returns; decline once for all of them if it fails."""
        try:
            try:
                for ack in work():
                    self._coordinator.acknowledge(Acknowledgement(generation, checkpoint_id, ack))
            except Exception as error:  # whatever it is, the checkpoint cannot complete
                unknown = not isinstance(error, (StrandlineError, OSError))
                log.warning("checkpoint %d: %s", checkpoint_id, error, exc_info=unknown)
                what = f"{type(error).__name__}: {error}" if unknown else str(error)
                reason = f"task manager {self._identity}: {what}"
                self._coordinator.decline(Decline(generation, checkpoint_id, reason, isinstance(error, SlotLostError)))
        except StrandlineError as error:
            # The driver cannot be reached: the checkpoint times out there.
            log.warning("checkpoint %d: %s", checkpoint_id, error)
