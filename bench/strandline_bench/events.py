"""Input with event times, and the windows, sessions, first rows and pairs that it must lead to.

File `i` covers the `i`-th five seconds of event time, in no order inside. So no row is ever late, and what comes out in
the end does not depend on how the rows were cut into batches. Times are even milliseconds and the gap of a session is
odd: two rows are never exactly a gap apart, which systems may see either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from strandline_bench.workload import SCHEMA, InputFile, Workload, WrongResultError

EVENT_SCHEMA: Final = f"{SCHEMA}, ts timestamp"
SPAN_MS: Final = 5_000
"""The event time that one file, so one batch, covers."""
DELAY_MS: Final = 5_000
"""The delay of the watermark, and the time for which deduplication remembers a key: Spark has one setting for both."""
WINDOW_MS: Final = 10_000
SLIDE_MS: Final = 2_000
GAP_MS: Final = 10_001
APART_MS: Final = 5_000
"""The largest distance in event time between the two rows of a pair."""
LEFT_BELOW: Final = 500
"""Rows with a smaller `x` are the left side of the join, the others the right side."""
_FIRST_MS: Final = 1_700_000_000_000

Int64s = npt.NDArray[np.int64]


class EventWorkload(Workload):
    """Input files whose rows also have a time, `ts`."""

    def _columns(self, keys: Int64s, number: int) -> dict[str, Any]:
        times = _FIRST_MS + number * SPAN_MS + 2 * self._rng.integers(0, SPAN_MS // 2, len(keys))
        return {**super()._columns(keys, number), "ts": pa.array(times * 1000, pa.timestamp("us", "UTC"))}


class ExpectedEvents:
    """What event-time queries over some input files must have put out. Every check raises `WrongResultError`."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        rows = pa.concat_tables([pq.read_table(file.path, columns=["key", "x", "ts"]) for file in files])
        self._keys = _ints(rows, "key")
        self._x = _ints(rows, "x")
        self._times = _times(rows, "ts")
        self._watermark = int(self._times.max()) - DELAY_MS
        self._stride = int(self._times.max()) + 4 * (WINDOW_MS + GAP_MS + SPAN_MS)

    def check_windows(self, output: Path, slide_ms: int, who: str) -> None:
        """Compare every window that the watermark has closed: its key, start, count and sum."""
        shifts = range(0, WINDOW_MS, slide_ms)
        starts = np.concatenate([self._times // slide_ms * slide_ms - shift for shift in shifts])
        closed = starts + WINDOW_MS <= self._watermark
        codes = self._codes(np.tile(self._keys, len(shifts)), starts)[closed]
        x = np.tile(self._x, len(shifts))[closed]
        order = np.argsort(codes)
        begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
        self._check_totals(output, codes[order][begins], begins, x[order], WINDOW_MS, who)

    def check_sessions(self, output: Path, who: str) -> None:
        """Compare every session that the watermark has closed: its key, start, end, count and sum."""
        order = np.lexsort((self._times, self._keys))
        keys, times, x = self._keys[order], self._times[order], self._x[order]
        new = (np.diff(keys, prepend=-1) != 0) | (np.diff(times, prepend=0) > GAP_MS)
        begins = np.flatnonzero(new)
        ends = times[np.append(begins[1:], len(times)) - 1] + GAP_MS
        closed = ends <= self._watermark
        rows = np.repeat(closed, np.diff(begins, append=len(times)))
        kept = np.flatnonzero(new[rows])
        begin_times = times[begins][closed]
        codes = self._codes(keys[begins][closed], begin_times)
        self._check_totals(output, codes, kept, x[rows], ends[closed] - begin_times, who)

    def check_first_rows(self, output: Path, who: str) -> None:
        """Check that rows of a key are never put out twice while it is remembered, and always once it is forgotten.

        Which row of a batch is the first is not defined on Spark, so rows cannot be compared one by one.
        """
        found = _read(output, ["key", "ts"])
        codes = np.sort(self._codes(_ints(found, "key"), _times(found, "ts")))
        rows = np.sort(self._codes(self._keys, self._times))
        strangers = len(codes) - int(np.count_nonzero(_found_in(rows, codes)))
        if strangers:
            raise WrongResultError(f"{who}: {strangers} of {len(codes)} rows are not in the input")
        twice = int(np.count_nonzero(np.diff(codes) <= DELAY_MS))
        if twice:
            raise WrongResultError(f"{who}: {twice} rows are duplicates of a row that was put out shortly before")
        # A key is forgotten by the watermark, which follows the rows by its delay and up to three batches.
        first = np.searchsorted(codes, rows - (2 * DELAY_MS + 3 * SPAN_MS))
        last = np.searchsorted(codes, rows + SPAN_MS, side="right")
        lost = int(np.count_nonzero(first == last))
        if lost:
            raise WrongResultError(f"{who}: {lost} of {len(rows)} rows were dropped without a row to be duplicates of")

    def check_pairs(self, output: Path, who: str) -> None:
        """Compare how many pairs every key has, and the sum of their right sides; check that none are too far apart."""
        found = _read(output, ["key", "ts", "right_ts", "right_x"])
        apart = np.abs(_times(found, "ts") - _times(found, "right_ts"))
        wrong = int(np.count_nonzero(apart > APART_MS))
        if wrong:
            raise WrongResultError(f"{who}: the two rows of {wrong} pairs are too far apart")
        left = self._x < LEFT_BELOW
        lefts = np.sort(self._codes(self._keys[left], self._times[left]))
        rights = self._codes(self._keys[~left], self._times[~left])
        partners = np.searchsorted(lefts, rights + APART_MS, side="right") - np.searchsorted(lefts, rights - APART_MS)
        size = int(self._keys.max()) + 1
        keys = self._keys[~left]
        for what, here, wanted in (
            ("pairs", np.ones(found.num_rows), partners),
            ("the sum of right_x", _ints(found, "right_x"), partners * self._x[~left]),
        ):
            got = np.bincount(_ints(found, "key"), weights=here, minlength=size)
            wrong = int(np.count_nonzero(got != np.bincount(keys, weights=wanted, minlength=size)))
            if wrong:
                raise WrongResultError(f"{who}: {what} is wrong for {wrong} of {size} keys")

    def _check_totals(
        self, output: Path, codes: Int64s, begins: Int64s, x: Int64s, length: Int64s | int, who: str
    ) -> None:
        """Compare windows by key and start, in that order; the rows of each begin in `x` at `begins`."""
        found = _read(output, ["key", "window_start", "window_end", "n", "s"])
        starts = _times(found, "window_start")
        got = self._codes(_ints(found, "key"), starts)
        order = np.argsort(got)
        if len(got) != len(codes) or (got[order] != codes).any():
            common = int(np.count_nonzero(_found_in(np.sort(got), codes)))
            raise WrongResultError(
                f"{who}: {len(got)} windows were put out, {len(codes)} are in the input, and {common} are in both"
            )
        wanted = {
            "length": np.broadcast_to(length, len(codes)),
            "n": np.diff(begins, append=len(x)),
            "s": np.add.reduceat(x, begins) if len(begins) else x[:0],
        }
        lengths = _times(found, "window_end") - starts
        for what, here in (("length", lengths), ("n", _ints(found, "n")), ("s", _ints(found, "s"))):
            wrong = int(np.count_nonzero(here[order] != wanted[what]))
            if wrong:
                raise WrongResultError(f"{who}: {what} is wrong for {wrong} of {len(codes)} windows")

    def _codes(self, keys: Int64s, times: Int64s) -> Int64s:
        """One number for a key and a time, in the order of both; times of different keys are far apart."""
        codes: Int64s = keys * self._stride + times + 2 * WINDOW_MS
        return codes


def _read(output: Path, columns: list[str]) -> pa.Table:
    return ds.dataset(output, format="parquet").to_table(columns=columns)


def _ints(table: pa.Table, column: str) -> Int64s:
    numbers: Int64s = table.column(column).to_numpy()
    return numbers


def _times(table: pa.Table, column: str) -> Int64s:
    """Milliseconds since the beginning of the first file."""
    milliseconds = table.column(column).cast(pa.timestamp("ms", "UTC")).cast(pa.int64()).to_numpy()
    times: Int64s = milliseconds - _FIRST_MS
    return times


def _found_in(ascending: Int64s, wanted: Int64s) -> npt.NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    there: npt.NDArray[np.bool_] = ascending[at] == wanted
    return there
