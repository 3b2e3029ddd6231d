"""Flink's JSON for operations that are triggered and polled: requests, states and results."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import JobFacts
from strandline.observe.views import Folded
from strandline.redaction import shown
from strandline.rest.triggers import Operation, Progress
from strandline.runtime.driver.recoveries import Rescaling

TriggerId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits that the client chose.")]
Directory = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]*$")]
MOST_TEXT = 20_000
FormatType = Literal["CANONICAL", "NATIVE"]


class CheckpointRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a checkpoint: as the job is configured, or with its whole state."""

    checkpointType: Literal["CONFIGURED", "FULL", "INCREMENTAL"] = "CONFIGURED"
    triggerId: TriggerId | None = None


class SavepointRequest(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"target_directory": "target-directory", "cancel_job": "cancel-job"},
):
    """Asks for a savepoint. Without a directory, the option `savepoint_dir` of the job is taken."""

    target_directory: Directory | None = None
    cancel_job: bool = False
    formatType: FormatType = "CANONICAL"
    triggerId: TriggerId | None = None


class StopRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the end of a job after a last checkpoint, and after a savepoint if there is a directory."""

    targetDirectory: Directory | None = None
    drain: bool = False
    formatType: FormatType = "CANONICAL"
    triggerId: TriggerId | None = None


class ProfileRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for samples of the Python threads of one slot."""

    subtask: Annotated[int, Meta(ge=0, le=100_000)] = 0
    seconds: Annotated[float, Meta(gt=0, le=60)] = 10.0
    triggerId: TriggerId | None = None


class DisposalRequest(Struct, frozen=True, forbid_unknown_fields=True, rename={"savepoint_path": "savepoint-path"}):
    """Asks for a savepoint to be deleted."""

    savepoint_path: Directory
    triggerId: TriggerId | None = None


class TriggerResponse(Struct, frozen=True, rename={"request_id": "request-id"}):
    """The id by which to ask for an operation that was started."""

    request_id: str


class Accepted(Struct, frozen=True):
    """The operation was started."""


class QueueStatus(Struct, frozen=True):
    """Whether an operation is in progress."""

    id: Literal["IN_PROGRESS", "COMPLETED"]


class FailureCause(Struct, frozen=True, rename={"kind": "class", "stack_trace": "stack-trace"}):
    """Why an operation failed: the class of the error, and the error in words."""

    kind: str
    stack_trace: str


class Result(Struct, frozen=True, omit_defaults=True, rename={"failure_cause": "failure-cause"}):
    """What an operation came to: nothing but a failure, if it failed."""

    failure_cause: FailureCause | None = None


class SavepointInfo(Result, frozen=True, omit_defaults=True):
    """The path of a completed savepoint. A stop without a savepoint has none."""

    location: str | None = None


class CheckpointInfo(Result, frozen=True, omit_defaults=True):
    """The id of a completed checkpoint."""

    checkpointId: int | None = None


class RescaleInfo(Result, frozen=True, omit_defaults=True):
    """A completed change of parallelism."""

    rescaling: Rescaling | None = None


class ProfileInfo(Result, frozen=True, omit_defaults=True):
    """Sampled stacks, as `Folded` has them."""

    seconds: float | None = None
    samples: int | None = None
    stacks: dict[str, int] | None = None


class OperationStatus(Struct, frozen=True):
    """An operation as far as it is. `operation` is null while it is in progress."""

    status: QueueStatus
    operation: Result | None = None
    progress: Progress | None = None


class SavepointStatus(OperationStatus, frozen=True):
    """A savepoint, or a stop, as far as it is."""

    operation: SavepointInfo | None = None


class CheckpointStatus(OperationStatus, frozen=True):
    """A triggered checkpoint as far as it is."""

    operation: CheckpointInfo | None = None


class RescaleStatus(OperationStatus, frozen=True):
    """A change of parallelism as far as it is."""

    operation: RescaleInfo | None = None


class ProfileStatus(OperationStatus, frozen=True):
    """A flame graph as far as it is."""

    operation: ProfileInfo | None = None


def operation_status(operation: Operation) -> OperationStatus:
    """What a client that polls is told."""
    if not operation.ended.is_set():
        return OperationStatus(QueueStatus("IN_PROGRESS"), None, operation.progress)
    return OperationStatus(QueueStatus("COMPLETED"), _result(operation))


def _result(operation: Operation) -> Result:
    if operation.failure is not None:
        error = operation.failure
        text = shown(str(error) or type(error).__name__)[:MOST_TEXT]
        return Result(FailureCause(type(error).__name__, text))
    match operation.kind, operation.result:
        case "checkpoint", CheckpointStats() as stats:
            return CheckpointInfo(checkpointId=stats.id)
        case (("savepoint" | "stop"), (str() | None) as path):
            return SavepointInfo(location=path)
        case "rescale", Rescaling() as rescaling:
            return RescaleInfo(rescaling=rescaling)
        case "profile", Folded() as folded:
            return ProfileInfo(None, folded.seconds, folded.samples, folded.stacks)
        case _:
            return Result()


def restore_progress(facts: JobFacts, step: str) -> Progress | None:
    """How far a job is that opens its state; None if it does not."""
    seen = facts.figures.restoring if facts.figures is not None else None
    return None if seen is None else Progress(step, seen.done_bytes, seen.total_bytes, "bytes")


def checkpoint_progress(facts: JobFacts, since_ms: int, *, savepoint: bool) -> Progress | None:
    """How far the checkpoint or savepoint in progress is that began after `since_ms`."""
    for one in reversed(facts.checkpoints.history[-20:]):
        if (
            one.status == "in_progress"
            and (one.kind == "savepoint") == savepoint
            and one.trigger_time * 1000 >= since_ms
        ):
            step = f"{one.acknowledged} of {one.expected} subtasks have acknowledged {one.kind} {one.id}"
            last = facts.checkpoints.last_completed
            if savepoint and last is not None and last.full_bytes > 0:
                done = min(one.checkpointed_bytes, last.full_bytes)
                return Progress(step, done, last.full_bytes, "bytes", one.checkpointed_bytes)
            return Progress(step, one.acknowledged, one.expected, "subtasks", one.checkpointed_bytes)
    return None
