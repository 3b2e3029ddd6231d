"""One run of a rate-driven workload: checkpoints as often as possible, every row's latency, recovery, and a check."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

import strandline as sl
from strandline.checkpoint.batch import BATCHES_PER_GENERATION
from strandline.errors import ConfigError
from strandline_bench.events import Int64s
from strandline_bench.rated import Gate, Pace, RatedSource, read_rated
from strandline_bench.report import percentiles
from strandline_bench.running import end_of
from strandline_bench.timing import Say, Stopwatch, batches_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Mode = Literal["on", "off"]
MATERIALIZATION: Final = "10s"
RECOVERIES: Final = 3
"""How often recovery is measured; the median is reported."""
RECOVERY_ROWS: Final = 1000
_REHEARSAL_S: Final = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RatedWork:
    """A workload: its rows, what the job does with them, and how its output is checked."""

    name: str
    source: type[RatedSource]
    options: dict[str, int]
    """What the rows are made by."""
    build: Callable[[sl.Job, DataFrame], sl.Stream]
    check: Callable[[Path, int, Pace, str], None]
    """Checks the output, given the number of rows, their pace and the mode. Raises `WrongResultError`."""
    most_full_bytes: float
    """The largest ratio of the full size with the changelog to the full size without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How fast rows come, for how long, and the job's options."""

    rate: int
    paced: bool = True
    """Whether rows wait for their time; if not, they come as fast as they are taken, with the same event times."""
    seconds: float = 120
    warm_up: float = 60
    """Seconds after which row latency and one of the two figures of the full size are measured."""
    backend: str = "rocksdb"
    memory: str = "512mb"
    parallelism: int = 2
    shuffle: str = "auto"

    def __post_init__(self) -> None:
        if self.rate < 1 or self.seconds < 1 or self.parallelism < 1 or self.warm_up < 0:
            raise ConfigError(
                "--seconds and --parallelism must be at least 1, --rate at least 1 or 0 for as fast as possible, and "
                "--warm-up at least 0"
            )
        object.__setattr__(self, "warm_up", min(self.warm_up, self.seconds / 2))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return round(self.rate * self.seconds)


class Timeline(NamedTuple):
    """The completed checkpoints in the order in which they were due, for a picture."""

    at_s: list[float]
    """Since the first row."""
    duration_ms: list[float]
    full_bytes: list[int]


class RatedRun:
    """One workload in one mode, in a folder of its own."""

    def __init__(
        self, work: RatedWork, mode: Mode, settings: Settings, spark: SparkSession, home: Path, say: Say
    ) -> None:
        self._work = work
        self._mode = mode
        self._settings = settings
        self._spark = spark
        self._home = home
        self._say = say
        self._label = f"{work.name}, changelog {mode}"
        self._gate = Gate(home / "gate")
        self._start_us = 0
        home.mkdir(parents=True)

    def rehearse(self) -> None:
        """Work for a few seconds without measuring: the first job of a Spark application is slower than others."""
        run = self._job().start()
        short = replace(self._settings, seconds=min(_REHEARSAL_S, self._settings.seconds))
        self._start_us = self._gate.open(short.rows)
        self._say(f"{self._label}: rehearsal", 0, 1)
        self._finish(run, short)
        run.stop()
        self._say(f"{self._label}: rehearsal", 1, 1)

    def measure(self) -> tuple[dict[str, Any], Timeline]:
        """Process all rows, recover, and check the output. Raises `WrongResultError` if it is wrong."""
        job = self._job()
        watch = Stopwatch()
        run = job.start()
        start_s = watch.seconds
        query = self._spark.streams.active[0]
        with _collecting(run, query, f"{self._label}: rows", self._settings.rows, self._say) as ended:
            self._start_us = self._gate.open(self._settings.rows)
            self._finish(run, self._settings)
        completed = [checkpoint for checkpoint in ended.values() if checkpoint.status == "completed"]
        figures = {
            "start_s": start_s,
            **self._figures(completed, query),
            "changelog": changelog.as_dict() if (changelog := run.figures().changelog) is not None else None,
        }
        figures["checkpoints"]["failed"] = len(ended) - len(completed)
        run, figures["recovery"] = self._recover(run)
        run.stop()
        self._say(f"{self._label}: checking the results", 0, 1)
        self._work.check(self._home / "out", self._rows_in_all(RECOVERIES), self._pace, self._label)
        self._say(f"{self._label}: checking the results", 1, 1)
        return {**figures, "verified": True}, self._timeline(completed)

    # --- the job -----------------------------------------------------------------------------------

    def _job(self) -> sl.Job:
        settings = self._settings
        config = sl.Config(
            checkpoint_dir=str(self._home / "checkpoints"),
            checkpoint_interval="10ms",
            num_retained=1,
            tolerable_failed_checkpoints=-1,
            changelog=self._mode == "on",
            materialization_interval=MATERIALIZATION,
            state_backend=settings.backend,
            state_memory=settings.memory,
            parallelism=settings.parallelism,
            shuffle=settings.shuffle,
            # A run that begins anew would be measured as if it had gone on.
            restart_strategy="none",
        )
        job = sl.Job(f"rated-{self._work.name}", self._spark, config)
        frame = read_rated(
            self._spark,
            self._work.source,
            self._work.options,
            self._home / "gate",
            settings.rate,
            settings.paced,
            settings.parallelism,
        )
        self._work.build(job, frame).sink(sl.ParquetSink(str(self._home / "out")))
        return job

    def _finish(self, run: sl.JobRun, settings: Settings) -> None:
        """Return when all rows have come and a completed checkpoint covers them."""
        if settings.paced:
            run.await_termination(settings.seconds)  # only a failure ends it
        run.process_all_available()

    def _recover(self, run: sl.JobRun) -> tuple[sl.JobRun, dict[str, Any]]:
        """Cancel without a last checkpoint, start anew from storage, and work on a few new rows; several times."""
        tries = []
        for done in range(RECOVERIES):
            self._say(f"{self._label}: recovery", done, RECOVERIES)
            run.cancel()
            job = self._job()
            watch = Stopwatch()
            run = job.start()
            ready_s = watch.seconds
            self._gate.open(self._rows_in_all(done + 1), self._start_us)
            run.process_all_available()
            tries.append({"ready_s": ready_s, "first_rows_s": watch.seconds})
        self._say(f"{self._label}: recovery", RECOVERIES, RECOVERIES)
        return run, {**{name: median(each[name] for each in tries) for name in tries[0]}, "all": tries}

    # --- the figures -------------------------------------------------------------------------------

    @property
    def _pace(self) -> Pace:
        return Pace(self._start_us, self._settings.rate)

    def _rows_in_all(self, recoveries: int) -> int:
        return self._settings.rows + recoveries * RECOVERY_ROWS

    def _figures(self, completed: Sequence[sl.CheckpointStats], query: StreamingQuery) -> dict[str, Any]:
        settings, start = self._settings, self._start_us / 1e6
        covered, completed_at = covering(completed, row_ends(query))
        end = float(completed_at[np.searchsorted(covered, settings.rows)])
        last_arrival = float(self._pace.arrivals_us(np.array([settings.rows - 1]))[0]) / 1e6
        late = [one for one in completed if one.trigger_time >= start + settings.warm_up]
        return {
            "records": settings.rows,
            "seconds": round(end - start, 3),
            "rows_per_s": round(settings.rows / (end - start), 1),
            "lag_s": round(end - last_arrival, 3) if settings.paced else None,
            "checkpoints": {
                "completed": len(completed),
                "failed": 0,
                **{name: percentiles([float(getattr(one, name)) for one in completed]) for name in CHECKPOINT_FIGURES},
                "full_bytes_after_warm_up": percentiles([float(one.full_bytes) for one in late]),
            },
            "row_latency_ms": self._row_latency(covered, completed_at) if settings.paced else {},
            "batch_ms": percentiles([batch.seconds * 1000 for batch in batches_of(query) if batch.rows]),
        }

    def _row_latency(self, covered: Int64s, completed_at: Floats) -> dict[str, float]:
        numbers = np.arange(round(self._settings.rate * self._settings.warm_up), self._settings.rows)
        return percentiles(latencies_ms(numbers, self._pace, covered, completed_at))

    def _timeline(self, completed: Sequence[sl.CheckpointStats]) -> Timeline:
        ordered = sorted(completed, key=lambda one: one.trigger_time)
        return Timeline(
            [one.trigger_time - self._start_us / 1e6 for one in ordered],
            [one.barrier_to_completed_ms for one in ordered],
            [one.full_bytes for one in ordered],
        )


