"""What it costs to be seen: one job whose page is open and whose metrics are scraped in every other phase.

A phase is a number of batches and the checkpoint that covers them. Two phases that follow each other are a pair: in one
a process beside the job asks every second for what the page asks for, and for the metrics; in the other it is silent.
The order changes from pair to pair. The cost is the median over the pairs, so that slow changes of the job or of the
machine do not count. Every phase is measured twice: by its throughput, and by the CPU seconds of all processes of the
job. The watching process has the same cores as the job, but its own CPU seconds are not the job's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError, StrandlineError
from strandline.rest.server import THREAD
from strandline_bench.report import machine
from strandline_bench.running import session
from strandline_bench.timing import Say
from strandline_bench.value_state import Measured, OperatorName, load_files
from strandline_bench.value_state import Parameters as Work
from strandline_bench.workload import InputFile, Workload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFF, WATCHED = "off", "watched"
EVERY = 1.0
"""How many seconds the watcher waits between two looks."""
WARM_UP = 3
"""How many phases are not counted: the JVM compiles what it runs often."""
RESAMPLES = 10_000
"""How many samples the confidence interval is estimated from."""
OBSERVERS = ("facts of ", THREAD, "AnyIO")
"""How the names of the threads begin that take the facts of a job and answer requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured, and how often."""

    rows: int = 2_000_000
    keys: int = 100_000
    batch_rows: int = 250_000
    turns: int = 60
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


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase took."""

    rows_per_s: float
    cpu_s_per_million_rows: float
    observers_cpu_share: float
    """The CPU seconds of the threads that take facts and answer requests, as a share of all CPU seconds."""


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Run the job phase by phase, check its result, and return all figures as plain values."""
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.rows // parameters.batch_rows)
    try:
        workload = Workload(home / "files", parameters.keys, parameters.work().value_bytes)
        files = load_files(workload, parameters.work(), say)
        phases, seen = _phases(spark, parameters, home, workload, files, say)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    rates = {mode: [phase.rows_per_s for phase in some] for mode, some in phases.items()}
    cpu = {mode: [phase.cpu_s_per_million_rows for phase in some] for mode, some in phases.items()}
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "phases": {mode: [asdict(phase) for phase in some] for mode, some in phases.items()},
        "median_rows_per_s": {mode: round(float(np.median(some)), 1) for mode, some in rates.items()},
        "median_cpu_s_per_million_rows": {mode: round(float(np.median(some)), 4) for mode, some in cpu.items()},
        "cost": _cost(rates[OFF], rates[WATCHED]),
        "cpu_cost": _cost(cpu[WATCHED], cpu[OFF]),
        "observers_cpu_share": {
            mode: round(float(np.median([phase.observers_cpu_share for phase in some])), 4)
            for mode, some in phases.items()
        },
        "watcher": seen,
        "verified": True,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    table = Table("", "rows/s", "CPU s per million rows", "CPU of the threads that observe", title_justify="left")
    table.title = f"medians of {result['parameters']['turns']} phases each"
    for mode in (OFF, WATCHED):
        rate, cpu = result["median_rows_per_s"][mode], result["median_cpu_s_per_million_rows"][mode]
        table.add_row(mode, f"{rate:,.0f}", f"{cpu:.3f}", f"{result['observers_cpu_share'][mode]:.2%}")
    console.print(table)
    for name, text in (("cost", "throughput"), ("cpu_cost", "CPU")):
        cost = result[name]
        console.print(f"{text}: {cost['median']:.2%} (95 % confidence: {cost['low']:.2%} to {cost['high']:.2%})")


def _cost(better: Sequence[float], worse: Sequence[float]) -> dict[str, float]:
    """By how much `worse` is worse: the median over the pairs, and its 95 % confidence interval by bootstrap."""
    costs = 1 - np.array(worse) / np.array(better)
    drawn = np.random.default_rng(7).choice(costs, (RESAMPLES, len(costs)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {"median": round(float(np.median(costs)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


# --- the job ---------------------------------------------------------------------------------------------------------


def _phases(
    spark: SparkSession,
    parameters: Parameters,
    home: Path,
    workload: Workload,
    files: Sequence[InputFile],
    say: Say,
) -> tuple[dict[str, list[Phase]], dict[str, Any]]:
    """The phases of one job, and what its watcher saw."""
    phases: dict[str, list[Phase]] = {OFF: [], WATCHED: []}
    measured = Measured(parameters.operator, spark, parameters.work(), home / "job", say, options={"rest_port": 0})
    copies = _copies(files, home / "files")
    job, _figures = measured.load(next(copies))  # starts the processes, and warms up the JVM
    try:
        with _watcher(job.ui_url) as watcher:
            for _ in range(WARM_UP):
                _phase(job, watcher, measured, next(copies), parameters.rows)
            for turn in range(parameters.turns):
                for mode in (OFF, WATCHED) if turn % 2 == 0 else (WATCHED, OFF):
                    watcher.tell(mode)
                    phases[mode].append(_phase(job, watcher, measured, next(copies), parameters.rows))
                say("pairs of phases", turn + 1, parameters.turns)
            seen = watcher.end()
        job.stop()
    except BaseException:
        job.cancel()
        raise
    measured.check(workload)
    return phases, seen


def _copies(files: Sequence[InputFile], folder: Path) -> Iterator[list[InputFile]]:
    """The same input again and again, each time as other files."""
    numbers = count(len(files))
    yield list(files)
    while True:
        copies = []
        for file in files:
            path = folder / f"part-{next(numbers):06d}.parquet"
            os.link(file.path, path)
            copies.append(replace(file, path=path))  # its rows are those of the file with this number
        yield copies


def _phase(job: sl.JobRun, watcher: Watcher, measured: Measured, files: list[InputFile], rows: int) -> Phase:
    before, observers, began = _cpu_seconds(job, watcher), _observers(), time.monotonic()
    measured.offer(files)
    job.process_all_available()
    seconds = time.monotonic() - began
    cpu = _cpu_seconds(job, watcher) - before
    share = (_observers() - observers) / cpu
    return Phase(round(rows / seconds, 1), round(cpu / rows * 1e6, 4), round(share, 4))


def _cpu_seconds(job: sl.JobRun, watcher: Watcher) -> float:
    """The CPU seconds so far of all processes of the job: driver, JVM, Python workers, task managers and slots."""
    found = job.processes().pids
    ours = [psutil.Process(), *map(psutil.Process, found)]
    everyone = {one for process in ours for one in (process, *process.children(recursive=True))}
    total = 0.0
    for process in everyone:
        if process.pid != watcher.pid:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _observers() -> float:
    """The CPU seconds so far of the threads in this process that take facts and answer requests."""
    ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(OBSERVERS)}
    return sum(one.user_time + one.system_time for one in psutil.Process().threads() if one.id in ours)


# --- the watcher -----------------------------------------------------------------------------------------------------


class Watcher:
    """A process that looks at the job while it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def tell(self, mode: str) -> None:
        """Look from now on, or stop looking. Returns when the watcher does so."""
        self._say(mode)

    def end(self) -> dict[str, Any]:
        """What it saw."""
        answer: dict[str, Any] = json.loads(self._say("end"))
        return answer

    def _say(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise StrandlineError("the process that watches the job has ended; see its error above")
        return answer


@contextmanager
def _watcher(url: str | None) -> Iterator[Watcher]:
    if url is None:
        raise StrandlineError("the job has no page, so nothing can be measured; see the warning in its log")
    command = [sys.executable, "-m", "strandline_bench.observation", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Watcher(process)
    finally:
        process.kill()
        process.communicate()


def _watch(url: str) -> None:
    """Do what standard input says, and answer every line: look every second, be silent, or end."""
    words: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        words.put("end")

    threading.Thread(target=listen, daemon=True).start()
    base = url.rstrip("/") + "/"
    page = _Page(json.loads(_get(base + "jobs/overview"))["jobs"][-1]["jid"])
    seen = {"requests": 0, "bytes": 0, "slowest_ms": 0.0}
    mode = OFF
    while mode != "end":
        try:
            mode = words.get(timeout=EVERY if mode == WATCHED else None)
            if mode != "end":
                print(mode, flush=True)
        except Empty:
            pass
        if mode == WATCHED:
            for path in (page.path(), "metrics"):
                began = time.monotonic()
                body = _get(base + path)
                seen["requests"] += 1
                seen["bytes"] += len(body)
                seen["slowest_ms"] = max(seen["slowest_ms"], round((time.monotonic() - began) * 1000, 1))
                if path != "metrics":
                    page.take(json.loads(body))
    seen["cpu_s"] = round(time.process_time(), 2)
    print(json.dumps(seen), flush=True)


class _Page:
    """Asks for what the page asks for every second: what is new since the last time."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._after = self._samples_after = 0

    def path(self) -> str:
        wanted = f"after={self._after}&samples_after={self._samples_after}"
        return f"jobs/{self._job}/facts?subtasks=false&checkpoints=10000&{wanted}"

    def take(self, facts: dict[str, Any]) -> None:
        unsettled = [one["id"] for one in facts["checkpoints"]["history"] if one["status"] == "in_progress"]
        newest = max((one["id"] for one in facts["checkpoints"]["history"]), default=self._after)
        self._after = min([newest, *unsettled])
        self._samples_after = max((one["time_ms"] for one in facts["samples"]), default=self._samples_after)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body


if __name__ == "__main__":
    _watch(sys.argv[1])
