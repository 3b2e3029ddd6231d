"""The same work on Spark's own stateful operators: `transformWithState`, and the aggregation that runs in the JVM.

Both use Spark's RocksDB state store with changelog checkpoints, which become durable with every batch.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from strandline.errors import ConfigError
from strandline_bench.timing import Say, batches_of, throughput, watched
from strandline_bench.workload import SCHEMA, SEEN, Expected, InputFile, Workload, offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


class CountAndKeep(StatefulProcessor):
    """Does what `value_state.CountAndKeep` does, with Spark's API."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.kept = handle.getValueState("kept", "n long, value string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before: str | None = None
        n = 0
        for row in rows:
            n, value = self.kept.get() or (0, "")
            if before is None:
                before = value
            n += 1
            self.kept.update((n, row.value))
        yield Row(key=key[0], n=n, before=(before or "")[:SEEN])

    def close(self) -> None:
        pass


def check_available() -> None:
    """Raises `ConfigError` if a package that `transformWithState` needs is missing."""
    try:
        found = importlib.util.find_spec("google.protobuf") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(
            "--peer spark needs the package protobuf, which Spark's transformWithState talks in. "
            "Install it: pip install 'protobuf>=6.33.5'"
        )


def measure(
    spark: SparkSession,
    operators: Sequence[str],
    workload: Workload,
    load: Sequence[InputFile],
    rows: int,
    home: Path,
    say: Say,
) -> dict[str, Any]:
    """The figures of Spark's operators: the aggregation on `load`, `transformWithState` on `rows` rows of its own.

    Its warm-up batch has a quarter of `rows` on top, and the rows themselves come in two batches.
    Raises `WrongResultError` when an output differs from the batch computation.
    """
    session = peer_session(spark)
    figures: dict[str, Any] = {}
    for operator in operators:
        place = home / f"peer-{operator}"
        if operator == "aggregate":
            files, text = list(load), "Spark's aggregation: rows"
        else:
            files = few_files(workload, rows)
            text = "Spark's transformWithState: rows"
        offer(files, place / "in")
        source = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(place / "in"))
        writer = _aggregation(source, place) if operator == "aggregate" else _transform_with_state(source, place)
        query = writer.option("checkpointLocation", str(place / "checkpoints")).start()
        figures[operator] = timed(query, files, text, say)
        expected = Expected(workload, files)
        if operator == "aggregate":
            expected.check_aggregate(place / "out", "Spark's aggregation")
        else:
            expected.check_process(place / "out", "Spark's transformWithState")
        figures[operator]["verified"] = True
        shutil.rmtree(place)
    return figures


def peer_session(spark: SparkSession) -> SparkSession:
    """A session of the same application whose state is kept in Spark's RocksDB state store."""
    session = spark.newSession()
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    session.conf.set("spark.sql.shuffle.partitions", spark.sparkContext.defaultParallelism)
    return session


def few_files(workload: Workload, rows: int) -> list[InputFile]:
    """Input for a slow operator: a quarter of `rows` to warm up, then `rows` in two batches."""
    return [workload.uniform(count) for count in (rows // 4, rows // 2, rows - rows // 2)]


def timed(query: StreamingQuery, files: Sequence[InputFile], text: str, say: Say) -> dict[str, Any]:
    """The throughput of a query that has just been started on `files`, to the end of the last batch with rows."""
    try:
        with watched(query, text, files, say):
            query.processAllAvailable()
        batches = [batch for batch in batches_of(query) if batch.rows]
    finally:
        query.stop()
    end = batches[-1].start + batches[-1].seconds
    return {"throughput": throughput(batches, files, end)}


def _aggregation(source: DataFrame, place: Path) -> DataStreamWriter:
    from pyspark.sql import functions as F

    output = str(place / "out")

    def write(frame: DataFrame, _batch: int) -> None:
        frame.write.mode("append").parquet(output)

    totals = source.groupBy("key").agg(F.count("*").alias("n"), F.sum("x").alias("s"))
    return totals.writeStream.outputMode("update").foreachBatch(write)


def _transform_with_state(source: DataFrame, place: Path) -> DataStreamWriter:
    rows = (
        source.select("key", "value")
        .groupBy("key")
        .transformWithState(CountAndKeep(), "key long, n long, before string", "append", "none")
    )
    return rows.writeStream.outputMode("append").format("parquet").option("path", str(place / "out"))
