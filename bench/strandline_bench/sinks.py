"""How fast rows become visible in each target, beside Spark's own writer to it, or the plain writer of its library.

A job without state passes the rows of the input on to a sink, one file a micro-batch, with a checkpoint every second.
The peer gets the same files one after the other. Where Spark has a writer, it is a streaming query with the same
batches: `parquet` and `kafka` are sinks of Spark's, into PostgreSQL every batch is written by JDBC. Delta and Iceberg
are written by deltalake and pyiceberg, SQLite by `executemany`, all of them in one thread of this process, a file at a
time: these have no checkpoints, no Spark, and no memory of what they have written.

What every writer left is read back, and counts and sums are compared with those of the input.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.report import machine, percentiles
from strandline_bench.running import completed, session
from strandline_bench.targets import (
    TARGETS,
    DeltaTarget,
    IcebergTarget,
    KafkaTarget,
    Mode,
    ParquetTarget,
    PostgresTarget,
    SQLiteTarget,
    Target,
    opened,
    servers,
)
from strandline_bench.timing import Say, Stopwatch, batches_of, throughput, watched
from strandline_bench.workload import SCHEMA, InputFile, Workload, WrongResultError, offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

NAMES: Final = tuple(TARGETS)
UPSERTING: Final = tuple(name for name, target in TARGETS.items() if target.upserts)
"""The sinks that can keep the last row of every key."""
KEYS: Final = ("key",)
TOOLS: Final = Path(__file__).parents[2] / ".tools"
JARS: Final[Mapping[str, str]] = {"kafka": "spark-kafka", "postgres": "spark-jdbc"}
"""The folders in `.tools` with what Spark's own writers need."""
INTERVAL: Final = "1s"
OURS: Final = "ours"
PEER: Final = "peer"
REHEARSED: Final = 4
"""Files of the rehearsal, whose figures are thrown away."""
JDBC_ROWS: Final = 10_000
"""Rows that Spark sends to PostgreSQL in one message; its default of 1,000 is slower."""

