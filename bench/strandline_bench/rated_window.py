"""The window workload at a fixed rate: every row changes ten sliding windows, each purged when it closes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.events import Int64s
from strandline_bench.rated import Pace, RatedSource, Rows, mixed
from strandline_bench.rated_run import RatedWork
from strandline_bench.workload import WrongResultError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from strandline.operators.process.process_context import ProcessContext

WindowKeeping = Literal["entries", "window"]
WINDOW_MS: Final = 10_000
SLIDE_MS: Final = 1_000
_COUNTS: Final = "key long, window_start long, n long"


def rated_window(keeping: WindowKeeping, keys: int) -> RatedWork:
    """The workload over so many keys: with one state entry per key and window, or with the window operator."""
    if keys < 1:
        raise ConfigError("--keys must be at least 1")

    def check(output: Path, rows: int, pace: Pace, who: str) -> None:
        check_windows(output, rows, keys, pace, who)

    build = _entries if keeping == "entries" else _operator
    return RatedWork(keeping, WindowSource, {"keys": keys}, build, check, most_full_bytes=2.0)


def _timed(job: sl.Job, frame: DataFrame) -> sl.KeyedStream:
    # Rows come in the order of time from batch to batch, so the watermark need not stay behind.
    return job.source(frame, event_time="ts", watermark_delay=0).key_by("key")


def _entries(job: sl.Job, frame: DataFrame) -> sl.Stream:
    return _timed(job, frame).process(CountWindows(), _COUNTS, time_mode="event")


def _operator(job: sl.Job, frame: DataFrame) -> sl.Stream:
    windows = _timed(job, frame).window(sl.sliding(WINDOW_MS / 1000, SLIDE_MS / 1000), time="ts")
    return windows.aggregate(n=sl.count())


class CountWindows(sl.KeyedProcessor):
    """Counts the rows of every window in an entry of its own; a timer puts it out and purges it when it closes."""

    def open(self, context: ProcessContext) -> None:
        self.counts = context.map_state("counts", "window_start long", "n long")

    def process(self, key: tuple[Any, ...], rows: Iterator[Any], context: ProcessContext) -> None:
        counts = self.counts
        for row in rows:
            last = row.ms // SLIDE_MS * SLIDE_MS
            for start in range(last - WINDOW_MS + SLIDE_MS, last + SLIDE_MS, SLIDE_MS):
                counts.put(start, counts.get(start, 0) + 1)
                context.register_timer(start + WINDOW_MS)

    def on_timer(self, key: tuple[Any, ...], timestamp: int, context: ProcessContext) -> Iterator[tuple[Any, ...]]:
        start = timestamp - WINDOW_MS
        n = self.counts.get(start)
        self.counts.remove(start)
        yield key[0], start, n


class WindowSource(RatedSource):
    """Rows of a key and a time."""

    @classmethod
    def name(cls) -> str:
        return "strandline-bench-window"

    def schema(self) -> str:
        return "key long, ts timestamp, ms long"

    def rows(self) -> Rows:
        return WindowRows(int(self.options["keys"]))


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Keys drawn evenly; the time is that of arrival, once for Spark's watermark and once as a number."""

    keys: int

    def batch(self, numbers: Int64s, arrivals_us: Int64s) -> pa.RecordBatch:
        """The rows of these numbers."""
        times = pa.array(arrivals_us).view(pa.timestamp("us", "UTC"))
        return pa.record_batch({"key": drawn_keys(numbers, self.keys), "ts": times, "ms": arrivals_us // 1000})


def drawn_keys(numbers: Int64s, keys: int) -> Int64s:
    """The keys of these rows."""
    return (mixed(numbers) % np.uint64(keys)).astype(np.int64)


def check_windows(output: Path, rows: int, keys: int, pace: Pace, who: str) -> None:
    """Compare every window that the time of the last of `rows` rows has closed: its key, start and count.

    Raises `WrongResultError`.
    """
    codes, counts, first = expected_windows(rows, keys, pace)
    found = ds.dataset(output, format="parquet").to_table(columns=["key", "window_start", "n"])
    starts = found.column("window_start")
    if pa.types.is_timestamp(starts.type):
        starts = starts.cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    got = _codes(found.column("key").to_numpy(), starts.to_numpy(), keys, first)
    order = np.argsort(got)
    if not np.array_equal(got[order], codes):
        common = len(np.intersect1d(got, codes))
        raise WrongResultError(
            f"{who}: {len(got)} windows were put out, {len(codes)} are in the input, and {common} are in both"
        )
    wrong = int(np.count_nonzero(found.column("n").to_numpy()[order] != counts))
    if wrong:
        raise WrongResultError(f"{who}: n is wrong for {wrong} of {len(codes)} windows")


def expected_windows(rows: int, keys: int, pace: Pace) -> tuple[Int64s, Int64s, int]:
    """The closed windows as ascending codes of start and key, their counts, and the start that has code 0."""
    numbers = np.arange(rows)
    times = pace.arrivals_us(numbers) // 1000
    last = times // SLIDE_MS * SLIDE_MS
    first = int(last[0]) - WINDOW_MS
    row_keys = drawn_keys(numbers, keys)
    codes = []
    for shift in range(0, WINDOW_MS, SLIDE_MS):
        starts = last - shift
        closed = starts + WINDOW_MS <= times[-1]
        codes.append(_codes(row_keys[closed], starts[closed], keys, first))
    made, counts = np.unique(np.concatenate(codes), return_counts=True)
    return made, counts.astype(np.int64), first


def _codes(keys: Int64s, starts: Int64s, all_keys: int, first: int) -> Int64s:
    codes: Int64s = (starts - first) // SLIDE_MS * all_keys + keys
    return codes
