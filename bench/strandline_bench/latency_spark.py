"""Spark's own operator as a peer of `bench latency`: counts per key in the JVM, in micro-batches and in real time.

In micro-batches a row's count is written and durable when its batch ends. In real time Spark writes each count into
another topic of Kafka as soon as it is known, and its state is durable when one of its long batches ends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from numpy.typing import NDArray

from strandline_bench.events import Int64s
from strandline_bench.servers.kafka import KafkaBroker
from strandline_bench.spark_peer import SETTINGS
from strandline_bench.timing import batches_of
from strandline_bench.workload import WrongResultError

Float64s = NDArray[np.float64]

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from strandline_bench.latency import Stream

BATCH: Final = "5 seconds"
"""How long a batch of Spark's real-time mode is: the least that Spark takes. Its default is five minutes."""
_MANY: Final = 100_000
_LOOK: Final = 0.2
"""For how many seconds a consumer gathers so many messages, also if there are no more."""
_APART: Final = 1e6
"""More seconds than a measurement takes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of the messages of one measurement."""

    made: Stream
    covered: Int64s
    """The next offset of every partition, for each batch."""
    durable_at: list[float]
    """When each of these batches ended, in seconds since the epoch."""
    batch_ms: list[float]
    output_at: Float64s | None = None
    """When the count that a message made was written, for every message, if that was earlier than durable."""
    visible: tuple[Int64s, list[float]] | None = None
    """As `covered` and `durable_at`, for the checkpoints that made rows visible."""


def run_operator(
    messages: DataFrame,
    broker: KafkaBroker,
    folder: Path,
    topic: str,
    produced: Callable[[], Stream],
    *,
    realtime: bool,
) -> Seen:
    """Counts the messages, which `produced` makes. Raises `WrongResultError` if a count is wrong or missing."""
    spark = messages.sparkSession
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    counts = messages.groupBy("key").agg({"*": "count", "value": "max"}).toDF("key", "n", "value")
    output = broker.create_topic(partitions=1)
    if realtime:
        # Spark refuses an aggregation in real time unless it is told not to look.
        spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", "false")
        texts = counts.selectExpr("cast(key as string) key", "cast(n as string) value")
        kafka: Any = texts.writeStream.format("kafka")  # PySpark's types do not know of the trigger
        writer = kafka.trigger(realTime=BATCH)
        writer = writer.option("kafka.bootstrap.servers", broker.servers).option("topic", output)
    else:
        writer = counts.writeStream.format("noop")
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints:
        query = writer.outputMode("update").option("checkpointLocation", checkpoints).start()
        try:
            made = produced()
            wanted = [len(range(partition, made.rows, made.partitions)) for partition in range(made.partitions)]
            while not query.awaitTermination(0.2):
                ends = ends_of(query, topic, made.partitions)
                if wanted in ends.values():
                    break
            batches = {int(one["batchId"]): one for one in query.recentProgress if "addBatch" in one["durationMs"]}
            timed = dict(zip(sorted(batches), batches_of(query), strict=True))
        finally:
            query.stop()
        order = sorted(ends)
        return Seen(
            made,
            np.array([ends[batch] for batch in order], np.int64),
            [timed[batch].start + timed[batch].seconds for batch in order],
            [one.seconds * 1000 for one in timed.values() if one.rows],
            _written_at(broker, output, made) if realtime else None,
        )


def ends_of(query: StreamingQuery, topic: str, partitions: int) -> dict[int, list[int]]:
    """For each batch of a query, the next offset of every partition."""
    found = {}
    for progress in query.recentProgress:
        if "addBatch" not in progress["durationMs"]:
            continue
        offsets = [json.loads(source["endOffset"] or "null") for source in progress["sources"]]
        of_topic = next(one[topic] for one in offsets if isinstance(one, dict) and topic in one)
        found[int(progress["batchId"])] = [int(of_topic.get(str(number), 0)) for number in range(partitions)]
    return found


def _written_at(broker: KafkaBroker, topic: str, made: Stream) -> Float64s:
    """When the count that each message made was written: the first count of its key that is at least as high."""
    keys = made.keys_of(np.arange(made.rows, dtype=np.int64))
    order = np.argsort(keys, kind="stable")
    totals = np.bincount(keys, minlength=made.keys)
    firsts = np.cumsum(totals) - totals
    at = np.full(made.rows, np.inf)
    """In the order of the keys: the times of the first, second, ... count of each key."""
    for found, counts, times in _counts(broker, topic):
        if np.any(counts > totals[found]):
            raise WrongResultError("Spark has counted messages that are not there")
        np.minimum.at(at, firsts[found] + counts - 1, times)
    ends = firsts + totals - 1
    if not np.all(np.isfinite(at[ends[totals > 0]])):
        raise WrongResultError("Spark has not counted all messages")
    # A count that was not written is covered by the next one of its key. Keys are set apart, so that none borrows.
    start, apart = made.start_us / 1e6, keys[order] * _APART
    later = np.minimum.accumulate((at - start + apart)[::-1])[::-1] - apart + start
    written = np.empty(made.rows)
    written[order] = later
    return written


def _counts(broker: KafkaBroker, topic: str) -> Iterator[tuple[Int64s, Int64s, Float64s]]:
    """Keys, counts and times of all messages of a topic with one partition, some at a time."""
    consumer = Consumer({"bootstrap.servers": broker.servers, "group.id": topic, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    try:
        over = False
        while not over:
            some = consumer.consume(_MANY, _LOOK)
            rows = [one for one in some if one.error() is None]
            over = any((error := one.error()) is not None and error.code() == KafkaError._PARTITION_EOF for one in some)
            keys = np.array([int(one.key() or b"0") for one in rows], np.int64)
            counts = np.array([int(one.value() or b"0") for one in rows], np.int64)
            yield keys, counts, np.array([one.timestamp()[1] / 1000 for one in rows])
    finally:
        consumer.close()