Sums = tuple[int, int, int, int]
"""How many rows there are, and the sums of their keys, of `x`, and of the lengths of their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is measured, and how large it is."""

    rows: int = 2_000_000
    batch_rows: int = 100_000
    value_bytes: int = 100
    only: tuple[str, ...] = NAMES
    peer: bool = True
    parallelism: int = 2
    mode: Mode = "append"
    """An upsert keeps the last row of every key. It has no peer."""

    def __post_init__(self) -> None:
        if min(self.rows, self.batch_rows, self.value_bytes, self.parallelism) < 1 or self.rows < 2 * self.batch_rows:
            raise ConfigError(
                f"--rows {self.rows}, --batch-rows {self.batch_rows}: give at least two batches of rows; the first one "
                "only warms up. --value-bytes and --parallelism must be at least 1"
            )
        unknown = [name for name in self.only if name not in NAMES]
        if unknown:
            raise ConfigError(f"--sink {unknown[0]}: known are {', '.join(NAMES)}")
        only_append = [name for name in self.only if not TARGETS[name].upserts]
        if self.mode == "upsert" and only_append:
            raise ConfigError(f"--sink {only_append[0]} has no upserts: those that have are {', '.join(UPSERTING)}")
        if self.mode == "upsert" and self.peer:
            raise ConfigError("--mode upsert: there is no other writer to compare with; give --no-peer")


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure every sink and its peer, check what they wrote, and return all figures as plain values.

    Raises `WrongResultError` where a target does not hold the rows of the input, and `ServerMissingError` where the
    server of a sink is not installed.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    jars = _jars(parameters)
    spark = session(parameters.parallelism, parameters.rows // parameters.batch_rows, jars)
    try:
        workload = Workload(home / "files", parameters.rows // 10, parameters.value_bytes)
        sizes = [parameters.batch_rows] * (parameters.rows // parameters.batch_rows)
        files = [workload.uniform(rows) for rows in sizes]
        expected = _sums(pa.concat_tables([pq.read_table(file.path) for file in files]))
        _rehearse(spark, files[:REHEARSED], home, replace(parameters, mode="append"))
        figures: dict[str, dict[str, Any]] = {}
        with servers(parameters.only, durable=True) as running:
            for name in parameters.only:
                measured = _Measured(name, opened(name, home / f"{name}-tables", running), spark, files, home, say)
                figures[name] = measured.everything(expected, parameters)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    return {"parameters": asdict(parameters), "machine": about, "sinks": figures, "verified": True}


def _rehearse(spark: SparkSession, files: Sequence[InputFile], home: Path, parameters: Parameters) -> None:
    """Some files into Parquet, by both, so that the first sink does not bear the start of the JVM and of workers."""
    expected = _sums(pa.concat_tables([pq.read_table(file.path) for file in files]))
    target = ParquetTarget(home / "rehearsal-tables")
    _Measured("parquet", target, spark, files, home / "rehearsal", lambda *_: None).everything(expected, parameters)


def _jars(parameters: Parameters) -> list[Path]:
    """What Spark's own writers need. Raises `ConfigError` where it is missing."""
    found: list[Path] = []
    for name in parameters.only if parameters.peer else ():
        if name in JARS:
            jars = sorted((TOOLS / JARS[name]).glob("*.jar"))
            if not jars:
                raise ConfigError(
                    f".tools/{JARS[name]} is missing, which Spark needs to write into {name}: run "
                    "`bash scripts/get_kafka.sh`, or give --no-peer"
                )
            found += jars
    return found


class _Measured:
    """One sink, and its peer."""

    def __init__(
        self, name: str, target: Target, spark: SparkSession, files: Sequence[InputFile], home: Path, say: Say
    ) -> None:
        self._name = name
        self._target = target
        self._spark = spark
        self._files = files
        self._home = home / name
        self._say = say

    def everything(self, expected: Sums, parameters: Parameters) -> dict[str, Any]:
        """Our figures, those of the peer, and the quotient of the rates."""
        self._target.home.mkdir(parents=True, exist_ok=True)
        figures: dict[str, Any] = {OURS: self._ours(parameters)}
        if parameters.mode == "upsert":
            self._check_newest()
        else:
            self._check(OURS, expected)
        if parameters.peer:
            writer, write = PEERS[self._name]
            figures[PEER] = {"writer": writer, **write(self)}
            self._check(PEER, expected)
            figures["ratio"] = round(figures[OURS]["rows_per_s"] / figures[PEER]["rows_per_s"], 2)
        shutil.rmtree(self._target.home, ignore_errors=True)
        shutil.rmtree(self._home, ignore_errors=True)
        return figures

    def _ours(self, parameters: Parameters) -> dict[str, Any]:
        self._target.make(OURS)
        offer(self._files, self._home / "in")
        config = sl.Config(
            checkpoint_dir=str(self._home / "checkpoints"),
            checkpoint_interval=INTERVAL,
            parallelism=parameters.parallelism,
        )
        job = sl.Job(f"sinks-{self._name}", self._spark, config)
        keys = KEYS if parameters.mode == "upsert" else ()
        job.source(self._rows()).sink(self._target.sink(OURS, parameters.mode, keys))
        with job.start() as run:
            query = self._spark.streams.active[0]
            with watched(query, f"{self._name}: rows", self._files, self._say):
                run.process_all_available()
            taken = completed(run)
            rows = run.figures().sinks[0].rows
        if rows != sum(file.rows for file in self._files):
            raise WrongResultError(f"{self._name}: the run says that it published {rows:,} rows")
        newest = max(checkpoint.batch_id for checkpoint in taken)
        end = min(_visible(checkpoint) for checkpoint in taken if checkpoint.batch_id == newest)
        figures = throughput(batches_of(query), self._files, end)
        with_rows = [one for one in taken if one.publish_ms]
        barriers = [one.trigger_time + one.start_delay_ms / 1000 for one in with_rows]
        waits = [1000 * (_visible(one) - began) for one, began in zip(with_rows, barriers, strict=True)]
        return {
            "rows_per_s": figures["rows_per_s"],
            "seconds": figures["seconds"],
            "batch_ms": figures["batch_ms"],
            "checkpoints": len(with_rows),
            "barrier_to_visible_ms": percentiles(waits),
            "commit_ms": percentiles([one.publish_ms for one in with_rows]),
        }

    def by_spark(self, begin: Callable[[DataFrame, Path], StreamingQuery]) -> dict[str, Any]:
        """The figures of a streaming query of Spark's with the same batches."""
        query = begin(self._rows(), self._home / "spark")
        with watched(query, f"{self._name}: Spark's rows", self._files, self._say):
            query.processAllAvailable()
        batches = batches_of(query)
        query.stop()
        figures = throughput(batches, self._files, batches[-1].start + batches[-1].seconds)
        return {name: figures[name] for name in ("rows_per_s", "seconds", "batch_ms")}

    def by_hand(self, write: Callable[[pa.Table], None]) -> dict[str, Any]:
        """The figures of a plain writer, which gets a file at a time; it reads the file, too."""
        seconds = []
        for number, file in enumerate(self._files):
            self._say(f"{self._name}: peer's rows", number, len(self._files))
            watch = Stopwatch()
            write(pq.read_table(file.path))
            seconds.append(watch.seconds)
        self._say(f"{self._name}: peer's rows", len(self._files), len(self._files))
        rows = sum(file.rows for file in self._files[1:])
        return {
            "rows_per_s": round(rows / sum(seconds[1:]), 1),
            "seconds": round(sum(seconds[1:]), 3),
            "batch_ms": percentiles([1000 * one for one in seconds[1:]]),
        }

    @property
    def target(self) -> Any:
        """Where both write."""
        return self._target

    @property
    def schema(self) -> pa.Schema:
        """The columns of the input."""
        return pq.read_schema(self._files[0].path)

    def _rows(self) -> DataFrame:
        return self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self._home / "in"))

    def _check(self, who: str, expected: Sums) -> None:
        found = _sums(self._target.read(who))
        if found != expected:
            raise WrongResultError(
                f"{self._name}, {who}: found {found}, expected {expected}: rows, and sums of key, x and length of value"
            )

    def _check_newest(self) -> None:
        wrong = wrong_upserts(self._target.read(OURS), [pq.read_table(file.path) for file in self._files])
        if wrong:
            raise WrongResultError(f"{self._name}: {wrong}")


def _visible(checkpoint: sl.CheckpointStats) -> float:
    """When the rows of a completed checkpoint were visible, in seconds since the epoch."""
    return checkpoint.end_time + checkpoint.publish_ms / 1000


def _sums(rows: pa.Table) -> Sums:
    lengths = pc.sum(pc.utf8_length(rows.column("value"))).as_py()
    return rows.num_rows, pc.sum(rows.column("key")).as_py(), pc.sum(rows.column("x")).as_py(), lengths


def wrong_upserts(found: pa.Table, files: Sequence[pa.Table]) -> str:
    """What is wrong with a table of upserts; empty if it has one row for each key, out of the last file with that key.

    Several tasks may read the rows that one file has of a key, in no order.
    """
    newest: dict[int, set[tuple[int, str]]] = {}
    for rows in files:
        here: dict[int, set[tuple[int, str]]] = {}
        for key, x, value in _plain(rows):
            here.setdefault(key, set()).add((x, value))
        newest.update(here)
    keys = set(found["key"].to_pylist())
    if found.num_rows != len(newest) or keys != newest.keys():
        return f"found {found.num_rows} rows of {len(keys)} keys, expected one for each of {len(newest)}"
    old = [key for key, x, value in _plain(found) if (x, value) not in newest[key]]
    return f"{len(old)} rows are not the newest of their key, such as that of {old[0]}" if old else ""


def _plain(rows: pa.Table) -> Iterator[tuple[int, int, str]]:
    return zip(*(rows[name].to_pylist() for name in ("key", "x", "value")), strict=True)


def _parquet(measured: _Measured) -> dict[str, Any]:
    target: ParquetTarget = measured.target

    def begin(rows: DataFrame, folder: Path) -> StreamingQuery:
        options = {"path": str(target.home / PEER), "checkpointLocation": str(folder)}
        return rows.writeStream.format("parquet").options(**options).start()

    return measured.by_spark(begin)


def _kafka(measured: _Measured) -> dict[str, Any]:
    target: KafkaTarget = measured.target
    target.make(PEER)

    def begin(rows: DataFrame, folder: Path) -> StreamingQuery:
        messages = rows.selectExpr("cast(key as string) key", "to_json(struct(*)) value")
        options = {
            "kafka.bootstrap.servers": target.address,
            "topic": target.topic(PEER),
            "checkpointLocation": str(folder),
        }
        return messages.writeStream.format("kafka").options(**options).start()

    return measured.by_spark(begin)


def _jdbc(measured: _Measured) -> dict[str, Any]:
    target: PostgresTarget = measured.target
    user, _, place = target.address.removeprefix("postgresql://").partition("@")
    name, _, password = user.partition(":")
    options = {
        "url": f"jdbc:postgresql://{place}?reWriteBatchedInserts=true",
        "driver": "org.postgresql.Driver",
        "dbtable": PEER,
        "user": name,
        "password": password,
        "batchsize": str(JDBC_ROWS),
    }

    def begin(rows: DataFrame, folder: Path) -> StreamingQuery:
        def write(batch: DataFrame, _number: int) -> None:
            batch.write.format("jdbc").options(**options).mode("append").save()

        return rows.writeStream.foreachBatch(write).option("checkpointLocation", str(folder)).start()

    return measured.by_spark(begin)


def _delta(measured: _Measured) -> dict[str, Any]:
    from deltalake import write_deltalake

    target: DeltaTarget = measured.target
    return measured.by_hand(partial(write_deltalake, str(target.home / PEER), mode="append"))


def _iceberg(measured: _Measured) -> dict[str, Any]:
    from pyiceberg.catalog import load_catalog

    target: IcebergTarget = measured.target
    catalogue = load_catalog("default", **target.catalogue)
    table = catalogue.create_table(f"bench.{PEER}", measured.schema)
    return measured.by_hand(table.append)


def _sqlite(measured: _Measured) -> dict[str, Any]:
    target: SQLiteTarget = measured.target
    with closing(sqlite3.connect(target.database)) as connection:
        connection.execute(f"CREATE TABLE {PEER} (key INTEGER, x INTEGER, value TEXT)")

        def write(rows: pa.Table) -> None:
            columns = [column.to_pylist() for column in rows.columns]
            with connection:
                connection.executemany(f"INSERT INTO {PEER} VALUES (?, ?, ?)", zip(*columns, strict=True))

        return measured.by_hand(write)


PEERS: Final[Mapping[str, tuple[str, Callable[[_Measured], dict[str, Any]]]]] = {
    "parquet": ("Spark's file sink", _parquet),
    "delta": ("deltalake.write_deltalake", _delta),
    "iceberg": ("pyiceberg's Table.append", _iceberg),
    "sqlite": ("executemany, a transaction a batch", _sqlite),
    "postgres": ("Spark's JDBC writer in foreachBatch", _jdbc),
    "kafka": ("Spark's Kafka sink", _kafka),
}
"""What else writes into each target, and how."""


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    what = "upserts" if result["parameters"]["mode"] == "upsert" else "rows"
    table = Table(title=f"{result['parameters']['rows']:,} {what} into each target", title_justify="left")
    for header in ("sink", "rows/s", "barrier to visible ms, p50", "max", "commit ms, p50", "peer", "rows/s", "ratio"):
        table.add_column(header, justify="left" if header in ("sink", "peer") else "right")
    for name, figures in result["sinks"].items():
        ours, peer = figures[OURS], figures.get(PEER)
        visible, commit = ours["barrier_to_visible_ms"], ours["commit_ms"]
        table.add_row(
            name,
            f"{ours['rows_per_s']:,.0f}",
            *(f"{one:,.0f}" for one in (visible["p50"], visible["max"], commit["p50"])),
            *((peer["writer"], f"{peer['rows_per_s']:,.0f}", f"{figures['ratio']:.2f}") if peer else ("–", "–", "–")),
        )
    console.print(table)
