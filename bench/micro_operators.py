"""What one slot's operators manage on one core, without Spark: rows per second as JSON.

Run it as `python bench/micro_operators.py [--backend rocksdb|heap] [--keys N] [--rows N] [--batches N] [--profile]`.
State is filled with every key first; then batches of rows over uniformly drawn keys are run, sealed and applied.
Only `operator.run` counts for `rows_per_s`, the median over batches; `with_apply_rows_per_s` adds the commit's write to
the backend. `rows_per_cpu_s` divides by the CPU time of the slot's thread: it hardly depends on what else runs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import open_backend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema

INPUT = StructType([StructField("k", LongType()), StructField("x", LongType())])
RECORD_BATCH = 10_000


class Payload(KeyedProcessor):
    """Reads, changes and writes a counter with a string of 100 characters per row."""

    def open(self, context: ProcessContext) -> None:
        self.state = context.value_state("s", "n long, payload string")

    def process(self, key: tuple[Any, ...], rows: Iterator[Any], context: ProcessContext) -> Iterator[Any]:
        for row in rows:
            n, _ = self.state.get() or (0, "")
            n += row.x
            self.state.update((n, f"{n:0100d}"))
            yield (*key, n)


def batches(keys: np.ndarray[Any, Any], in_order: bool) -> Iterator[pa.RecordBatch]:
    """Rows of `keys` as Spark would send them."""
    if in_order:
        keys = np.sort(keys)
    groups = ((keys * np.int64(0x5851F42D4C957F2D)) >> 40) % 128
    for at in range(0, len(keys), RECORD_BATCH):
        part = slice(at, at + RECORD_BATCH)
        columns = {"k": keys[part], "x": keys[part] % 100, KEY_GROUP_COLUMN: groups[part].astype(np.int32)}
        yield pa.RecordBatch.from_pydict(columns)


def run_once(
    operator: Operator, backend: StateBackend, keys: Any, batch: int, spill: Path
) -> tuple[float, float, float, int]:
    """Run one batch and apply it; gives the seconds of both, the CPU seconds of the run and the rows that came out."""
    rows = list(batches(keys, operator.sorted_input))
    changes = ChangeSet(backend, 1 << 30, spill)
    started, worked = time.perf_counter(), time.thread_time()
    produced = sum(out.num_rows for out in operator.run(iter(rows), changes, BatchInfo(batch, 0)))  # type: ignore[union-attr]
    ran, worked = time.perf_counter(), time.thread_time() - worked
    for chunk_keys, values in changes.chunks():
        backend.apply(chunk_keys, values)
    return ran - started, time.perf_counter() - ran, worked, produced


def measure(operator: Operator, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one operator."""
    folder = Path(tempfile.mkdtemp(prefix="micro-operators-"))
    random = np.random.default_rng(7)
    try:
        backend = open_backend(args.backend, folder / "db", memory=args.memory << 20)
        operator.open(SubtaskInfo("bench", operator.uid, 0, 1, 128))
        everyone = random.permutation(args.keys)
        for batch, part in enumerate(np.array_split(everyone, max(1, args.keys // 250_000))):
            run_once(operator, backend, part, batch, folder)
        profile = cProfile.Profile() if args.profile else None
        times = []
        for batch in range(args.batches):
            keys = random.integers(0, args.keys, args.rows)
            if profile:
                profile.enable()
            times.append(run_once(operator, backend, keys, 1000 + batch, folder))
            if profile:
                profile.disable()
        if profile:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
        backend.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ran, applied, worked = (statistics.median(figures) for figures in list(zip(*times, strict=True))[:3])
    return {
        "rows_per_s": round(args.rows / ran),
        "rows_per_cpu_s": round(args.rows / worked),
        "with_apply_rows_per_s": round(args.rows / (ran + applied)),
        "rows_out": times[-1][3],
    }


def main() -> None:
    """Parse options, measure, print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="rocksdb")
    parser.add_argument("--memory", type=int, default=256, help="MiB for the backend")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--only", choices=["aggregate", "process"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {"backend": args.backend, "keys": args.keys, "rows": args.rows}
    if args.only != "process":
        operator = AggregateOperator("aggregate", ["k"], INPUT, {"n": agg.count(), "total": agg.sum("x")})
        figures["aggregate"] = measure(operator, args)
    if args.only != "aggregate":
        processor = ProcessOperator("process", Payload(), ["k"], INPUT, parse_schema("k long, n long"))
        figures["process"] = measure(processor, args)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
