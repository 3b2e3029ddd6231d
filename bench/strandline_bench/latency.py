"""How long a row takes from its arrival in Kafka until its effect is durable, beside Spark's own operator.

A process of its own writes messages into a topic at a fixed rate. Message `i` arrives `i / rate` seconds after the
first, whether the producer is late or not. A job counts per key in Python and keeps the last value, with the changelog,
and takes checkpoints as often as it can. A row is durable when the first checkpoint that covers it is completed; at
that moment its result becomes visible in a sink that is exactly once. A `CallbackSink` sees it earlier, and is measured
in a job of its own. Spark's own operator counts per key in the JVM; its rows are durable when their batch ends. In real
time its output is in another topic earlier.

At full speed, all messages are in Kafka before the job starts.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.checkpoint.batch import BATCHES_PER_GENERATION
from strandline.errors import ConfigError
from strandline_bench.events import Int64s
from strandline_bench.latency_spark import Seen, ends_of, run_operator
from strandline_bench.rated import Pace, mixed
from strandline_bench.report import machine, percentiles
from strandline_bench.running import end_of, session
from strandline_bench.servers.kafka import KafkaBroker, kafka_broker
from strandline_bench.sinks import TOOLS
from strandline_bench.timing import Say, batches_of
from strandline_bench.value_state import CountAndKeep
from strandline_bench.workload import WrongResultError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OF_SPARK: Final = ("spark-operator", "spark-realtime")
"""Spark's operator in micro-batches, and in Spark's real-time mode."""
MODES: Final = ("realtime", "direct", "spark-shuffle", *OF_SPARK)
"""Our job in real time, with rows delivered straight to the slots, and through Spark's shuffle; Spark's operator."""
CALLED: Final = ("realtime", "direct")
"""The modes whose output is also measured at a `CallbackSink`, and which are measured at full speed."""
VISIBLE_AFTER: Final = "1s"
"""In real time, the interval of checkpoints: epochs are durable without them, and rows become visible with them."""
TRANSFER_MS: Final = 2.0
"""In real time, Spark gathers the rows that a partition gets in so many milliseconds."""
REHEARSAL_S: Final = 4.0
LEAD_S: Final = 1.0
"""Seconds between the start of the producer and the first arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured."""

    rates: tuple[int, ...] = (5_000, 50_000)
    seconds: float = 60
    warm_up: float = 20
    keys: int = 100_000
    value_bytes: int = 100
    partitions: int = 2
    modes: tuple[str, ...] = MODES
    parallelism: int = 2
    output_seconds: float = 30
    """How long rows arrive for a job with a `CallbackSink`; 0: that is not measured."""
    full_speed_rows: int = 1_000_000
    """How many rows are in Kafka when a job starts that has to catch up; 0: that is not measured."""

    def __post_init__(self) -> None:
        if min(*self.rates, self.keys, self.value_bytes, self.partitions, self.parallelism) < 1:
            raise ConfigError("--rate, --keys, --value-bytes, --partitions and --parallelism must be at least 1")
        if not 0 <= self.warm_up < self.seconds:
            raise ConfigError(f"--warm-up {self.warm_up:g} must be less than --seconds {self.seconds:g}")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ConfigError(f"--mode {unknown[0]}: known are {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class Stream:
    """The messages of one measurement."""

    servers: str
    topic: str
    partitions: int
    rate: int
    rows: int
    keys: int
    value_bytes: int
    start_us: int

    def keys_of(self, numbers: Int64s) -> Int64s:
        """The keys of these messages."""
        return (mixed(numbers) % np.uint64(self.keys)).astype(np.int64)


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure every mode at every rate, check the results, and return all figures as plain values.

    Raises `WrongResultError` if a count is wrong, and `ConfigError` without Spark's connector for Kafka.
    """
    jars = sorted((TOOLS / "spark-kafka").glob("*.jar"))
    if not jars:
        raise ConfigError(".tools/spark-kafka is missing: run `bash scripts/get_kafka.sh`")
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    figures: dict[str, dict[str, Any]] = {}
    full_speed: dict[str, dict[str, Any]] = {}
    try:
        with kafka_broker(quick_start=False) as broker:
            for mode in parameters.modes:
                # In Spark's real-time mode the tasks of both stages hold a core each, all the time.
                tasks = parameters.parallelism + (parameters.partitions if mode == "spark-realtime" else 0)
                spark = session(tasks, round(parameters.seconds * 100), jars)
                spark.conf.set("spark.sql.shuffle.partitions", parameters.parallelism)
                try:
                    measured = _Measured(parameters, mode, broker, spark, home)
                    say(f"{mode}: rehearsal", 0, 1)
                    measured.at(parameters.rates[0], REHEARSAL_S, 0.0)
                    for rate in parameters.rates:
                        say(f"{mode}: {rate:,} rows/s", 0, 1)
                        figures.setdefault(str(rate), {})[mode] = measured.at(
                            rate, parameters.seconds, parameters.warm_up
                        )
                        if mode in CALLED and parameters.output_seconds:
                            seconds = parameters.output_seconds
                            figures[str(rate)][mode] |= measured.output_at(rate, seconds, seconds / 3)
                        say(f"{mode}: {rate:,} rows/s", 1, 1)
                    if mode in CALLED and parameters.full_speed_rows:
                        say(f"{mode}: full speed", 0, 1)
                        full_speed[mode] = measured.at_full_speed(parameters.full_speed_rows)
                        say(f"{mode}: full speed", 1, 1)
                finally:
                    spark.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {
        "parameters": asdict(parameters),
        "machine": about,
        "rates": figures,
        "full_speed": full_speed,
        "verified": True,
    }


