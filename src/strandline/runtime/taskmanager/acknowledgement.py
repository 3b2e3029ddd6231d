"""Builds the acknowledgement of a subtask: which durable files make up its state, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.protocol.messages import SlotSpec


@dataclass(frozen=True, slots=True)
class StateOwner:
    """The subtask that a state belongs to, and how that state is kept."""

    operator: str
    subtask: int
    key_groups: range
    backend: str
    incremental: bool
    states: tuple[dict[str, Any], ...]
    """The descriptors of the operator's states."""

    @classmethod
    def in_slot(cls, spec: SlotSpec, operator: str, states: Iterable[dict[str, Any]]) -> StateOwner:
        """The subtask of `operator` that runs in the slot of `spec`."""
        backend = spec.backend
        return cls(operator, spec.index, spec.key_groups, backend.kind, backend.shares_files, tuple(states))

    def acknowledge(
        self,
        files: Sequence[StateFile],
        *,
        barrier_time: float,
        sync_ms: float,
        async_ms: float,
        checkpointed_bytes: int,
        uploaded: Iterable[FileHandle] = (),
        beforehand: Iterable[str] = (),
        obsolete: Iterable[FileHandle] = (),
    ) -> SubtaskAck:
        """Acknowledge that `files` are durable and make up the state. `SubtaskAck` says what the other values mean."""
        state = SubtaskState(
            operator=self.operator,
            subtask=self.subtask,
            key_group_start=self.key_groups.start,
            key_group_end=self.key_groups.stop,
            backend=self.backend,
            incremental=self.incremental,
            files=tuple(files),
            states=self.states,
        )
        return SubtaskAck(
            state=state,
            uploaded=tuple(uploaded),
            barrier_time=barrier_time,
            ack_time=time.time(),
            sync_ms=sync_ms,
            async_ms=async_ms,
            checkpointed_bytes=checkpointed_bytes,
            full_bytes=sum(file.size for file in files),
            beforehand=tuple(beforehand),
            obsolete=tuple(obsolete),
        )
