"""Puts the figures of a run together."""

from __future__ import annotations

import time

from strandline.runtime.driver.figures import Restoring, RunFigures, RunningBatch
from strandline.runtime.driver.generations import GenerationCounts
from strandline.runtime.driver.progress import BatchWork, RunProgress
from strandline.runtime.driver.status import RunStatus


def run_figures(
    status: RunStatus,
    restarts: int,
    counts: GenerationCounts,
    progress: RunProgress,
    restoring: Restoring | None,
    running_batch: RunningBatch | None,
) -> RunFigures:
    """The figures of a run, from what its generations and its progress have counted, and from what goes on."""
    last, steps, sizes, silence = progress.last, progress.steps(), progress.sizes, progress.silence
    rows_per_second, rows_out_per_second = (0.0, 0.0) if status.ended else progress.rates(time.monotonic())
    return RunFigures(
        status=status,
        restarts=restarts,
        rounds_repeated=counts.rounds_repeated,
        replaced_slots=counts.replaced_slots,
        generation=counts.generation,
        parallelism=counts.parallelism,
        batches=counts.batches,
        rows=progress.rows,
        rows_out=progress.rows_out,
        rows_per_second=rows_per_second,
        rows_out_per_second=rows_out_per_second,
        batch_duration_ms=(last.ended - last.began) * 1000 if last is not None else 0.0,
        watermark_ms=last.watermark_ms if last is not None else None,
        watermark_lag_ms=_watermark_lag(last, status.ended),
        late_rows=sum(step.late_rows for step in steps.values()),
        state_bytes=sum(step.state_bytes for step in steps.values()),
        state_memory_bytes=sum(step.state_memory_bytes for step in steps.values()),
        sources=progress.sources(),
        steps=steps,
        restore=counts.restore,
        state_memory=sizes.memory,
        changelog=sizes.changelog,
        sinks=progress.sinks.figures(),
        held_up_s=progress.sinks.held_up_s,
        silent_source=silence.source if silence is not None else "",
        silent_s=silence.seconds if silence is not None else 0.0,
        restoring=restoring,
        running_batch=running_batch,
    )


def _watermark_lag(last: BatchWork | None, ended: bool) -> int | None:
    if last is None or last.watermark_ms is None:
        return None
    return (last.time.processing_ms if ended else int(time.time() * 1000)) - last.watermark_ms
