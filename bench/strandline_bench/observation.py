"""What it costs to be seen: a job with its page open and its metrics scraped, beside the same job without a server.

The jobs run one after the other, in turns: without a server, then watched, and again. A process of its own watches:
every second it asks for what the page asks for, and for the metrics. It has the same cores as the job.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from strandline.errors import ConfigError
from strandline_bench.report import machine
from strandline_bench.running import session
from strandline_bench.timing import Say
from strandline_bench.value_state import Measured, OperatorName, load_files
from strandline_bench.value_state import Parameters as Work
from strandline_bench.workload import InputFile, Workload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFF, WATCHED = "off", "watched"
PAGE = "jobs/{job}/facts?subtasks=false"
"""What the page asks for every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured, and how often."""

    rows: int = 2_000_000
    keys: int = 100_000
    batch_rows: int = 250_000
    turns: int = 3
    operator: OperatorName = "aggregate"
    parallelism: int = 2

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ConfigError("--turns must be at least 1")
        self.work()

    def work(self) -> Work:
        """The same sizes, as the workload takes them."""
        return Work(
            rows=self.rows,
            keys=self.keys,
            batch_rows=self.batch_rows,
            operators=(self.operator,),
            parallelism=self.parallelism,
        )


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Run the job in turns, check every result, and return all figures as plain values."""
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.rows // parameters.batch_rows)
    rates: dict[str, list[float]] = {OFF: [], WATCHED: []}
    answers: list[dict[str, Any]] = []
    try:
        workload = Workload(home / "files", parameters.keys, parameters.work().value_bytes)
        files = load_files(workload, parameters.work(), say)
        _one(spark, parameters, home / "warm-up", workload, files[:2], say, OFF)  # the first job warms up the JVM
        for turn in range(parameters.turns):
            for mode in (OFF, WATCHED) if turn % 2 == 0 else (WATCHED, OFF):
                rate, seen = _one(spark, parameters, home / f"{mode}-{turn}", workload, files, say, mode)
                rates[mode].append(rate)
                answers += [seen] if seen is not None else []
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    middle = {mode: median(some) for mode, some in rates.items()}
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "rows_per_s": rates,
        "median_rows_per_s": middle,
        "cost": round(1 - middle[WATCHED] / middle[OFF], 4),
        "watcher": answers,
        "verified": True,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    table = Table(
        "", "rows/s, turn by turn", "median", title="a job without a server, and watched", title_justify="left"
    )
    for mode, rates in result["rows_per_s"].items():
        table.add_row(mode, "  ".join(f"{rate:,.0f}" for rate in rates), f"{result['median_rows_per_s'][mode]:,.0f}")
    console.print(table)
    console.print(f"cost: {result['cost']:.1%} of the throughput")


def _one(
    spark: SparkSession,
    parameters: Parameters,
    home: Path,
    workload: Workload,
    files: list[InputFile],
    say: Say,
    mode: str,
) -> tuple[float, dict[str, Any] | None]:
    """The rate of one job in its median batch, and what its watcher saw."""
    options = {"rest_port": "off" if mode == OFF else 0}
    measured = Measured(parameters.operator, spark, parameters.work(), home, say, mode, options)
    watcher: list[subprocess.Popen[str]] = []

    def watch(url: str | None) -> None:
        if url is not None:
            command = [sys.executable, "-m", "strandline_bench.observation", url]
            watcher.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    try:
        job, figures = measured.load(files, lambda run: watch(run.ui_url))
        job.stop()
        measured.check(workload)
        seen = json.loads(watcher[0].communicate(timeout=30)[0]) if watcher else None
    finally:
        for process in watcher:
            process.kill()
            process.wait()
    return figures["throughput"]["steady_rows_per_s"], seen


def _watch(url: str) -> None:
    """Ask for the page's facts and the metrics every second until standard input ends, and print what was answered."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    base = url.rstrip("/") + "/"
    seen = {"requests": 0, "bytes": 0, "slowest_ms": 0.0}
    job = json.loads(_get(base + "jobs/overview"))["jobs"][-1]["jid"]
    while True:
        for path in (PAGE.format(job=job), "metrics"):
            began = time.monotonic()
            body = _get(base + path)
            seen["requests"] += 1
            seen["bytes"] += len(body)
            seen["slowest_ms"] = max(seen["slowest_ms"], round((time.monotonic() - began) * 1000, 1))
        if ended.wait(1.0):
            break
    seen["cpu_s"] = round(time.process_time(), 2)
    print(json.dumps(seen))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body


if __name__ == "__main__":
    _watch(sys.argv[1])