class _Measured:
    """One mode, in a Spark session of its own."""

    def __init__(self, parameters: Parameters, mode: str, broker: KafkaBroker, spark: SparkSession, home: Path) -> None:
        self._parameters = parameters
        self._mode = mode
        self._broker = broker
        self._spark = spark
        self._home = home

    def at(self, rate: int, seconds: float, warm_up: float) -> dict[str, Any]:
        """The figures at one rate. Raises `WrongResultError` if a count is wrong."""
        topic, folder = self._place()
        stream = self._stream(topic, rate, seconds)
        measure = self._spark_operator if self._mode in OF_SPARK else self._strandline
        seen = measure(topic, folder, stream, rate)
        numbers = np.arange(round(rate * warm_up), seen.made.rows, dtype=np.int64)
        figures = {
            "rows": seen.made.rows,
            "durable_ms": percentiles(latencies_ms(seen.made, numbers, seen.covered, seen.durable_at)),
            "batch_ms": percentiles(seen.batch_ms),
        }
        if seen.visible is not None:
            figures["visible_ms"] = percentiles(latencies_ms(seen.made, numbers, *seen.visible))
        if seen.output_at is not None:
            arrived = Pace(seen.made.start_us, rate).arrivals_us(numbers) / 1e6
            figures["output_ms"] = percentiles((seen.output_at[numbers] - arrived) * 1000)
        return figures

    def output_at(self, rate: int, seconds: float, warm_up: float) -> dict[str, Any]:
        """From the arrival of a row until a `CallbackSink` has the row that it made."""
        topic, folder = self._place()
        called_at: dict[int, float] = {}

        def called(_rows: pa.Table, batch: int) -> None:
            called_at.setdefault(batch % BATCHES_PER_GENERATION, time.time())

        sink = sl.CallbackSink(called)
        job, ends_of = self._job(topic, folder, rate, sink, checkpoint_interval="1s")
        with job.start() as run:
            made, _seen = _produced(self._stream(topic, rate, seconds), run.checkpoints)
            run.process_all_available()
            ends = ends_of()
        order = sorted(batch for batch in called_at if batch in ends)
        covered = np.array([ends[batch] for batch in order], np.int64)
        numbers = np.arange(round(rate * warm_up), made.rows, dtype=np.int64)
        return {"output_ms": percentiles(latencies_ms(made, numbers, covered, [called_at[batch] for batch in order]))}

    def at_full_speed(self, rows: int) -> dict[str, Any]:
        """How fast the job works on rows that are all there when it starts."""
        topic, folder = self._place()
        rate = max(self._parameters.rates)
        made = self._stream(topic, 1 << 40, rows / (1 << 40))()
        _end_of_producer(made, lambda: None)
        job, ends_of = self._job(topic, folder, rate, sl.ParquetSink(str(folder / "out")), checkpoint_interval="1s")
        # The very last rows wait for the end of Spark's batch in real time, because no row follows them.
        enough = round(made.rows * 0.99)
        with job.start() as run:
            began = time.monotonic()
            while max(map(sum, ends_of().values()), default=0) < enough and not run.await_termination(0.02):
                continue
            seconds = time.monotonic() - began
            done = max(map(sum, ends_of().values()))
            run.process_all_available()
        _check(folder / "out", made)
        return {"rows": done, "seconds": seconds, "rows_per_s": done / seconds}

    def _place(self) -> tuple[str, Path]:
        """A topic and a folder of their own."""
        topic = self._broker.create_topic(partitions=self._parameters.partitions)
        return topic, Path(tempfile.mkdtemp(dir=self._home))

    def _stream(self, topic: str, rate: int, seconds: float) -> Callable[[], Stream]:
        """Describes the messages, of which the first arrives a little after the call."""
        parameters = self._parameters

        def stream() -> Stream:
            start_us = round((time.time() + LEAD_S) * 1e6)
            shape = (rate, round(rate * seconds), parameters.keys, parameters.value_bytes, start_us)
            return Stream(self._broker.servers, topic, parameters.partitions, *shape)

        return stream

    def _messages(self, topic: str) -> DataFrame:
        options = {"kafka.bootstrap.servers": self._broker.servers, "subscribe": topic, "startingOffsets": "earliest"}
        messages = self._spark.readStream.format("kafka").options(**options).load()
        return messages.selectExpr("cast(cast(key as string) as long) key", "cast(value as string) value")

    def _job(
        self, topic: str, folder: Path, rate: int, sink: sl.Sink, checkpoint_interval: str
    ) -> tuple[sl.Job, Callable[[], dict[int, list[int]]]]:
        """The job, and what gives the next offset of every partition after each of its batches while it runs."""
        config = sl.Config(
            checkpoint_dir=str(folder / "checkpoints"),
            checkpoint_interval=checkpoint_interval,
            changelog=True,
            parallelism=self._parameters.parallelism,
            shuffle="spark" if self._mode == "spark-shuffle" else "direct",
            restart_strategy="none",
        )
        realtime = self._mode == "realtime"
        if realtime:
            transferred = max(1, round(rate / self._parameters.partitions * TRANSFER_MS / 1000))
            config = config.replace(latency_mode="realtime", transfer_rows=transferred)
        job = sl.Job("latency", self._spark, config)
        self._epochs = _Epochs(topic, self._parameters.partitions)
        if realtime:
            job.add_listener(self._epochs)
        counts = job.source(self._messages(topic)).key_by("key")
        counts.process(CountAndKeep(), "key long, n long, before string").sink(sink)

        def ends() -> dict[int, list[int]]:
            if realtime:
                return self._epochs.ends
            (query,) = self._spark.streams.active
            return ends_of(query, topic, self._parameters.partitions)

        return job, ends

    def _strandline(self, topic: str, folder: Path, stream: Callable[[], Stream], rate: int) -> Seen:
        sink = sl.ParquetSink(str(folder / "out"))
        job, ends_of = self._job(
            topic, folder, rate, sink, checkpoint_interval=VISIBLE_AFTER if self._mode == "realtime" else "10ms"
        )
        with job.start() as run:
            (query,) = self._spark.streams.active
            made, seen = _produced(stream, run.checkpoints)
            run.process_all_available()
            seen.update({one.id: one for one in run.checkpoints()})
            ends = ends_of()
            batch_ms = self._epochs.durations_ms if self._mode == "realtime" else _batch_ms(query)
        completed = sorted(
            (one.batch_id % BATCHES_PER_GENERATION, end_of(one)) for one in seen.values() if one.status == "completed"
        )
        visible = [(batch, at) for batch, at in completed if batch in ends]
        _check(folder / "out", made)
        durable = sorted(self._epochs.durable_at.items()) if self._mode == "realtime" else visible
        covered, covered_visibly = (np.array([ends[one] for one, _at in some], np.int64) for some in (durable, visible))
        return Seen(
            made,
            covered,
            [at for _one, at in durable],
            batch_ms,
            visible=(covered_visibly, [at for _one, at in visible]),
        )

    def _spark_operator(self, topic: str, folder: Path, stream: Callable[[], Stream], _rate: int) -> Seen:
        produced = lambda: _produced(stream, list)[0]  # noqa: E731
        realtime = self._mode == "spark-realtime"
        return run_operator(self._messages(topic), self._broker, folder, topic, produced, realtime=realtime)


