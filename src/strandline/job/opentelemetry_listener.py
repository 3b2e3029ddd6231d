"""A listener that gives the spans of a run to OpenTelemetry."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.stats import CheckpointStats
from strandline.job.listener import RunListener
from strandline.observe.spans import Spans, tracer_of
from strandline.runtime.driver.recoveries import Recovery, Rescaling

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from strandline.job.run import JobRun


class OpenTelemetryListener(RunListener):
    """Makes OpenTelemetry spans of checkpoints, restores and rescales, with Flink's names.

    Needs `pip install "strandline[otel]"`. Give it to `Job.add_listener`, so that it also learns of the start. The page
    about metrics lists the spans and their attributes.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Spans go to `tracer_provider`, or to the one that the program has set with `trace.set_tracer_provider`."""
        self._tracer = tracer_of(tracer_provider)
        self._seen: set[int] = set()

    def on_progress(self, run: JobRun, progress: dict[str, Any]) -> None:
        """Makes a span of the start with the first batch of a run."""
        if id(run) not in self._seen:
            self._seen.add(id(run))
            self._spans(run).initialization(_began(progress), run.figures().restore)

    def on_checkpoint(self, run: JobRun, checkpoint: CheckpointStats) -> None:
        """Makes a span of a checkpoint or savepoint."""
        self._spans(run).checkpoint(checkpoint)

    def on_recovery(self, run: JobRun, recovery: Recovery) -> None:
        """Makes a span of a restart, or of replaced slots."""
        self._spans(run).recovery(recovery)

    def on_rescale(self, run: JobRun, rescaling: Rescaling) -> None:
        """Makes a span of a change of parallelism."""
        self._spans(run).rescale(rescaling)

    def on_terminated(self, run: JobRun) -> None:
        """Forgets the run."""
        self._seen.discard(id(run))

    def _spans(self, run: JobRun) -> Spans:
        return Spans(self._tracer, run.name)


def _began(progress: dict[str, Any]) -> float:
    """When a batch began, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(str(progress["timestamp"])).timestamp()
    except (KeyError, ValueError):
        return time.time()
