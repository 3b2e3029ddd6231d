"""The checkpoint protocol as pure code: it takes facts (acknowledgements, the time) and returns decisions.

It has no I/O, threads, clock or randomness. `runtime`, `admin`, `job` and `operators/schema_evolution` import it, and
operators import `steps`; it imports only `errors`.
"""

from __future__ import annotations

from strandline.checkpoint.batch import BatchProtocol, PreparedSubtask, Round
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.decisions import AckDecision, CompletionDecision, CompletionPlan, FailDecision
from strandline.checkpoint.job_log import Completed, JobLog, Takeover, Verdict, judge_conflict
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskState,
)
from strandline.checkpoint.pending import PendingCheckpoint, SubtaskAck
from strandline.checkpoint.registry import Registration, SharedKey, SharedStateRegistry
from strandline.checkpoint.restore import ListedSinkFile, SinkRecovery, check_compatible, plan_restore
from strandline.checkpoint.stats import CheckpointHistory, CheckpointStats, SubtaskStats

__all__ = [
    "AckDecision",
    "BatchProtocol",
    "CheckpointCoordinator",
    "CheckpointHistory",
    "CheckpointMetadata",
    "CheckpointStats",
    "Completed",
    "CompletionDecision",
    "CompletionPlan",
    "FailDecision",
    "FileHandle",
    "JobLog",
    "JobShape",
    "ListedSinkFile",
    "PendingCheckpoint",
    "PreparedSubtask",
    "Registration",
    "Round",
    "SharedKey",
    "SharedStateRegistry",
    "SinkFile",
    "SinkRecovery",
    "SourcePosition",
    "StateFile",
    "SubtaskAck",
    "SubtaskState",
    "SubtaskStats",
    "Takeover",
    "Verdict",
    "check_compatible",
    "judge_conflict",
    "plan_restore",
]
