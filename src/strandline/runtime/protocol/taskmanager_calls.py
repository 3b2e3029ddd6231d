"""The calls that a task manager answers. The driver makes them, and slots tell it of sealed segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec

from strandline.checkpoint.metadata import FileHandle, StateFile
from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import FORWARDING, LONG, QUICK, Client, Nothing, call
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.logs import LogText, ReadLog
from strandline.runtime.protocol.messages import Rebuilt, Sealed, SegmentUpload, SlotSpec, StorageSettings
from strandline.runtime.protocol.profiles import Folded, Profile
from strandline.runtime.protocol.slot_calls import (
    BatchRound,
    NextTimers,
    Prepare,
    PrepareEmpty,
    Query,
    SlotFigures,
    SlotStatus,
    profile_deadline,
)

Asked = TypeVar("Asked")
Told = TypeVar("Told")


class ForSlots(msgspec.Struct, Generic[Asked], frozen=True):
    """A request to some slots of a task manager."""

    slots: list[int]
    request: Asked


class SlotAnswers(msgspec.Struct, Generic[Told], frozen=True):
    """What slots answered, each for itself."""

    values: dict[int, Told]
    failures: dict[int, Failure]


class StartSlots(msgspec.Struct, frozen=True):
    """Asks for slots."""

    specs: list[SlotSpec]
    use_copies: bool
    """Whether the slots may restore from copies of durable files on their host's disk."""


class StartedSlot(msgspec.Struct, frozen=True):
    """A slot that runs and holds its state."""

    address: Address
    rebuilt: list[Rebuilt]


class OlderSlots(msgspec.Struct, frozen=True):
    """Names the slots of all generations before one."""

    generation: int


class SpareSlots(msgspec.Struct, frozen=True):
    """Asks for processes that can become slots."""

    count: int


class SlotProcessInfo(msgspec.Struct, frozen=True):
    """A slot as the operating system knows it."""

    pid: int
    alive: bool
    ended: str = ""
    """Why the process does not run any more; empty while it runs."""


class TaskManagerInfo(msgspec.Struct, frozen=True):
    """A task manager and its slots as the operating system knows them."""

    identity: str
    pid: int
    slots: dict[int, SlotProcessInfo]


class PreparedSlot(msgspec.Struct, frozen=True):
    """Where a slot stands in a round, and what became of its segments."""

    status: SlotStatus
    segments: dict[str, SegmentUpload] = {}
    """With the changelog: the segment of each operator that is prepared in this round."""


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """The barrier of a checkpoint."""

    checkpoint: int
    full: bool = False
    """Whether the whole state is uploaded, also the files that the last checkpoint holds. With the changelog, the
    state is materialized, and the checkpoint waits for that."""


class TakeCheckpoint(Barrier, frozen=True, kw_only=True):
    """A barrier that is a call of its own."""

    timeout: float
    """Seconds for which the driver waits for the answer."""


class DurableSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment that the driver has made durable, in real time."""

    operator: str
    subtask: int
    file: StateFile
    path: str
    """The segment on the slot's disk."""


class CommitBatch(msgspec.Struct, frozen=True):
    """The decision that a batch is part of the state."""

    batch: int
    barrier: Barrier | None = None
    """With the changelog: a barrier that is taken after the batch, and needs no call of its own."""
    durable: list[DurableSegment] = []
    """In real time: the segments of the epochs that the task manager has not heard of."""


class CommittedSlot(msgspec.Struct, frozen=True):
    """What a slot waits for after a commit, and how the barrier went that came with it."""

    timers: NextTimers
    acks: list[SubtaskAck] = []
    """Acknowledgements that are ready at once. The others reach the driver later."""
    refused: Failure | None = None
    """Why no barrier was taken."""


class TakeSavepoint(msgspec.Struct, frozen=True):
    """The barrier of a savepoint."""

    checkpoint: int
    target: StorageSettings
    canonical: bool
    """Whether in the form that every backend reads."""
    timeout: float
    """Seconds for which the driver waits for the answer."""


class CheckpointCompleted(msgspec.Struct, frozen=True):
    """The news that a checkpoint is complete."""

    checkpoint: int
    replaced: dict[str, FileHandle]
    """The copies that survive, by identity, where two checkpoints had uploaded the same file."""


class CheckpointAborted(msgspec.Struct, frozen=True):
    """The news that a checkpoint was given up."""

    checkpoint: int