class _Epochs(sl.RunListener):
    """For each epoch of a run in real time, the next offset of every partition, and how long the epoch took."""

    def __init__(self, topic: str, partitions: int) -> None:
        self.ends: dict[int, list[int]] = {}
        self.durations_ms: list[float] = []
        self.durable_at: dict[int, float] = {}
        """When somebody heard that the epoch is durable."""
        self._topic = topic
        self._partitions = partitions

    def on_progress(self, run: sl.JobRun, progress: dict[str, Any]) -> None:
        ends = progress["sources"][0]["endOffset"].get(self._topic, {})
        number = progress["batchId"] % BATCHES_PER_GENERATION
        self.ends[number] = [int(ends.get(str(one), 0)) for one in range(self._partitions)]
        self.durable_at[number] = time.time()
        self.durations_ms.append(progress["batchDuration"])


def _produced(
    stream: Callable[[], Stream], checkpoints: Callable[[], Sequence[sl.CheckpointStats]]
) -> tuple[Stream, dict[int, sl.CheckpointStats]]:
    """Have a process write the messages, and collect checkpoints meanwhile: a run keeps only its newest."""
    made = stream()
    seen: dict[int, sl.CheckpointStats] = {}
    _end_of_producer(made, lambda: seen.update({one.id: one for one in checkpoints()}))
    return made, seen