CHECKPOINT_FIGURES: Final = ("barrier_to_completed_ms", "end_to_end_ms", "checkpointed_bytes", "full_bytes")


def row_ends(query: StreamingQuery) -> dict[int, int]:
    """For each batch of a query, the number of rows of the rated source up to its end."""
    ends = {}
    for progress in query.recentProgress:
        if "addBatch" in progress["durationMs"]:
            ends[int(progress["batchId"])] = _rows_read(progress)
    return ends


def covering(completed: Sequence[sl.CheckpointStats], ends: Mapping[int, int]) -> tuple[Int64s, Floats]:
    """How many rows each checkpoint covers, ascending, and when it was completed, in seconds since the epoch."""
    found = sorted((ends[one.batch_id % BATCHES_PER_GENERATION], end_of(one)) for one in completed)
    return np.array([rows for rows, _end in found], np.int64), np.array([end for _rows, end in found])


def latencies_ms(numbers: Int64s, pace: Pace, covered: Int64s, completed_at: Floats) -> Floats:
    """From the arrival of each row to the completion of the first checkpoint that covers it."""
    first = np.searchsorted(covered, numbers, side="right")
    latencies: Floats = (completed_at[first] - pace.arrivals_us(numbers) / 1e6) * 1000
    return latencies


def _rows_read(progress: Mapping[str, Any]) -> int:
    """The last row of a batch. The query may have a second source, the clock of timers."""
    offsets = [json.loads(source["endOffset"]) for source in progress["sources"]]
    return int(next(offset["row"] for offset in offsets if isinstance(offset, dict) and "row" in offset))


@contextmanager
def _collecting(
    run: sl.JobRun, query: StreamingQuery, text: str, rows: int, say: Say
) -> Iterator[dict[int, sl.CheckpointStats]]:
    """Collect every checkpoint that ends, by its id, and report the rows; a run keeps only its newest checkpoints."""
    ended: dict[int, sl.CheckpointStats] = {}
    over = threading.Event()

    def look() -> None:
        ended.update({one.id: one for one in run.checkpoints() if one.status != "in_progress"})

    def watch() -> None:
        while not over.wait(0.5):
            look()
            progress = query.lastProgress
            if progress is not None and "addBatch" in progress["durationMs"]:
                say(text, min(rows, _rows_read(progress)), rows)

    thread = threading.Thread(target=watch, daemon=True, name="bench-checkpoints")
    say(text, 0, rows)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()
    look()
    say(text, rows, rows)
