"""The same rate of change on a growing number of keys: which figures grow with the state, and which do not.

For each number of keys a job of its own loads every key once. Then come batches of the same size, their keys drawn
evenly from all of them, and every batch ends with a completed checkpoint, so each checkpoint covers the same number of
changes however large the state is. The first of these batches warms up. The state is a value state of `value_bytes`
per key, read and written by an `ArrowProcessor`: user code that costs little, so that the state is what is measured.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.operator_entries import KeepArrow
from strandline_bench.report import machine, percentiles
from strandline_bench.running import completed, end_of, session
from strandline_bench.timing import Say, Stopwatch, batches_of, throughput, watched
from strandline_bench.workload import SCHEMA, InputFile, Workload, WrongResultError, offer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOAD_ROWS = 250_000
"""Rows of a batch while the keys are loaded."""
FIGURES = (
    "rows_per_s",
    "checkpoint_p50_ms",
    "checkpoint_p99_ms",
    "checkpointed_bytes",
    "full_bytes",
    "slots_rss_bytes",
)
"""What is compared between numbers of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The numbers of keys, and the number of changes per checkpoint."""

    keys: tuple[int, ...] = (1_000_000, 5_000_000, 20_000_000)
    batches: int = 30
    batch_rows: int = 50_000
    value_bytes: int = 100
    memory: str = "512mb"
    parallelism: int = 2

    def __post_init__(self) -> None:
        if not self.keys or min(self.keys) < 2:
            raise ConfigError("--keys needs one or more numbers of at least 2, such as --keys 1000000,5000000")
        if self.batches < 2:
            raise ConfigError("--batches must be at least 2: the first one only warms up")
        if min(self.batch_rows, self.value_bytes, self.parallelism) < 1:
            raise ConfigError("--batch-rows, --value-bytes and --parallelism must be at least 1")


class Keep(KeepArrow):
    """Counts the rows of every key and keeps the last value; puts out only sums over many keys."""

    def process(self, table: pa.Table, context: sl.ArrowContext) -> pa.Table:
        _rows, known, n = self.keep(table)
        return pa.table({"new": [known.column("n").null_count], "total": [pc.sum(n).as_py()]})


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure every number of keys, check the results, and return all figures as plain values.

    `ratios` compares each number of keys with the first. Raises `WrongResultError` where state was lost.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, max(parameters.keys) // LOAD_ROWS + parameters.batches)
    try:
        sizes = [_measure(spark, parameters, keys, home / str(at), say) for at, keys in enumerate(parameters.keys)]
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    first = sizes[0]
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "sizes": sizes,
        "ratios": [
            {"keys": size["keys"] / first["keys"], **{name: round(size[name] / first[name], 3) for name in FIGURES}}
            for size in sizes
        ],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table, a column for each number of keys."""
    sizes, ratios = result["sizes"], result["ratios"]
    table = Table(title="growth of the state", title_justify="left")
    table.add_column("")
    for size in sizes:
        table.add_column(f"{size['keys']:,} keys", justify="right")
    for text, name, unit in (
        ("rows/s", "rows_per_s", 1.0),
        ("checkpoint p50 (ms)", "checkpoint_p50_ms", 1.0),
        ("checkpoint p99 (ms)", "checkpoint_p99_ms", 1.0),
        ("uploaded, median (MB)", "checkpointed_bytes", 1e6),
        ("whole state (MB)", "full_bytes", 1e6),
        ("memory of the slots, peak (MB)", "slots_rss_bytes", 1e6),
    ):
        cells = (f"{size[name] / unit:,.1f} (×{ratio[name]:.2f})" for size, ratio in zip(sizes, ratios, strict=True))
        table.add_row(text, *cells)
    table.add_row("before the first row (MB)", *(f"{size['slots_rss_at_start_bytes'] / 1e6:,.1f}" for size in sizes))
    table.add_row("state_memory (MB)", *(f"{size['state_memory_bytes'] / 1e6:,.1f}" for size in sizes))
    for text, name in (
        ("memory ÷ state_memory", "rss_to_state_memory"),
        ("without that at the start", "state_rss_to_state_memory"),
    ):
        table.add_row(text, *(f"{size[name]:.2f}" for size in sizes))
    console.print(table)


