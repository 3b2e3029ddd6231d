"""What the coordinator tells the runtime to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle


@dataclass(frozen=True, slots=True)
class AckDecision:
    """What an acknowledgement leads to."""

    status: Literal["waiting", "ready", "repeated", "late", "unknown"]
    """`ready`: this was the last one, the checkpoint can be completed. `late`: the checkpoint has ended already.
    `unknown`: this coordinator never asked for it."""
    delete: tuple[FileHandle, ...] = ()
    """Uploads that came with it and that nobody will refer to."""


@dataclass(frozen=True, slots=True)
class FailDecision:
    """What the failure of checkpoints leads to."""

    failed: tuple[int, ...] = ()
    delete: tuple[FileHandle, ...] = ()
    run_must_fail: bool = False
    """More checkpoints failed in a row than the job tolerates."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checkpoint whose files are registered: write `metadata`, then win the log entry, then confirm."""

    metadata: CheckpointMetadata
    """With every shared file referring to its first confirmed copy."""
    duplicates: tuple[FileHandle, ...]
    """Uploads it does not refer to. `confirm_completion` gives them up; not to be deleted before."""
    retained: tuple[int, ...]
    """What the log entry says: the ids that are retained from then on, newest last."""
    dropped: tuple[int, ...]
    """What the log entry says: the ids that are dropped, oldest first."""


@dataclass(frozen=True, slots=True)
class CompletionDecision:
    """What a completed checkpoint leads to, once its sink rows are published."""

    checkpoint_id: int
    retained: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    """Older pending checkpoints: nobody needs them any more."""
    dropped: tuple[int, ...] = ()
    """Checkpoints not retained any more, oldest first. Their metadata goes when the files in `delete` are gone."""
    delete: tuple[FileHandle, ...] = ()
