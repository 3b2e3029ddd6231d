"""What is in a topic, as readers see it."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, IsolationLevel, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from strandline_bench.servers.kafka import KafkaBroker


def messages(kafka: KafkaBroker, topic: str, isolation: str = "read_committed", patience: float = 30) -> list[Message]:
    """All messages, partition by partition. Fails if the end is not reached, as behind an open transaction."""
    admin = kafka.admin
    partitions = [TopicPartition(topic, number) for number in range(partition_count(kafka, topic))]
    asked = admin.list_offsets(
        {partition: OffsetSpec.latest() for partition in partitions},  # type: ignore[no-untyped-call]
        isolation_level=IsolationLevel.READ_UNCOMMITTED,
    )
    ends = {partition.partition: asked[partition].result(30).offset for partition in partitions}
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.servers,
            "group.id": uuid4().hex,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in ends])
    reached = dict.fromkeys(ends, 0)
    found: dict[int, list[Message]] = {number: [] for number in ends}
    deadline = time.monotonic() + patience
    while any(reached[number] < end for number, end in ends.items()):
        assert time.monotonic() < deadline, f"{topic}: read to {reached} of {ends}"
        message = consumer.poll(0.2)
        if message is None:
            continue
        number, offset = message.partition(), message.offset()
        assert number is not None
        assert offset is not None
        if message.error() is None:
            found[number].append(message)
            reached[number] = offset + 1
        else:
            assert message.error().name() == "_PARTITION_EOF"  # type: ignore[union-attr]
            reached[number] = max(reached[number], offset)
    consumer.close()
    return [message for number in sorted(found) for message in found[number]]


def values(kafka: KafkaBroker, topic: str, **options: Any) -> list[bytes]:
    return [message.value() or b"" for message in messages(kafka, topic, **options)]


def partition_count(kafka: KafkaBroker, topic: str) -> int:
    return len(kafka.admin.list_topics(topic, timeout=30).topics[topic].partitions)