def _forwarded(seconds: float) -> float:
    return seconds + FORWARDING


class TaskManagerCalls(ABC):
    """What a task manager can be asked to do."""

    # --- processes -------------------------------------------------------------------------------

    @call(deadline=LONG)
    @abstractmethod
    def start_slots(self, request: StartSlots) -> dict[int, StartedSlot]:
        """Starts slots, in parallel; answers once they hold their state."""

    @call(deadline=QUICK)
    @abstractmethod
    def start_spares(self, request: SpareSlots) -> None:
        """Starts slot processes in advance."""

    @call(deadline=15.0)
    @abstractmethod
    def end_older_slots(self, request: OlderSlots) -> None:
        """Ends the slots of older generations, and the processes that wait to become slots: none begins here now."""

    @call(deadline=15.0, fenced=False)
    @abstractmethod
    def stop_slots(self, request: Nothing) -> None:
        """Ends all slots."""

    @call(deadline=QUICK, fenced=False)
    @abstractmethod
    def shutdown(self, request: Nothing) -> None:
        """Ends the task manager, after its answer."""

    @call(deadline=QUICK, fenced=False)
    @abstractmethod
    def describe(self, request: Nothing) -> TaskManagerInfo:
        """The process and its slots."""

    @call(deadline=QUICK, fenced=False)
    @abstractmethod
    def log_names(self, request: Nothing) -> list[str]:
        """The processes of the run on this host that have a log."""

    @call(deadline=QUICK, fenced=False)
    @abstractmethod
    def read_log(self, request: ReadLog) -> LogText:
        """The end of the log of a process on this host."""

    @call(deadline=10.0, fenced=False)
    @abstractmethod
    def log_ends(self, request: Nothing) -> dict[str, LogText]:
        """The ends of the logs of all processes on this host."""

    @call(deadline=QUICK)
    @abstractmethod
    def changelog_figures(self, request: Nothing) -> ChangelogFigures | None:
        """What the changelog takes up and what it cost; None without a changelog."""

    # --- batches ---------------------------------------------------------------------------------

    @call(deadline=QUICK)
    @abstractmethod
    def sealed(self, request: Sealed) -> None:
        """A slot has sealed a segment: its upload may begin."""

    @call(deadline=LONG)
    @abstractmethod
    def collect_prepared(self, request: ForSlots[BatchRound]) -> SlotAnswers[PreparedSlot]:
        """Where the slots stand; with the changelog, once what they prepared in this round is durable."""

    @call(deadline=LONG)
    @abstractmethod
    def prepare(self, request: ForSlots[Prepare]) -> SlotAnswers[PreparedSlot]:
        """See `SlotCalls.prepare`; with the changelog, answers once what the slots prepared is durable."""

    @call(deadline=LONG)
    @abstractmethod
    def commit(self, request: ForSlots[CommitBatch]) -> SlotAnswers[CommittedSlot]:
        """The batch is decided: it is part of the changelog, and every slot makes it its state.

        A barrier that comes with it is taken once all slots have done so. If one has not, none is taken.
        """

    @call(deadline=LONG)
    @abstractmethod
    def discard(self, request: ForSlots[BatchRound]) -> SlotAnswers[None]:
        """See `SlotCalls.discard`."""

    @call(deadline=LONG)
    @abstractmethod
    def prepare_empty(self, request: ForSlots[PrepareEmpty]) -> SlotAnswers[None]:
        """See `SlotCalls.prepare_empty`."""

    @call(deadline=_forwarded(QUICK))
    @abstractmethod
    def slot_status(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotStatus]:
        """See `SlotCalls.status`."""

    @call(deadline=_forwarded(QUICK))
    @abstractmethod
    def slot_figures(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotFigures]:
        """See `SlotCalls.figures`."""

    @call(deadline=_forwarded(10.0))
    @abstractmethod
    def query(self, request: ForSlots[Query]) -> SlotAnswers[bytes]:
        """See `SlotCalls.query`."""

    @call(deadline=lambda request: _forwarded(profile_deadline(request.request)))
    @abstractmethod
    def profile(self, request: ForSlots[Profile]) -> SlotAnswers[Folded]:
        """See `SlotCalls.profile`."""

    # --- checkpoints -----------------------------------------------------------------------------

    @call(deadline=lambda request: _forwarded(request.timeout))
    @abstractmethod
    def take_checkpoint(self, request: TakeCheckpoint) -> SlotAnswers[list[SubtaskAck]]:
        """Freezes all slots, which is the synchronous part of a checkpoint, and uploads in the background.

        Acknowledgements that are ready at once, as with the changelog, are part of the answer.
        """

    @call(deadline=lambda request: _forwarded(request.timeout))
    @abstractmethod
    def take_savepoint(self, request: TakeSavepoint) -> SlotAnswers[None]:
        """Freezes all slots for a savepoint, and uploads in the background, to the savepoint's own folder."""

    @call(deadline=10.0)
    @abstractmethod
    def checkpoint_completed(self, request: CheckpointCompleted) -> None:
        """A checkpoint is complete: the next one may refer to its files."""

    @call(deadline=10.0)
    @abstractmethod
    def checkpoint_aborted(self, request: CheckpointAborted) -> None:
        """A checkpoint was given up: what is not uploaded yet need not be."""


