"""Where the marker of a sink is: the last committed message of its transactional id in a compacted topic."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from strandline.errors import SinkError, StorageRefusedError
from strandline.sinks.kafka.cluster import ANSWER_SECONDS, Cluster

if TYPE_CHECKING:
    from confluent_kafka import Consumer

logger = logging.getLogger(__name__)

OPTIONS = {"cleanup.policy": "compact", "segment.ms": "86400000", "min.cleanable.dirty.ratio": "0.1"}
"""The options of a topic that the sink makes. A marker that is not the last of its key may go, and does within days."""
_TAIL = 100
"""How many of the last messages are read first. The last marker is among them if the topic serves few sinks."""
_PATIENCE = 3.0
"""How long a reader waits for the end of a transaction that may be a dead driver's."""


class MarkerTopic:
    """Partition 0 of a topic. The key of a message is a transactional id, its value a marker.

    The topic is read with `read_committed`, up to the end that it has when the reader comes. Compaction keeps the last
    committed message of every key for good, so a marker does not expire, as offsets of consumer groups do.
    """

    def __init__(self, cluster: Cluster, name: str, key: str, where: str) -> None:
        self.name = name
        self.key = key.encode()
        self._cluster = cluster
        self._where = where
        self._exists = False
        self._consumer: Consumer | None = None
        self._next = 0
        """All committed messages before this offset were read."""
        self._newest: str | None = None
        self._heard = False
        """Whether the consumer has told anything since it began to read."""
        self.held_up = False
        """Whether an open transaction kept the last reader from the end: there may be a newer marker."""

    def check(self) -> None:
        """Raise `StorageRefusedError` if the topic loses messages. It need not exist."""
        facts = self._cluster.topic(self.name)
        self._exists = facts is not None
        if facts is None:
            return
        policy = self._cluster.topic_options(self.name).get("cleanup.policy", "compact")
        if policy != "compact":
            raise StorageRefusedError(
                f"{self._where}: the topic of markers {self.name} has cleanup.policy={policy}, so it would lose the "
                "marker that says which rows are in the topic. Set cleanup.policy=compact, or name another topic with "
                "marker_topic="
            )

    def make(self, replicas: int) -> None:
        """Make the topic, unless it exists, and wait until it can be written."""
        if not self._exists and self._cluster.topic(self.name) is None:
            self._cluster.create_topic(self.name, replicas, OPTIONS)
            deadline = time.monotonic() + ANSWER_SECONDS
            while self._cluster.topic(self.name) is None:
                if time.monotonic() > deadline:
                    raise SinkError(f"{self._where}: the topic of markers {self.name} was made, and is not there yet")
                time.sleep(0.05)
        self._exists = True

    def newest(self, *, settled: bool) -> str | None:
        """The last committed marker; None if there is none.

        With `settled`, no transaction of this sink is open, so the answer is final; `SinkError` is raised if the end of
        the topic cannot be reached. Otherwise a transaction may be open. Its marker does not count yet.
        """
        self.held_up = False
        if not self._exists:
            self._exists = self._cluster.topic(self.name) is not None
            if not self._exists:
                return None
        try:
            end = self._cluster.end(self.name)
        except SinkError:
            self._exists = False  # perhaps it was deleted; the next call looks
            raise
        if self._consumer is None or end < self._next:
            self._begin(max(0, end - _TAIL))
            self._read(end, settled=settled)
            if self._newest is not None or end <= _TAIL:
                return self._newest
            self._begin(0)
        self._read(end, settled=settled)
        return self._newest

    def _begin(self, offset: int) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

        if self._consumer is None:
            self._consumer = Consumer(
                {
                    **self._cluster.for_reader(),
                    "group.id": self.key.decode(),
                    "enable.auto.commit": False,
                    "isolation.level": "read_committed",
                    "enable.partition.eof": True,
                    "auto.offset.reset": "earliest",
                    "fetch.wait.max.ms": 100,
                }
            )
            try:
                self._consumer.list_topics(self.name, ANSWER_SECONDS)  # an assignment waits half a second for it
            except KafkaException as error:
                raise self._failed(error) from error
        self._consumer.assign([TopicPartition(self.name, 0, offset or OFFSET_BEGINNING)])
        self._next, self._newest, self._heard = 0, None, False

    def _read(self, end: int, *, settled: bool) -> None:
        """Read until all messages before `end` are seen."""
        from confluent_kafka import KafkaException

        assert self._consumer is not None
        deadline = time.monotonic() + (ANSWER_SECONDS if settled else _PATIENCE)
        while self._next < end:
            try:
                message = self._consumer.poll(min(0.2, max(0.0, deadline - time.monotonic())))
            except KafkaException as failed:
                raise self._failed(failed) from failed
            if message is None:
                if time.monotonic() < deadline:
                    continue
                if settled or not self._heard:
                    reached = self._next
                    self.close()
                    raise SinkError(
                        f"{self._where}: the topic of markers {self.name} cannot be read to its end, offset {end}: "
                        f"after {ANSWER_SECONDS if settled else _PATIENCE:.0f} s the reader is at offset {reached}"
                    )
                self.held_up = True
                logger.warning(
                    "%s: a transaction is open in %s, perhaps that of a driver that is gone", self._where, self.name
                )
                return
            self._heard = True
            error = message.error()
            offset = message.offset()
            if error is None:
                if message.key() == self.key:
                    self._newest = (message.value() or b"").decode(errors="replace")  # `Marker` refuses what is damaged
                self._next = (offset or 0) + 1
            elif error.name() == "_PARTITION_EOF":
                self._next = max(self._next, offset or 0)
            elif error.name() != "GROUP_AUTHORIZATION_FAILED":  # the sink joins no group
                self.close()
                raise self._cluster.failure(error, f"reading the topic of markers {self.name}")

    def _failed(self, error: Exception) -> Exception:
        self.close()
        return self._cluster.failure(error.args[0], f"reading the topic of markers {self.name}")

    def close(self) -> None:
        """Let go of the connection."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self._next, self._newest, self._heard = 0, None, False
