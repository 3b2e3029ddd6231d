"""The decisions of the coordinator, which the runtime carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle


@dataclass(frozen=True, slots=True)
class AckDecision:
    """The result of an acknowledgement."""

    status: Literal["waiting", "ready", "repeated", "late", "unknown"]
    """`ready`: it was the last one, and the checkpoint can be completed. `late`: the checkpoint has ended already.
    `unknown`: this coordinator did not ask for it."""
    delete: tuple[FileHandle, ...] = ()
    """Uploads named in the acknowledgement that no checkpoint will refer to."""


@dataclass(frozen=True, slots=True)
class FailDecision:
    """The result of one or more failed checkpoints."""

    failed: tuple[int, ...] = ()
    delete: tuple[FileHandle, ...] = ()
    run_must_fail: bool = False
    """More checkpoints failed in a row than the job tolerates."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checkpoint whose files are registered. Next: write `metadata`, win the log entry, confirm."""

    metadata: CheckpointMetadata
    """In it, every shared file refers to its first confirmed copy."""
    duplicates: tuple[FileHandle, ...]
    """Uploads that `metadata` does not refer to. `confirm_completion` returns them for deletion, and not earlier."""
    retained: tuple[int, ...]
    """For the log entry: the ids that are retained from now on, newest last."""
    dropped: tuple[int, ...]
    """For the log entry: the ids that are dropped, oldest first."""


@dataclass(frozen=True, slots=True)
class CompletionDecision:
    """What is to be done after a checkpoint has completed and its sink rows are published."""

    checkpoint_id: int
    retained: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    """Older pending checkpoints, which are not needed any more."""
    dropped: tuple[int, ...] = ()
    """Checkpoints that are not retained any more, oldest first. Delete their metadata after the files in `delete`."""
    delete: tuple[FileHandle, ...] = ()
