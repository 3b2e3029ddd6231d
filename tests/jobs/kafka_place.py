"""The job that most tests run, with Kafka as its source."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from confluent_kafka import TopicPartition
from pyspark.sql import DataFrame, SparkSession

from strandline_bench.servers.kafka import KafkaBroker
from tests.jobs.place import Place, Sum

IMPATIENT = {
    "kafka.default.api.timeout.ms": "3000",
    "kafka.request.timeout.ms": "2000",
    "fetchOffset.numRetries": "1",
    "fetchOffset.retryIntervalMs": "100",
}
"""Options of the source with which Spark does not wait minutes for a broker that is down."""


Rows = list[tuple[str, int]]


def some_rows(count: int, seed: int = 7, users: int = 20) -> Rows:
    chance = random.Random(seed)
    return [(f"u{chance.randrange(users)}", chance.randrange(1000)) for _ in range(count)]


def cut(kafka: KafkaBroker, topic: str, before: int) -> None:
    """Delete the messages of partition 0 before an offset, as the retention of a topic does."""
    for deleted in kafka.admin.delete_records([TopicPartition(topic, 0, before)]).values():
        deleted.result(30)


class EachRow(Sum):
    """Counts and sums per user, and emits both for every row: the batches into which rows fall do not matter."""

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
            yield (*key, n, s)
        self.total.update((n, s))


class KafkaPlace(Place):
    """The key of a message is the user, its value is x."""

    def __init__(self, root: Path, spark: SparkSession, servers: str, topic: str, **options: str) -> None:
        super().__init__(root, spark)
        self.options = {
            "kafka.bootstrap.servers": servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
            **options,
        }

    def messages(self) -> DataFrame:
        return self.spark.readStream.format("kafka").options(**self.options).load()

    def source(self, per_batch: int = 1) -> DataFrame:
        return self.messages().selectExpr("cast(key as string) user", "cast(cast(value as string) as long) x")

    def totals(self) -> dict[str, tuple[int, int]]:
        """The last count and sum of every user, after a check that `EachRow` has emitted every count just once."""
        counts: dict[str, list[int]] = {}
        last: dict[str, tuple[int, int]] = {}
        for user, n, s in self.rows():
            counts.setdefault(user, []).append(n)
            last[user] = max(last.get(user, (0, 0)), (n, s))
        for user, seen in counts.items():
            assert sorted(seen) == list(range(1, len(seen) + 1)), f"{user}: a row is missing, or came twice"
        return last


def totals_of(rows: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """What `KafkaPlace.totals` must give after these messages."""
    totals: dict[str, tuple[int, int]] = {}
    for user, x in rows:
        n, s = totals.get(user, (0, 0))
        totals[user] = (n + 1, s + x)
    return totals