def _end_of_producer(stream: Stream, meanwhile: Callable[[], None]) -> None:
    """Have a process write the messages, and wait until they are in Kafka."""
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(stream,), daemon=True)
    producer.start()
    while producer.is_alive():
        meanwhile()
        producer.join(0.5)
    if producer.exitcode != 0:
        raise RuntimeError(f"the producer ended with exit code {producer.exitcode}")


def produce(stream: Stream) -> None:
    """Write the messages, each when its time has come. Runs in a process of its own."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": stream.servers, "linger.ms": 1, "queue.buffering.max.messages": 1_000_000, "acks": 1}
    )
    rng = np.random.default_rng(7)
    pool = [f"{number:0{stream.value_bytes}x}" for number in rng.integers(0, 1 << 60, 997)]
    pace = Pace(stream.start_us, stream.rate)
    done = 0
    while done < stream.rows:
        there = min(stream.rows, pace.arrived(time.time_ns() // 1000))
        numbers = np.arange(done, there, dtype=np.int64)
        for number, key in zip(range(done, there), stream.keys_of(numbers).tolist(), strict=True):
            producer.produce(stream.topic, key=str(key), value=pool[number % 997], partition=number % stream.partitions)
        producer.poll(0)
        done = there
        time.sleep(0.001)
    if producer.flush(60):
        raise RuntimeError("Kafka did not take all messages")


def latencies_ms(
    stream: Stream, numbers: Int64s, covered: Int64s, durable_at: Sequence[float]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """From the arrival of each message until it was covered. `covered` has the end offsets of every partition."""
    ends = np.asarray(durable_at)
    pace = Pace(stream.start_us, stream.rate)
    found = np.empty(len(numbers))
    for partition in range(stream.partitions):
        mine = numbers % stream.partitions == partition
        offsets = numbers[mine] // stream.partitions
        first = np.searchsorted(covered[:, partition], offsets, side="right")
        found[mine] = (ends[first] - pace.arrivals_us(numbers[mine]) / 1e6) * 1000
    return found


def _batch_ms(query: StreamingQuery) -> list[float]:
    return [batch.seconds * 1000 for batch in batches_of(query) if batch.rows]


def _check(output: Path, stream: Stream) -> None:
    """The counts per key of all batches together are the counts of the messages. Raises `WrongResultError`."""
    found = ds.dataset(output, format="parquet").to_table(columns=["key", "n"])
    keys, n = found.column("key").to_numpy(), found.column("n").to_numpy()
    counted = np.zeros(stream.keys, np.int64)
    np.maximum.at(counted, keys, n)
    wanted = np.bincount(stream.keys_of(np.arange(stream.rows, dtype=np.int64)), minlength=stream.keys)
    if not np.array_equal(counted, wanted) or pc.min(found.column("n")).as_py() < 1:
        raise WrongResultError(f"the counts of {np.count_nonzero(counted != wanted)} of {stream.keys} keys are wrong")


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as tables."""
    for rate, modes in result["rates"].items():
        table = Table(
            title=f"{int(rate):,} rows/s: arrival to durable (output: to a CallbackSink, or to a topic), ms",
            title_justify="left",
        )
        for column in ("", "p50", "p90", "p99", "max", "output p50", "output p99", "batch p50", "batch p99"):
            table.add_column(column, justify="left" if not column else "right")
        for mode, figures in modes.items():
            durable, batch = figures["durable_ms"], figures["batch_ms"]
            output = figures.get("output_ms", {})
            cells = [durable[name] for name in ("p50", "p90", "p99", "max")]
            cells += [output.get(name) for name in ("p50", "p99")] + [batch[name] for name in ("p50", "p99")]
            table.add_row(mode, *("–" if cell is None else f"{cell:,.0f}" for cell in cells))
        console.print(table)
    for mode, figures in result["full_speed"].items():
        console.print(f"full speed, {mode}: {figures['rows_per_s']:,.0f} rows/s ({figures['rows']:,} rows)")
