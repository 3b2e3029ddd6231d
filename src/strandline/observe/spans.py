"""OpenTelemetry spans of what took time in a run, with the names and attributes of Flink's traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import ConfigError
from strandline.runtime.driver.figures import RestoreFigures
from strandline.runtime.driver.recoveries import Recovery, Rescaling

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

SCOPE = "strandline"
_MOST_TEXT = 2000

Attributes = Mapping[str, str | int | float | bool]


def tracer_of(provider: TracerProvider | None) -> Tracer:
    """The tracer of a provider, or of the one that the program has set. Raises `ConfigError` without OpenTelemetry."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ConfigError('spans need OpenTelemetry: pip install "strandline[otel]"') from error
    return trace.get_tracer(SCOPE, tracer_provider=provider)


class Spans:
    """Makes the spans of one job. Each is made when it has ended, with the times at which it began and ended."""

    def __init__(self, tracer: Tracer, job: str) -> None:
        self._tracer = tracer
        self._job = job

    def checkpoint(self, stats: CheckpointStats) -> None:
        """A checkpoint or savepoint was completed or has failed."""
        self._span(
            "Checkpoint",
            stats.trigger_time,
            stats.end_to_end_ms,
            {
                "checkpointId": stats.id,
                "checkpointedSize": stats.checkpointed_bytes,
                "fullSize": stats.full_bytes,
                "checkpointStatus": stats.status.upper(),
                "checkpointType": stats.kind.upper(),
                "isUnaligned": False,
            },
            stats.failure,
        )

    def initialization(self, end: float, restore: RestoreFigures) -> None:
        """A run has opened its state and begun with a batch, at `end` in seconds since the epoch."""
        self._span(
            "JobInitialization",
            end - restore.duration_ms / 1000,
            restore.duration_ms,
            _restored("start", restore.duration_ms, restore.local_bytes, restore.durable_bytes),
        )

    def recovery(self, recovery: Recovery) -> None:
        """A run was restarted, or slots were replaced."""
        self._span(
            "JobInitialization",
            recovery.time,
            recovery.duration_ms,
            {
                **_restored(recovery.kind, recovery.duration_ms, recovery.local_bytes, recovery.durable_bytes),
                "failureMessage": recovery.reason[:_MOST_TEXT],
            },
        )

    def rescale(self, rescaling: Rescaling) -> None:
        """The parallelism was changed."""
        self._span(
            "Rescale",
            rescaling.time,
            rescaling.duration_ms,
            {
                "previousParallelism": rescaling.parallelism_before,
                "newParallelism": rescaling.parallelism,
                "pauseDurationMs": rescaling.pause_ms,
                "movedKeyGroups": rescaling.moved_key_groups,
                **_sizes(rescaling.local_bytes, rescaling.durable_bytes),
            },
        )

    def _span(
        self, name: str, start: float, duration_ms: float, attributes: Attributes, failure: str | None = None
    ) -> None:
        given: dict[str, Any] = {"jobName": self._job, **attributes}
        began = int(start * 1e9)
        span = self._tracer.start_span(name, start_time=began, attributes=given)
        if failure:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("failureMessage", failure[:_MOST_TEXT])
            span.set_status(Status(StatusCode.ERROR, failure[:_MOST_TEXT]))
        span.end(end_time=began + int(max(0.0, duration_ms) * 1e6))


def _restored(kind: str, duration_ms: float, local: int, durable: int) -> Attributes:
    return {"initializationKind": kind, "MaxInitializeStateDurationMs": duration_ms, **_sizes(local, durable)}


def _sizes(local: int, durable: int) -> Attributes:
    return {"RestoredStateSizeBytes.LOCAL_DISK": local, "RestoredStateSizeBytes.REMOTE": durable}
