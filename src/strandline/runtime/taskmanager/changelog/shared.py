"""What the parts of a changelog share: one lock, and the records that it protects.

`SegmentQueue`, `Materializer`, `SegmentMerger` and `Changelog` all take this lock before they read or change a record,
here or of their own. One lock for all of them is enough: under it they only keep records, and they let it go while they
read, merge, freeze or upload. The lock is a condition, because threads also wait for each other: a thread that changes
what another one may wait for calls `notify_all`. It is re-entrant.

Which thread runs what:

- `segment-upload-loop` takes sealed segments from the queue and uploads them.
- `changelog-upkeep` materializes slots that are due, and merges segments when no slot is due.
- A thread `checkpoint-N` calls `acknowledge` for a checkpoint that needs something that was not durable at its barrier.
- Threads of the task manager's server call everything else: they act for a slot that sealed a segment, or for the
  driver. `wait_until_durable` and `acknowledge` wait for durable segments in the thread that calls them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.taskmanager.changelog.files import ChangelogFiles
from strandline.runtime.taskmanager.changelog.local_segments import LocalSegments


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A slot that runs here."""

    spec: SlotSpec
    states: dict[str, tuple[dict[str, Any], ...]]
    """The descriptors of the states of each operator."""


@dataclass(slots=True)
class Shared:
    """The records that more than one part of the changelog uses."""

    local: LocalSegments
    files: ChangelogFiles = field(default_factory=ChangelogFiles)
    slots: dict[int, OpenSlot] = field(default_factory=dict)
    generation: int = 0
    closed: bool = False
    """Whether the task manager ends: nobody waits any more."""
    lock: threading.Condition = field(default_factory=threading.Condition)

    def forget_local(self) -> None:
        """Forget the local files of segments that are not part of a state any more: nobody will merge them."""
        self.local.forget_all_but(self.files.segment_identities())
