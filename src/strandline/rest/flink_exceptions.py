"""Flink's JSON about what went wrong in a job."""

from __future__ import annotations

from msgspec import Struct, field

from strandline.observe.facts import FailureFacts, JobFacts

MOST_EXCEPTIONS = 200
MOST_TEXT = 20_000


class ExceptionInfo(Struct, frozen=True):
    """One failure, with its cause in words. `taskName` is null if the failure is not one of a subtask."""

    exceptionName: str
    stacktrace: str
    timestamp: int
    failureLabels: dict[str, str] = {}
    taskName: str | None = None
    endpoint: str | None = None
    taskManagerId: str | None = None
    concurrentExceptions: list[str] = []


class JobExceptionHistory(Struct, frozen=True):
    """The newest failures, newest first."""

    entries: list[ExceptionInfo]
    truncated: bool


class JobExceptions(Struct, frozen=True):
    """The failures of a job. The first three fields are Flink's older form of the newest one."""

    exceptionHistory: JobExceptionHistory
    root_exception: str | None = field(name="root-exception", default=None)
    timestamp: int | None = None
    all_exceptions: list[ExceptionInfo] = field(name="all-exceptions", default=[])
    truncated: bool = False


def job_exceptions(facts: JobFacts, most: int = MOST_EXCEPTIONS) -> JobExceptions:
    """`GET /jobs/:jobid/exceptions`. Failed checkpoints are in `/checkpoints`, as in Flink."""
    known = [one for one in reversed(facts.failures) if one.kind != "checkpoint"]
    entries = [_entry(facts, one) for one in known[:most]]
    newest = entries[0] if entries else None
    return JobExceptions(
        JobExceptionHistory(entries, len(known) > most),
        None if newest is None else newest.stacktrace,
        None if newest is None else newest.timestamp,
        truncated=len(known) > most,
    )


def _entry(facts: JobFacts, failure: FailureFacts) -> ExceptionInfo:
    slot = next((one for one in facts.subtasks if one.index in failure.subtasks[:1]), None)
    return ExceptionInfo(
        exceptionName=failure.cause.partition(":")[0][:200],
        stacktrace=(failure.text or failure.cause)[:MOST_TEXT],
        timestamp=failure.time_ms,
        failureLabels={"kind": failure.kind},
        taskName=f"slots {', '.join(map(str, failure.subtasks[:20]))}" if failure.subtasks else None,
        endpoint=None if slot is None else f"{slot.host}:{slot.pid}",
        taskManagerId=None if slot is None else slot.task_manager,
    )
