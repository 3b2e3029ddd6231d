"""How fast a streaming query worked, read from Spark's own progress reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from strandline_bench.report import percentiles
from strandline_bench.workload import InputFile

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

Say = Callable[[str, int, int], None]
"""Called with the name of a step, how much of it is done, and how much there is in all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as Spark timed it."""

    start: float
    """Seconds since the epoch."""
    seconds: float
    rows: int
    parts_ms: dict[str, int]


def batches_of(query: StreamingQuery) -> list[Batch]:
    """The batches that a query has finished, oldest first. A batch that only advances the watermark has no rows."""
    found: dict[int, Batch] = {}
    for progress in query.recentProgress:
        parts = dict(progress["durationMs"])
        if "addBatch" in parts:
            start = datetime.fromisoformat(progress["timestamp"]).timestamp()
            found[progress["batchId"]] = Batch(start, parts["triggerExecution"] / 1000, progress["numInputRows"], parts)
    return [found[number] for number in sorted(found)]


@contextmanager
def watched(query: StreamingQuery, text: str, files: Sequence[InputFile], say: Say) -> Iterator[None]:
    """Report, from a thread, how many rows a newly started query has processed."""
    total = sum(file.rows for file in files)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            progress = query.lastProgress
            if progress is not None and "addBatch" in progress["durationMs"]:
                say(text, sum(file.rows for file in files[: progress["batchId"] + 1]), total)

    thread = threading.Thread(target=watch, daemon=True, name="bench-progress")
    say(text, 0, total)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(text, total, total)


def throughput(batches: Sequence[Batch], files: Sequence[InputFile], end: float) -> dict[str, Any]:
    """Rows per second without the first batch: from the start of the second batch until `end`, and of the median batch.

    One file is one batch.
    """
    if len(batches) != len(files):
        raise RuntimeError(f"{len(batches)} batches were timed, but there were {len(files)} files")
    rows = sum(file.rows for file in files[1:])
    seconds = end - batches[1].start
    rates = [file.rows / batch.seconds for file, batch in zip(files[1:], batches[1:], strict=True)]
    parts = sorted({name for batch in batches[1:] for name in batch.parts_ms})
    return {
        "rows": rows,
        "seconds": round(seconds, 3),
        "rows_per_s": round(rows / seconds, 1),
        "steady_rows_per_s": round(median(rates), 1),
        "first_batch_s": round(batches[0].seconds, 3),
        "batch_ms": percentiles([batch.seconds * 1000 for batch in batches[1:]]),
        "spark_parts_ms": {name: median(batch.parts_ms.get(name, 0) for batch in batches[1:]) for name in parts},
    }


class Stopwatch:
    """A stopwatch: seconds since it was created, rounded to milliseconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return round(time.perf_counter() - self._start, 3)
