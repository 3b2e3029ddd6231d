"""The value-state workload: evenly spread keys, each with a small state that every row reads and updates."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench import spark_peer
from strandline_bench.report import machine, percentiles
from strandline_bench.running import completed, end_of, session
from strandline_bench.timing import Say, Stopwatch, batches_of, throughput, watched
from strandline_bench.workload import SCHEMA, SEEN, Expected, InputFile, Workload, offer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from strandline.operators.process.process_context import ProcessContext

OperatorName = Literal["aggregate", "process"]
TOUCHES = 5
"""How often 1 % of the keys are changed; the median of the uploads is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured, and how large it is."""

    rows: int
    keys: int
    batch_rows: int = 250_000
    value_bytes: int = 100
    operators: tuple[OperatorName, ...] = ("aggregate", "process")
    peer: bool = False
    peer_rows: int = 20_000
    interval: str = "1s"
    backend: str = "rocksdb"
    memory: str = "512mb"
    parallelism: int = 2
    incremental_keys: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.batch_rows, self.parallelism, self.value_bytes) < 1 or self.keys < 100:
            raise ConfigError("rows, batch rows, value bytes and parallelism must be at least 1, and keys at least 100")
        if self.rows < 2 * self.batch_rows:
            raise ConfigError(
                f"{self.rows} rows are less than two batches of {self.batch_rows}: the first batch only warms up. "
                "Raise --rows or lower --batch-rows."
            )
        if self.peer and self.peer_rows < 8:
            raise ConfigError("--peer-rows must be at least 8")
        if 0 < self.incremental_keys < 100:
            raise ConfigError("--incremental-keys must be at least 100, or 0 to leave that part out")


class CountAndKeep(sl.KeyedProcessor):
    """Counts the rows of a key and keeps the last value; shows the beginning of the value that was there before."""

    def open(self, context: ProcessContext) -> None:
        self.kept = context.value_state("kept", "n long, value string")

    def process(self, key: tuple[Any, ...], rows: Iterator[Any], context: ProcessContext) -> Iterator[tuple[Any, ...]]:
        before: str | None = None
        n = 0
        for row in rows:
            n, value = self.kept.get() or (0, "")
            if before is None:
                before = value
            n += 1
            self.kept.update((n, row.value))
        yield key[0], n, (before or "")[:SEEN]


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Generate the input, measure, check every result, and return all figures as plain values.

    Raises `WrongResultError` when an output differs from the batch computation.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.rows // parameters.batch_rows)
    try:
        workload = Workload(home / "files", parameters.keys, parameters.value_bytes)
        load = load_files(workload, parameters, say)
        ours: dict[str, Any] = {
            name: Measured(name, spark, parameters, home / name, say).everything(workload, load)
            for name in parameters.operators
        }
        if parameters.incremental_keys:
            ours["incremental"] = _incremental(spark, parameters, home, say)
        peer = (
            spark_peer.measure(spark, parameters.operators, workload, load, parameters.peer_rows, home, say)
            if (parameters.peer)
            else None
        )
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "ours": ours,
        "peer": peer,
        "ratios": _ratios(ours, peer or {}),
    }


def load_files(workload: Workload, parameters: Parameters, say: Say) -> list[InputFile]:
    """The input: rows of random keys, in files of one batch each."""
    files: list[InputFile] = []
    left = parameters.rows
    while left:
        rows = min(left, parameters.batch_rows)
        files.append(workload.uniform(rows))
        left -= rows
        say("generating input", parameters.rows - left, parameters.rows)
    return files


class Measured:
    """One operator on its own input, checkpoints and output, from the first row to the check of the results."""

    def __init__(
        self,
        name: OperatorName,
        spark: SparkSession,
        parameters: Parameters,
        home: Path,
        say: Say,
        label: str | None = None,
        options: Mapping[str, Any] = {},
    ) -> None:
        """`options` are further options of the job."""
        self._name = name
        self._label = label or name
        self._spark = spark
        self._parameters = parameters
        self._home = home
        self._say = say
        self._options = options
        self._files: list[InputFile] = []

    def everything(self, workload: Workload, load: Sequence[InputFile]) -> dict[str, Any]:
        """Load, unchanged and changed checkpoints, recovery, check."""
        run, loaded = self.load(load)
        figures = {**loaded, "incremental": self.incremental(run, workload)}
        run, figures["recovery"] = self.recover(run, workload)
        run.stop()
        self.check(workload)
        return {**figures, "verified": True}

    def load(self, files: Sequence[InputFile]) -> tuple[sl.JobRun, dict[str, Any]]:
        """Start the job and process `files`; the run stays alive."""
        self.offer(files)
        watch = Stopwatch()
        run = self._start()
        started = watch.seconds
        query = self._spark.streams.active[0]
        with watched(query, f"{self._label}: rows", files, self._say):
            run.process_all_available()
        taken = completed(run)
        newest = max(checkpoint.batch_id for checkpoint in taken)
        covering = next(checkpoint for checkpoint in taken if checkpoint.batch_id == newest)
        figures = {
            "start_s": started,
            "throughput": throughput(batches_of(query), files, end_of(covering)),
            "checkpoints": _checkpoint_figures(taken),
        }
        return run, figures

    def incremental(self, run: sl.JobRun, workload: Workload) -> dict[str, Any]:
        """The bytes that a checkpoint uploads after no change, and after changes to 1 % of the keys."""
        what = f"{self._label}: checkpoints after 1 % of the keys changed"
        run.trigger_checkpoint()
        unchanged = run.trigger_checkpoint()
        count = workload.keys // 100
        uploads = []
        for done in range(TOUCHES):
            self._say(what, done, TOUCHES)
            known = max(checkpoint.id for checkpoint in completed(run))
            self.offer([workload.distinct(count)])
            run.process_all_available()
            new = [checkpoint for checkpoint in completed(run) if checkpoint.id > known]
            uploads.append((sum(checkpoint.checkpointed_bytes for checkpoint in new), new[-1].full_bytes))
        self._say(what, TOUCHES, TOUCHES)
        middle, full = sorted(uploads)[TOUCHES // 2]
        return {
            "unchanged": {"checkpointed_bytes": unchanged.checkpointed_bytes, "full_bytes": unchanged.full_bytes},
            "touched": {
                "keys": count,
                "checkpointed_bytes": middle,
                "full_bytes": full,
                "fraction": round(middle / full, 5) if full else 0.0,
                "all_checkpointed_bytes": [upload for upload, _full in uploads],
            },
        }

    def recover(self, run: sl.JobRun, workload: Workload) -> tuple[sl.JobRun, dict[str, Any]]:
        """Cancel without a last checkpoint, start anew from storage, and work on a few new rows."""
        self._say(f"{self._label}: recovery", 0, 1)
        watch = Stopwatch()
        run.cancel()
        cancelled = watch.seconds
        watch = Stopwatch()
        run = self._start()
        ready = watch.seconds
        watch = Stopwatch()
        self.offer([workload.uniform(1000)])
        run.process_all_available()
        first_rows = watch.seconds
        self._say(f"{self._label}: recovery", 1, 1)
        return run, {"cancel_s": cancelled, "ready_s": ready, "first_rows_s": first_rows}

    def check(self, workload: Workload) -> None:
        """Compare the output with the batch computation, and remove all files."""
        self._say(f"{self._label}: checking the results", 0, 1)
        expected = Expected(workload, self._files)
        if self._name == "aggregate":
            expected.check_aggregate(self._home / "out", self._label)
        else:
            expected.check_process(self._home / "out", self._label)
        self._say(f"{self._label}: checking the results", 1, 1)
        shutil.rmtree(self._home)

    def offer(self, files: Sequence[InputFile]) -> None:
        """Let the job read these files, too."""
        offer(files, self._home / "in")
        self._files += files

    def _start(self) -> sl.JobRun:
        parameters = self._parameters
        config = sl.Config(
            checkpoint_dir=str(self._home / "checkpoints"),
            checkpoint_interval=parameters.interval,
            state_backend=parameters.backend,
            state_memory=parameters.memory,
            parallelism=parameters.parallelism,
            **self._options,
        )
        job = sl.Job(f"value-state-{self._name}", self._spark, config)
        reader = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        rows = job.source(reader.parquet(str(self._home / "in")))
        if self._name == "aggregate":
            result = rows.key_by("key").aggregate(n=sl.count(), s=sl.sum("x"))
        else:
            needed = rows.transform(lambda frame: frame.select("key", "value"))
            result = needed.key_by("key").process(CountAndKeep(), "key long, n long, before string")
        result.sink(sl.ParquetSink(str(self._home / "out")))
        return job.start()


def _incremental(spark: SparkSession, parameters: Parameters, home: Path, say: Say) -> dict[str, Any]:
    """Load every key once, then measure the uploads of an unchanged and of a slightly changed state."""
    keys = parameters.incremental_keys
    workload = Workload(home / "all-keys", keys, parameters.value_bytes)
    order = np.random.default_rng(11).permutation(keys)
    step = min(parameters.batch_rows, -(-keys // 2))
    files = [workload.of_keys(order[at : at + step]) for at in range(0, keys, step)]
    measured = Measured("process", spark, parameters, home / "incremental", say, "incremental")
    run, figures = measured.load(files)
    found = measured.incremental(run, workload)
    run.stop()
    measured.check(workload)
    return {"keys": keys, "checkpoints": figures["checkpoints"], "incremental": found, "verified": True}


def _checkpoint_figures(taken: Sequence[sl.CheckpointStats]) -> dict[str, Any]:
    names = ("barrier_to_completed_ms", "end_to_end_ms", "sync_ms", "async_ms", "checkpointed_bytes", "full_bytes")
    figures = {name: percentiles([float(getattr(checkpoint, name)) for checkpoint in taken]) for name in names}
    return {
        "count": len(taken),
        **figures,
        "total_checkpointed_bytes": sum(checkpoint.checkpointed_bytes for checkpoint in taken),
        "last_full_bytes": taken[-1].full_bytes,
    }


def _ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, dict[str, float]]:
    names = ("rows_per_s", "steady_rows_per_s")
    return {
        operator: {
            name: round(ours[operator]["throughput"][name] / peer[operator]["throughput"][name], 2) for name in names
        }
        for operator in ours
        if operator in peer
    }