class TaskManagerClient(Client, TaskManagerCalls):
    """Calls a task manager."""

    def start_slots(self, request: StartSlots) -> dict[int, StartedSlot]:
        return self.carry_out(TaskManagerCalls.start_slots, request)

    def start_spares(self, request: SpareSlots) -> None:
        return self.carry_out(TaskManagerCalls.start_spares, request)

    def end_older_slots(self, request: OlderSlots) -> None:
        return self.carry_out(TaskManagerCalls.end_older_slots, request)

    def stop_slots(self, request: Nothing) -> None:
        return self.carry_out(TaskManagerCalls.stop_slots, request)

    def shutdown(self, request: Nothing) -> None:
        return self.carry_out(TaskManagerCalls.shutdown, request)

    def describe(self, request: Nothing) -> TaskManagerInfo:
        return self.carry_out(TaskManagerCalls.describe, request)

    def log_names(self, request: Nothing) -> list[str]:
        return self.carry_out(TaskManagerCalls.log_names, request)

    def read_log(self, request: ReadLog) -> LogText:
        return self.carry_out(TaskManagerCalls.read_log, request)

    def log_ends(self, request: Nothing) -> dict[str, LogText]:
        return self.carry_out(TaskManagerCalls.log_ends, request)

    def changelog_figures(self, request: Nothing) -> ChangelogFigures | None:
        return self.carry_out(TaskManagerCalls.changelog_figures, request)

    def sealed(self, request: Sealed) -> None:
        return self.carry_out(TaskManagerCalls.sealed, request)

    def collect_prepared(self, request: ForSlots[BatchRound]) -> SlotAnswers[PreparedSlot]:
        return self.carry_out(TaskManagerCalls.collect_prepared, request)

    def prepare(self, request: ForSlots[Prepare]) -> SlotAnswers[PreparedSlot]:
        return self.carry_out(TaskManagerCalls.prepare, request)

    def commit(self, request: ForSlots[CommitBatch]) -> SlotAnswers[CommittedSlot]:
        return self.carry_out(TaskManagerCalls.commit, request)

    def discard(self, request: ForSlots[BatchRound]) -> SlotAnswers[None]:
        return self.carry_out(TaskManagerCalls.discard, request)

    def prepare_empty(self, request: ForSlots[PrepareEmpty]) -> SlotAnswers[None]:
        return self.carry_out(TaskManagerCalls.prepare_empty, request)

    def slot_status(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotStatus]:
        return self.carry_out(TaskManagerCalls.slot_status, request)

    def slot_figures(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotFigures]:
        return self.carry_out(TaskManagerCalls.slot_figures, request)

    def query(self, request: ForSlots[Query]) -> SlotAnswers[bytes]:
        return self.carry_out(TaskManagerCalls.query, request)

    def profile(self, request: ForSlots[Profile]) -> SlotAnswers[Folded]:
        return self.carry_out(TaskManagerCalls.profile, request)

    def take_checkpoint(self, request: TakeCheckpoint) -> SlotAnswers[list[SubtaskAck]]:
        return self.carry_out(TaskManagerCalls.take_checkpoint, request)

    def take_savepoint(self, request: TakeSavepoint) -> SlotAnswers[None]:
        return self.carry_out(TaskManagerCalls.take_savepoint, request)

    def checkpoint_completed(self, request: CheckpointCompleted) -> None:
        return self.carry_out(TaskManagerCalls.checkpoint_completed, request)

    def checkpoint_aborted(self, request: CheckpointAborted) -> None:
        return self.carry_out(TaskManagerCalls.checkpoint_aborted, request)
