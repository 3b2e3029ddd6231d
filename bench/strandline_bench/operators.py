"""Every operator next to Spark's own counterpart: rows per second, from one run on the same input files.

All rows are written as Parquet files before anything is measured; a file is a micro-batch. An operator and its
counterpart run one after the other in the same Spark application, each from an empty state into Parquet files. Both are
timed by Spark's progress reports in the same way: the rows of all batches but the first, which warms up, divided by the
time from the start of the second batch to the end of the last batch with rows; ours only ends when a checkpoint that
covers this batch is completed, so that its state is durable, as Spark's is after every batch. Starting Spark, a job or
a query is outside, and so is the batch without rows that closes the last windows. Every output is compared with a batch
computation over the input.

`transformWithState` is too slow for all rows and gets fewer, in smaller batches. Its state stays small, which favours
it, and the fixed cost of a batch weighs more, which does not; `same_input` is false for such a ratio.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.checkpoint.batch import batch_id
from strandline.errors import ConfigError
from strandline_bench.events import EVENT_SCHEMA, EventWorkload, ExpectedEvents
from strandline_bench.operator_entries import ENTRIES, Entry, Peer, Read, Results
from strandline_bench.report import machine
from strandline_bench.running import completed, end_of, session
from strandline_bench.spark_peer import few_files, peer_session, timed
from strandline_bench.timing import Say, batches_of, throughput, watched
from strandline_bench.workload import Expected, InputFile, offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES = tuple(entry.name for entry in ENTRIES)
SLOW_FACTOR = 10
"""A slow operator of Strandline gets this many times `peer_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured, and how large it is."""

    rows: int = 2_000_000
    keys: int = 1_000_000
    batches: int = 8
    hot: float = 0.0
    """The share of the rows that have one of a few keys."""
    value_bytes: int = 100
    only: tuple[str, ...] = NAMES
    peer: bool = True
    peer_rows: int = 20_000
    interval: str = "1s"
    memory: str = "512mb"
    parallelism: int = 2

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"--only {name}: no such operator; {hint}There are {', '.join(NAMES)}.")
        if min(self.keys, self.value_bytes, self.parallelism) < 1:
            raise ConfigError("--keys, --value-bytes and --parallelism must be at least 1")
        if self.batches < 2 or self.rows < self.batches:
            raise ConfigError("--batches must be at least 2, for the first one only warms up, and --rows not less")
        if not 0 <= self.hot <= 1:
            raise ConfigError(f"--hot {self.hot:g} is a share of the rows, from 0 to 1")
        if self.peer_rows < 8:
            raise ConfigError("--peer-rows must be at least 8")


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure the operators and their counterparts, check every result, and return all figures as plain values.

    Raises `WrongResultError` when an output differs from the batch computation.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.batches)
    try:
        bench = _Bench(spark, parameters, home, say)
        operators: dict[str, Any] = {}
        skipped: dict[str, str] = {}
        for entry in ENTRIES:
            missing = entry.missing() if entry.name in parameters.only else None
            if missing is not None:
                skipped[entry.name] = f"the module {missing} is not installed"
            elif entry.name in parameters.only:
                operators[entry.name] = bench.compare(entry)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    return {"parameters": asdict(parameters), "machine": about, "operators": operators, "skipped": skipped}


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    table = Table(title="operators", title_justify="left")
    for column in ("operator", "rows", "rows/s", "Spark's", "rows", "rows/s", "ratio", "bar", ""):
        table.add_column(column, justify="left" if column in ("operator", "Spark's", "") else "right")
    for name, figures in result["operators"].items():
        ours, peer = figures["ours"], figures["peer"]
        cells = [name, *_speed(ours)]
        if peer is None:
            cells += ["–", "–", "–", "–", f"{figures['bar']:g}", ""]
        else:
            verdict = "[green]met[/green]" if figures["met"] else "[red]not met[/red]"
            mark = "" if figures["same_input"] else "*"
            cells += [peer["name"], *_speed(peer), f"{figures['ratio']:.2f}{mark}", f"{figures['bar']:g}", verdict]
        table.add_row(*cells)
    console.print(table)
    if any(figures["same_input"] is False for figures in result["operators"].values()):
        console.print("* not the same input: Spark's had fewer rows a batch, so a batch's fixed cost weighs more on it")
    for name, why in result["skipped"].items():
        console.print(f"{name}: skipped, {why}", highlight=False)


def _speed(figures: dict[str, Any]) -> tuple[str, str]:
    speed = figures["throughput"]
    return f"{speed['rows']:,}", f"{speed['rows_per_s']:,.0f}"


class _Bench:
    """The input, and what was measured on it so far."""

    def __init__(self, spark: SparkSession, parameters: Parameters, home: Path, say: Say) -> None:
        self._spark = spark
        self._peer_spark = peer_session(spark)
        self._parameters = parameters
        self._home = home
        self._say = say
        self._workload = EventWorkload(home / "files", parameters.keys, parameters.value_bytes)
        self._files = self._load()
        self._results = self._expected(self._files)
        self._peers: dict[str, dict[str, Any]] = {}

    def compare(self, entry: Entry) -> dict[str, Any]:
        """The figures of an operator, of its counterpart, and how they compare."""
        ours = self._ours(entry)
        peer = self._peer(entry) if self._parameters.peer else None
        ratio = ours["throughput"]["rows_per_s"] / peer["throughput"]["rows_per_s"] if peer else None
        return {
            "ours": ours,
            "peer": peer,
            "same_input": None if peer is None else not (entry.slow or entry.peer.slow),
            "ratio": None if ratio is None else round(ratio, 2),
            "bar": entry.bar,
            "met": None if ratio is None else ratio >= entry.bar,
        }

    def _load(self) -> list[InputFile]:
        rows, batches = self._parameters.rows, self._parameters.batches
        ends = [rows * (at + 1) // batches for at in range(batches)]
        files: list[InputFile] = []
        for begin, end in zip([0, *ends], ends, strict=False):
            files.append(self._workload.skewed(end - begin, self._parameters.hot))
            self._say("generating input", end, rows)
        return files

    def _expected(self, files: Sequence[InputFile]) -> Results:
        return Results(lambda: Expected(self._workload, files), lambda: ExpectedEvents(files))

    def _input(self, slow_rows: int | None) -> tuple[list[InputFile], Results]:
        """The input files and their expected results; with `slow_rows`, separate files with that many rows."""
        if slow_rows is None:
            return self._files, self._results
        files = few_files(self._workload, slow_rows)
        return files, self._expected(files)

    def _ours(self, entry: Entry) -> dict[str, Any]:
        parameters = self._parameters
        files, results = self._input(SLOW_FACTOR * parameters.peer_rows if entry.slow else None)
        place = self._home / entry.name
        offer(files, place / "in")
        config = sl.Config(
            checkpoint_dir=str(place / "checkpoints"),
            checkpoint_interval=parameters.interval,
            state_memory=parameters.memory,
            parallelism=parameters.parallelism,
        )
        job = sl.Job(f"bench-{entry.name}", self._spark, config)
        entry.build(job, _reader(self._spark, place / "in")).sink(sl.ParquetSink(str(place / "out")))
        run = job.start()
        query = self._spark.streams.active[0]
        with watched(query, f"{entry.name}: rows", files, self._say):
            run.process_all_available()
        batches = [batch for batch in batches_of(query) if batch.rows]
        last = batch_id(run.figures().generation, len(files) - 1)
        covering = next(checkpoint for checkpoint in completed(run) if checkpoint.batch_id >= last)
        run.stop()
        entry.check(results, place / "out", entry.name)
        shutil.rmtree(place)
        return {"throughput": throughput(batches, files, end_of(covering)), "verified": True}

    def _peer(self, entry: Entry) -> dict[str, Any]:
        """The figures of the counterpart; several operators may have the same one."""
        peer = entry.peer
        if peer.name not in self._peers:
            files, results = self._input(self._parameters.peer_rows if peer.slow else None)
            place = self._home / f"peer-{entry.name}"
            offer(files, place / "in")
            figures = self._timed(peer, files, place)
            entry.check(results, place / "out", f"Spark's {peer.name}")
            shutil.rmtree(place)
            self._peers[peer.name] = {"name": peer.name, **figures, "verified": True}
        return self._peers[peer.name]

    def _timed(self, peer: Peer, files: Sequence[InputFile], place: Path) -> dict[str, Any]:
        output = str(place / "out")

        def append(frame: DataFrame, _batch: int) -> None:
            frame.write.mode("append").parquet(output)

        writer = peer.build(_reader(self._peer_spark, place / "in")).writeStream.outputMode(peer.mode)
        writer = writer.option("checkpointLocation", str(place / "checkpoints"))
        if peer.mode == "update":  # which Spark's Parquet sink refuses
            writer = writer.foreachBatch(append)
        else:
            writer = writer.format("parquet").option("path", output)
        return timed(writer.start(), files, f"Spark's {peer.name}: rows", self._say)


def _reader(spark: SparkSession, folder: Path) -> Read:
    def read() -> DataFrame:
        return spark.readStream.schema(EVENT_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))

    return read
