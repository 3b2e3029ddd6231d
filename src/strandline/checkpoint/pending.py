"""A checkpoint between its barrier and its completion."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from strandline.checkpoint.metadata import FileHandle, Kind, SubtaskState

Subtask = tuple[str, int]
"""Operator uid and subtask index."""


class SubtaskAck(msgspec.Struct, frozen=True, kw_only=True):
    """What a subtask reports when its snapshot is durable."""

    state: SubtaskState
    uploaded: tuple[FileHandle, ...]
    """The files this subtask uploaded for this checkpoint: the only ones that go if the checkpoint fails."""
    barrier_time: float
    """When the subtask reached the barrier, in seconds since the epoch."""
    ack_time: float
    sync_ms: float
    async_ms: float
    checkpointed_bytes: int
    """What was uploaded for this checkpoint."""
    full_bytes: int
    beforehand: tuple[str, ...] = ()
    """Paths of files that were durable before: of the changelog, which goes on whatever becomes of the checkpoint."""
    obsolete: tuple[FileHandle, ...] = ()
    """Files of the changelog that are not needed any more, unless a retained checkpoint refers to them."""


@dataclass(slots=True)
class PendingCheckpoint:
    """A triggered checkpoint and the acknowledgements that have arrived. Only the coordinator changes it."""

    id: int
    kind: Kind
    batch: int
    """The batch whose end is the barrier."""
    trigger_time: float
    """When the checkpoint was due."""
    barrier_time: float
    """When it was triggered: its barrier."""
    forced: bool
    base: int | None
    """The completed checkpoint whose files a snapshot may refer to instead of uploading them again."""
    subtasks: frozenset[Subtask]
    acks: dict[Subtask, SubtaskAck] = field(default_factory=dict)
    uploaded_paths: set[str] = field(default_factory=set)
    known_paths: set[str] = field(default_factory=set)
    """Paths that it may refer to: uploaded for it, or beforehand."""
    completing: bool = False
    """Its files are registered; whether it completes is decided by the job's log."""

    @property
    def ready(self) -> bool:
        """Every subtask has acknowledged."""
        return len(self.acks) == len(self.subtasks)

    def add(self, ack: SubtaskAck) -> None:
        """Take in the acknowledgement of a subtask."""
        self.acks[ack.state.operator, ack.state.subtask] = ack
        self.uploaded_paths.update(handle.path for handle in ack.uploaded)
        self.known_paths.update(self.uploaded_paths, ack.beforehand)

    def missing(self) -> list[Subtask]:
        """The subtasks that have not acknowledged."""
        return sorted(self.subtasks - self.acks.keys())

    def obsolete(self) -> list[FileHandle]:
        """Files of the changelog that the subtasks do not need any more."""
        return [handle for ack in self.acks.values() for handle in ack.obsolete]

    def uploads(self) -> list[FileHandle]:
        """Every file that was uploaded for this checkpoint, as far as acknowledged."""
        return [handle for ack in self.acks.values() for handle in ack.uploaded]