def _measure(spark: SparkSession, parameters: Parameters, keys: int, home: Path, say: Say) -> dict[str, Any]:
    workload = Workload(home / "files", keys, parameters.value_bytes)
    order = np.random.default_rng(11).permutation(keys)
    step = min(LOAD_ROWS, -(-keys // 2))
    load = [workload.of_keys(order[at : at + step]) for at in range(0, keys, step)]
    changes = [workload.uniform(parameters.batch_rows) for _ in range(parameters.batches)]
    (home / "in").mkdir()
    config = sl.Config(
        checkpoint_dir=str(home / "checkpoints"),
        checkpoint_every_batch=True,
        state_memory=parameters.memory,
        parallelism=parameters.parallelism,
    )
    job = sl.Job("growth", spark, config)
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    needed = job.source(reader.parquet(str(home / "in"))).transform(lambda frame: frame.select("key", "value"))
    result = needed.key_by("key").process(Keep(), "new long, total long", rows="arrow")
    result.sink(sl.ParquetSink(str(home / "out")))
    run = job.start()
    query = spark.streams.active[0]
    with _slots_rss(run) as rss:
        at_start = rss.now()
        watch = Stopwatch()
        offer(load, home / "in")
        with watched(query, f"{keys:,} keys: loading", load, say):
            run.process_all_available()
        load_s = watch.seconds
        known = max(checkpoint.id for checkpoint in completed(run))
        offer(changes, home / "in")
        with watched(query, f"{keys:,} keys: changes", [*load, *changes], say):
            run.process_all_available()
    # The checkpoint of the warm-up batch is left out as well.
    taken = [checkpoint for checkpoint in completed(run) if checkpoint.id > known][1:]
    batches = [batch for batch in batches_of(query) if batch.rows][len(load) :]
    speed = throughput(batches, changes, end_of(taken[-1]))
    run.stop()
    _check(home / "out", keys, [*load, *changes])
    shutil.rmtree(home)
    durations = percentiles([checkpoint.barrier_to_completed_ms for checkpoint in taken])
    return {
        "keys": keys,
        "load_s": load_s,
        "rows_per_s": speed["rows_per_s"],
        "checkpoints": len(taken),
        "checkpoint_p50_ms": durations["p50"],
        "checkpoint_p99_ms": durations["p99"],
        "sync_p50_ms": float(np.median([checkpoint.sync_ms for checkpoint in taken])),
        "async_p50_ms": float(np.median([checkpoint.async_ms for checkpoint in taken])),
        "checkpointed_bytes": float(np.median([checkpoint.checkpointed_bytes for checkpoint in taken])),
        "full_bytes": taken[-1].full_bytes,
        "slots_rss_at_start_bytes": at_start,
        "slots_rss_bytes": rss.peak,
        "state_memory_bytes": config.state_memory,
        "rss_to_state_memory": round(rss.peak / config.state_memory, 3),
        "state_rss_to_state_memory": round((rss.peak - at_start) / config.state_memory, 3),
        "throughput": speed,
        "verified": True,
    }


def _check(output: Path, keys: int, files: Sequence[InputFile]) -> None:
    """Check that every key was new once, and that every count continued the count in state."""
    counts = np.zeros(keys, np.int64)
    wanted = 0
    for file in files:
        here = pq.read_table(file.path, columns=["key"]).column("key").to_numpy()
        np.add.at(counts, here, 1)
        wanted += int(counts[np.unique(here)].sum())
    found = ds.dataset(output, format="parquet").to_table()
    new, total = (pc.sum(found.column(name)).as_py() for name in ("new", "total"))
    if (new, total) != (keys, wanted):
        raise WrongResultError(
            f"growth, {keys} keys: {new} keys were new to the state, and the counts add up to {total}, not to {wanted}"
        )


class _Rss:
    """The resident memory of the slots' processes, all together."""

    def __init__(self, run: sl.JobRun) -> None:
        self._run = run
        self.peak = 0

    def now(self) -> int:
        """The memory in use now. `peak` is the greatest value so far."""
        total = 0
        for slot in self._run.processes().slots:
            try:
                total += psutil.Process(slot.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue  # it has just been replaced
        self.peak = max(self.peak, total)
        return total


@contextmanager
def _slots_rss(run: sl.JobRun) -> Iterator[_Rss]:
    """Watch the memory of the slots from a thread of its own."""
    rss = _Rss(run)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            rss.now()

    thread = threading.Thread(target=watch, daemon=True, name="bench-memory")
    thread.start()
    try:
        yield rss
    finally:
        ended.set()
        thread.join()
        rss.now()
