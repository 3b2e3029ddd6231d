"""What one slot's window operators manage on one core, without Spark: rows and windows per second as JSON.

Run it as `python bench/micro_windows.py [--backend rocksdb|heap] [--keys N] [--rows N] [--batches N] [--profile]`.
Event time goes on by 1 s with every batch, rows are up to 2 s out of order, and the watermark follows 2 s behind.
`rows_per_cpu_s` is of batches whose watermark stands still, so that they only add rows; `windows_per_cpu_s` of batches
without rows, in which the watermark goes on. Only `operator.run` counts; `with_apply` adds the commit's write. Seconds
are CPU seconds of the slot's thread: they hardly depend on what else runs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strandline.operators.aggregate import functions as agg
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SubtaskInfo
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, session, sliding, tumbling
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import open_backend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema

INPUT = parse_schema("k long, t timestamp, x long")
RECORD_BATCH = 10_000
SPECS: dict[str, SlidingWindow | SessionWindow] = {
    "tumbling": tumbling("10s"),
    "sliding": sliding("10s", "1s"),
    "session": session("5s"),
}


def batches(random: np.random.Generator, rows: int, keys: int, second: int) -> list[pa.RecordBatch]:
    """Rows of one second as Spark would send them."""
    made = []
    for begin in range(0, rows, RECORD_BATCH):
        count = min(RECORD_BATCH, rows - begin)
        drawn = random.integers(0, keys, count)
        times = (second * 1_000_000 + random.integers(-2_000_000, 1_000_000, count)).view("M8[us]")
        groups = ((drawn * np.int64(0x5851F42D4C957F2D)) >> 40) % 128
        made.append(
            pa.RecordBatch.from_pydict(
                {
                    "k": drawn,
                    "t": pa.array(times, pa.timestamp("us", "UTC")),
                    "x": drawn % 100,
                    KEY_GROUP_COLUMN: groups.astype(np.int32),
                }
            )
        )
    return made


class Bench:
    """One operator over a backend, and how long its batches take."""

    def __init__(self, operator: WindowOperator, backend: StateBackend, spill: Path) -> None:
        self._operator = operator
        self._backend = backend
        self._spill = spill
        self._batch = 0
        self._watermark: int | None = None
        operator.open(SubtaskInfo("bench", operator.uid, 0, 1, 128))

    def run(self, rows: list[pa.RecordBatch], watermark: int | None) -> tuple[float, float, int]:
        """One batch; gives the CPU seconds of its run, those of its commit, and the rows that came out."""
        changes = ChangeSet(self._backend, 1 << 30, self._spill)
        started = time.thread_time()
        info = BatchInfo(self._batch, 0, watermark, self._watermark)
        produced = sum(out.num_rows for out in self._operator.run(iter(rows), changes, info))  # type: ignore[union-attr]
        ran = time.thread_time()
        for keys, values in changes.chunks():
            self._backend.apply(keys, values)
        self._batch += 1
        self._watermark = watermark
        return ran - started, time.thread_time() - ran, produced


def measure(name: str, emit: Any, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one kind of window."""
    folder = Path(tempfile.mkdtemp(prefix="micro-windows-"))
    random = np.random.default_rng(7)
    aggregates = {"n": agg.count(), "total": agg.sum("x")}
    operator = WindowOperator(name, ["k"], INPUT, SPECS[name], "t", aggregates, emit=emit)
    profile = cProfile.Profile(time.thread_time)
    try:
        backend = open_backend(args.backend, folder / "db", memory=args.memory << 20)
        bench = Bench(operator, backend, folder)
        adding: list[tuple[float, float, int]] = []
        closing: list[tuple[float, float, int]] = []
        watermark = None
        for second in range(1000, 1000 + args.batches):
            rows = batches(random, args.rows // args.batches, args.keys, second)
            if args.profile == name:
                profile.enable()
            adding.append(bench.run(rows, watermark))
            watermark = (second - 2) * 1000
            closing.append(bench.run([], watermark))
            profile.disable()
        close_all = bench.run([], 10**7)
        if args.profile == name:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
        backend.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ran, applied, updated = map(sum, zip(*adding, strict=True))
    close, close_applied, closed = map(sum, zip(*closing, strict=True))
    figures = {
        "rows_per_cpu_s": round(args.rows / ran),
        "with_apply_rows_per_cpu_s": round(args.rows / (ran + applied)),
        "overall_rows_per_cpu_s": round(args.rows / (ran + applied + close + close_applied)),
        "windows": closed + updated,
    }
    if closed:
        figures |= {
            "windows_per_cpu_s": round(closed / close),
            "with_apply_windows_per_cpu_s": round(closed / (close + close_applied)),
            "close_all_windows_per_cpu_s": round(close_all[2] / close_all[0]),
            "close_all_with_apply_windows_per_cpu_s": round(close_all[2] / (close_all[0] + close_all[1])),
        }
    return figures


def main() -> None:
    """Parse options, measure, print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="rocksdb")
    parser.add_argument("--memory", type=int, default=256, help="MiB for the backend")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--emit", default="close", choices=["close", "update"])
    parser.add_argument("--only", choices=list(SPECS))
    parser.add_argument("--profile", choices=list(SPECS))
    args = parser.parse_args()
    figures: dict[str, Any] = {"backend": args.backend, "keys": args.keys, "rows": args.rows, "emit": args.emit}
    for name in SPECS:
        if args.only in (None, name):
            figures[name] = measure(name, args.emit, args)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
