"""A checkpoint between its barrier and its completion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from strandline.checkpoint.metadata import FileHandle, Kind, SubtaskState

SavepointFormat = Literal["canonical", "native"]

Subtask = tuple[str, int]
"""Operator uid and subtask index."""


class SubtaskAck(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a subtask whose snapshot is durable."""

    state: SubtaskState
    uploaded: tuple[FileHandle, ...]
    """The files that this subtask uploaded for this checkpoint. Only these are deleted if the checkpoint fails."""
    barrier_time: float
    """When the subtask reached the barrier, in seconds since the epoch."""
    ack_time: float
    sync_ms: float
    async_ms: float
    checkpointed_bytes: int
    """The bytes that were uploaded for this checkpoint."""
    full_bytes: int
    beforehand: tuple[str, ...] = ()
    """Paths of changelog files that were durable before the barrier. They stay even if the checkpoint fails."""
    obsolete: tuple[FileHandle, ...] = ()
    """Changelog files that the subtask does not need any more. A retained checkpoint may still refer to them."""


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
    """When the barrier was taken."""
    subtasks: frozenset[Subtask]
    epoch: float = 0.0
    """Added to a time above, this gives seconds since the epoch, which acknowledgements contain."""
    acks: dict[Subtask, SubtaskAck] = field(default_factory=dict)
    uploaded_paths: set[str] = field(default_factory=set)
    known_paths: set[str] = field(default_factory=set)
    """Paths that the checkpoint may refer to: files uploaded for it, and those in `SubtaskAck.beforehand`."""
    source_uploads: list[FileHandle] = field(default_factory=list)
    """Pieces of sources' logs that the driver uploaded for this checkpoint."""
    completing: bool = False
    """Its files are registered, and its metadata is being written."""
    entered: bool = False
    """Its log entry may exist. From now on only the job's log decides whether it is complete."""
    savepoint_format: SavepointFormat | None = None
    """None for a checkpoint."""

    @property
    def ready(self) -> bool:
        """Whether every subtask has acknowledged."""
        return len(self.acks) == len(self.subtasks)

    def add(self, ack: SubtaskAck) -> None:
        """Add the acknowledgement of a subtask."""
        self.acks[ack.state.operator, ack.state.subtask] = ack
        self.uploaded_paths.update(handle.path for handle in ack.uploaded)
        self.known_paths.update(self.uploaded_paths, ack.beforehand)

    def add_source(self, uploaded: Iterable[FileHandle]) -> None:
        """Add what the driver uploaded for the position in the sources."""
        for handle in uploaded:
            self.source_uploads.append(handle)
            self.uploaded_paths.add(handle.path)
            self.known_paths.add(handle.path)

    def missing(self) -> list[Subtask]:
        """The subtasks that have not acknowledged."""
        return sorted(self.subtasks - self.acks.keys())

    def obsolete(self) -> list[FileHandle]:
        """The changelog files that the subtasks do not need any more."""
        return [handle for ack in self.acks.values() for handle in ack.obsolete]

    def uploads(self) -> list[FileHandle]:
        """Every file that was uploaded for this checkpoint: by a subtask that acknowledged, or by the driver."""
        return [*(handle for ack in self.acks.values() for handle in ack.uploaded), *self.source_uploads]
