"""How a task manager makes the state of its slots durable: one interface, and two strategies behind it.

`SnapshotDurability` uploads the state itself with every checkpoint. `ChangelogDurability` uploads the changes of every
batch before the batch commits, so that a checkpoint only names files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial

from strandline.checkpoint.metadata import FileHandle
from strandline.checkpoint.pending import Subtask, SubtaskAck
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.messages import Sealed, SegmentUpload, SlotSpec
from strandline.runtime.protocol.slot_calls import Freeze, SlotReady
from strandline.runtime.protocol.taskmanager_calls import DurableSegment, SlotAnswers
from strandline.runtime.taskmanager.background_uploads import BackgroundUploads
from strandline.runtime.taskmanager.changelog.changelog import Changelog
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.slot_processes import SlotProcesses
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader


class Durability(ABC):
    """Hears of everything that happens to the slots of a task manager, in the order in which it happens."""

    # --- slots -----------------------------------------------------------------------------------

    @abstractmethod
    def slot_starting(self, spec: SlotSpec) -> None:
        """A slot is about to come up. Its predecessor on this task manager has ended."""

    @abstractmethod
    def slot_opened(self, spec: SlotSpec, ready: SlotReady) -> None:
        """A slot has come up and holds its state."""

    @abstractmethod
    def end(self) -> None:
        """The run ends, and all slots have stopped: uploaded files that no checkpoint can refer to are deleted."""

    @abstractmethod
    def close(self) -> None:
        """The task manager ends. Uploaded files stay: the slots may go on with them on another task manager."""

    # --- batches ---------------------------------------------------------------------------------

    @abstractmethod
    def sealed(self, sealed: Sealed) -> None:
        """A slot has sealed a segment."""

    @abstractmethod
    def wait_until_durable(self, sealed: Iterable[Sealed]) -> dict[Subtask, SegmentUpload]:
        """Wait for what must be durable of a batch before it is decided; returns what became of each segment.

        Without a changelog nothing must be durable, and the answer is empty.
        """

    @abstractmethod
    def committed(self, batch: int) -> None:
        """The batch is decided. The slots have not heard of it yet."""

    @abstractmethod
    def durable(self, segments: Iterable[DurableSegment]) -> None:
        """The driver has made these segments of committed epochs durable."""

    # --- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, checkpoint_id: int, full: bool = False) -> SlotAnswers[list[SubtaskAck]]:
        """Take the barrier of a checkpoint; nothing commits meanwhile. See `TakeCheckpoint` for `full`.

        The answer has the acknowledgements that are ready at once. The others reach the driver later.
        """

    @abstractmethod
    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        """A checkpoint is complete.

        `replaced` has, by identity, the copy that stays of a file that two checkpoints uploaded.
        """

    @abstractmethod
    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint was given up."""

    @abstractmethod
    def figures(self) -> ChangelogFigures | None:
        """What the changelog takes up, and what it cost; None without a changelog."""


class SnapshotDurability(Durability):
    """Slots freeze their state at a barrier, and the files that are new since the last checkpoint are uploaded."""

    def __init__(
        self, slots: SlotProcesses, uploader: SnapshotUploader, background: BackgroundUploads, copies: LocalCopies
    ) -> None:
        self._slots = slots
        self._uploader = uploader
        self._background = background
        self._copies = copies
        self._generation = 0

    def slot_starting(self, spec: SlotSpec) -> None:
        if spec.generation > self._generation:
            self._generation = spec.generation
            self._uploader.begin_generation()
        for operator in spec.operators:
            states = [state for state in spec.restore if state.operator == operator.uid]
            subtask = (operator.uid, spec.index)
            self._uploader.start_from(subtask, states, spec.restore_owned, spec.restore_checkpoint)

    def slot_opened(self, spec: SlotSpec, ready: SlotReady) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        self._uploader.close()

    def sealed(self, sealed: Sealed) -> None:
        pass

    def wait_until_durable(self, sealed: Iterable[Sealed]) -> dict[Subtask, SegmentUpload]:
        return {}

    def committed(self, batch: int) -> None:
        pass

    def durable(self, segments: Iterable[DurableSegment]) -> None:
        pass

    def barrier(self, checkpoint_id: int, full: bool = False) -> SlotAnswers[list[SubtaskAck]]:
        frozen = self._slots.freeze_all(Freeze(checkpoint_id))
        self._background.start_upload(frozen, checkpoint_id, partial(self._uploader.upload, checkpoint_id, full=full))
        return SlotAnswers({index: [] for index in frozen.values}, frozen.failures)

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        self._uploader.completed(checkpoint_id, replaced)
        self._uploader.forget_older(checkpoint_id)
        self._copies.prune(self._uploader.identities)

    def aborted(self, checkpoint_id: int) -> None:
        self._uploader.aborted(checkpoint_id)

    def figures(self) -> ChangelogFigures | None:
        return None


class ChangelogDurability(Durability):
    """Segments are uploaded before their batch commits. A barrier answers with the names of files, as a rule."""

    def __init__(
        self, slots: SlotProcesses, changelog: Changelog, uploader: SnapshotUploader, background: BackgroundUploads
    ) -> None:
        """`uploader` uploads the materializations of `changelog`."""
        self._slots = slots
        self._changelog = changelog
        self._uploader = uploader
        self._background = background
        changelog.start()

    def slot_starting(self, spec: SlotSpec) -> None:
        self._changelog.slot_starting(spec)

    def slot_opened(self, spec: SlotSpec, ready: SlotReady) -> None:
        self._changelog.slot_opened(spec, ready.states, {one.operator for one in ready.rebuilt if one.changed})

    def end(self) -> None:
        self._changelog.end()

    def close(self) -> None:
        self._changelog.close()
        self._uploader.close()

    def sealed(self, sealed: Sealed) -> None:
        self._changelog.queue.offer(sealed)

    def wait_until_durable(self, sealed: Iterable[Sealed]) -> dict[Subtask, SegmentUpload]:
        return self._changelog.queue.wait_until_durable(sealed)

    def committed(self, batch: int) -> None:
        self._changelog.queue.commit(batch)

    def durable(self, segments: Iterable[DurableSegment]) -> None:
        self._changelog.take_in(segments)

    def barrier(self, checkpoint_id: int, full: bool = False) -> SlotAnswers[list[SubtaskAck]]:
        acks: dict[int, list[SubtaskAck]] = {slot.spec.index: [] for slot in self._slots.all()}
        generation = self._slots.generation
        barrier = self._changelog.barrier(checkpoint_id, full)
        if barrier.durable:
            for ack in self._changelog.acknowledge(barrier):
                acks.setdefault(ack.state.subtask, []).append(ack)
        else:
            late = partial(self._changelog.acknowledge, barrier)
            self._background.start_report(generation, checkpoint_id, late)
        return SlotAnswers(acks, {})

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        self._changelog.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        self._changelog.aborted(checkpoint_id)

    def figures(self) -> ChangelogFigures | None:
        return self._changelog.figures()
