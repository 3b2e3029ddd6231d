"""Producers of messages: one transaction at a time, or each message for itself."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strandline.errors import SinkError, StorageError
from strandline.sinks.kafka.cluster import ANSWER_SECONDS, Cluster
from strandline.sinks.kafka.messages import BY_PARTITIONER, NOW

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Message, Producer

QUEUE_MESSAGES = 500_000
QUEUE_KILOBYTES = 128 << 10
"""What waits in the memory of the process to be sent, at most."""
DELIVERY_SECONDS = 60.0
"""How long a message may take to be written before the write fails."""
TRANSACTION_SECONDS = 900.0
"""How long a transaction may take: the longest that brokers allow by default."""
MOST_BATCH_BYTES = 1_000_000
MOST_MESSAGE_BYTES = 1_000_000_000
"""The largest message that librdkafka can be told to take; the limit of a topic may be higher."""
_MANY = 10_000

_FENCED = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")


class FencedProducerError(Exception):
    """A newer producer has the transactional id. Nothing of the transaction is visible, unless it had ended."""


class _Losses:
    """Remembers the first message that was not written: why, and its size.

    It knows nothing of the producer that calls it. So a producer that is dropped ends at once, with its threads and
    connections, and need not wait for the garbage collector.
    """

    def __init__(self) -> None:
        self.first: tuple[KafkaError, int] | None = None

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and error.name() != "_PURGE_QUEUE":
            self.note(error, message.key(), message.value())

    def note(self, error: KafkaError, key: bytes | None, value: bytes | None) -> None:
        if self.first is None:
            self.first = (error, len(key or b"") + len(value or b""))


class MessageProducer:
    """Hands messages to librdkafka, and remembers the first one that could not be written."""

    def __init__(self, cluster: Cluster, topic: str, partitioner: str, **settings: Any) -> None:
        from confluent_kafka import Producer

        self.topic = topic
        self._cluster = cluster
        largest = max(1, int(cluster.topic_options(topic).get("max.message.bytes", MOST_BATCH_BYTES)))
        options = cluster.for_producer(
            queue_buffering_max_messages=QUEUE_MESSAGES,
            queue_buffering_max_kbytes=QUEUE_KILOBYTES,
            # The limit of a topic is for whole batches, and librdkafka does not divide one that is refused.
            batch_size=min(MOST_BATCH_BYTES, largest),
            message_max_bytes=min(max(MOST_BATCH_BYTES, largest), MOST_MESSAGE_BYTES),
            **settings,
        )
        self.transaction_seconds = float(options.get("transaction.timeout.ms", 0)) / 1000
        # librdkafka refuses messages that may take longer than their transaction.
        patience = min(DELIVERY_SECONDS, self.transaction_seconds or DELIVERY_SECONDS)
        options.setdefault("message.timeout.ms", options.pop("delivery.timeout.ms", int(patience * 1000)))
        self.delivery_seconds = float(options["message.timeout.ms"]) / 1000 or TRANSACTION_SECONDS  # 0 is for ever
        self._lost = _Losses()
        self._producer: Producer = Producer(
            {
                **options,
                "partitioner": partitioner,
                "enable.idempotence": True,
                "on_delivery": self._lost,
                "delivery.report.only.error": True,
            }
        )

    def send(self, messages: pa.RecordBatch) -> None:
        """Queue a batch of messages. Waits while the queue is full."""
        from confluent_kafka import KafkaException

        columns = {name: messages.column(name).to_pylist() for name in messages.schema.names}
        values, keys = columns["value"], columns.get("key", repeat(None))
        produce, topic = self._producer.produce, self.topic
        try:
            if columns.keys() <= {"key", "value"}:
                for value, key in zip(values, keys, strict=False):
                    try:
                        produce(topic, value, key)
                    except BufferError:
                        self._when_there_is_room(topic, value, key)
            else:
                others = (
                    columns.get("partition", repeat(BY_PARTITIONER)),
                    columns.get("timestamp", repeat(NOW)),
                    columns.get("headers", repeat(None)),
                )
                for value, key, partition, timestamp, headers in zip(values, keys, *others, strict=False):
                    message = (topic, value, key, partition, None, None, timestamp, headers or [])
                    try:
                        produce(*message)
                    except BufferError:
                        self._when_there_is_room(*message)
        except KafkaException as error:
            if error.args[0].name() == "MSG_SIZE_TOO_LARGE":
                self._lost.note(error.args[0], key, value)
            raise
        self._producer.poll(0)

    def _when_there_is_room(self, *message: Any) -> None:
        deadline = time.monotonic() + 2 * self.delivery_seconds
        while True:
            self._producer.poll(0.1)
            try:
                return self._producer.produce(*message)
            except BufferError:
                if time.monotonic() > deadline:
                    raise SinkError(
                        f"{self.topic}: {len(self._producer)} messages wait, and none was written for "
                        f"{2 * self.delivery_seconds:.0f} s"
                    ) from None

    def flush(self) -> None:
        """Wait until all messages are written. Raises `SinkError` or `StorageRefusedError` if one was not."""
        from confluent_kafka import KafkaError

        left = self._producer.flush(self.delivery_seconds + 1)
        if self._lost.first is not None or left:
            raise self.failure(KafkaError(KafkaError._MSG_TIMED_OUT), f"writing to the topic {self.topic}")

    def _fatal(self) -> KafkaError | None:
        """The error after which the producer is of no use; None if there is none. Has `_lost` called."""
        from confluent_kafka import KafkaException

        try:
            self._producer.poll(0)
        except KafkaException as error:
            told: KafkaError = error.args[0]
            return told
        return None

    def failure(self, error: KafkaError, doing: str) -> SinkError | StorageError:
        """The error to raise: that of a lost message, which says more, or `error`."""
        if self._lost.first is None:
            return self._cluster.failure(error, doing)
        cause, size = self._lost.first
        self._lost.first = None
        return self._cluster.failure(cause, f"writing a message of {size:,} bytes to the topic {self.topic}")


class TransactionalProducer(MessageProducer):
    """Writes messages in transactions, until another producer with the same transactional id appears."""

    def __init__(self, cluster: Cluster, topic: str, partitioner: str, transactional_id: str) -> None:
        """Fences all earlier producers with the id: when this returns, their transactions have ended."""
        from confluent_kafka import KafkaException

        super().__init__(
            cluster,
            topic,
            partitioner,
            transactional_id=transactional_id,
            transaction_timeout_ms=int(TRANSACTION_SECONDS * 1000),
        )
        try:
            self._producer.init_transactions(ANSWER_SECONDS)
        except KafkaException as error:
            cause = self._fatal() or error.args[0]
            raise self.failure(cause, f"beginning with the transactional id {transactional_id}") from error

    def write(self, batches: Iterable[pa.RecordBatch], marker_topic: str, key: bytes, marker: str) -> None:
        """One transaction with all messages and the marker.

        Raises `FencedProducerError` if another producer has appeared. After any error the outcome may be open, and the
        producer is of no use any more: after an aborted transaction its sequence numbers may have a gap.
        """
        from confluent_kafka import KafkaException

        began = time.monotonic()
        try:
            self._producer.begin_transaction()
            for messages in batches:
                self.send(messages)
            # The marker comes last, so that readers of markers wait for the end of this transaction only briefly.
            if len(self._producer) > _MANY:
                self._producer.flush(self.transaction_seconds)
            try:
                self._producer.produce(marker_topic, marker, key, 0)
            except BufferError:
                self._when_there_is_room(marker_topic, marker, key, 0)
            self._producer.commit_transaction(self.delivery_seconds + ANSWER_SECONDS)
        except KafkaException as error:
            raise self._failed(error, time.monotonic() - began) from error
        except BaseException:
            self._abort()
            raise

    def _failed(self, error: KafkaException, seconds: float) -> Exception:
        cause: KafkaError = self._fatal() or error.args[0]
        if seconds > self.transaction_seconds and self._lost.first is None:
            return SinkError(
                f"{self.topic}: the brokers ended the transaction, because it took {seconds:.0f} s, and its "
                f"transaction.timeout.ms is {self.transaction_seconds * 1000:.0f}. Its rows stay staged. Take "
                "checkpoints more often, or raise transaction.timeout.ms in options= and, if need be, "
                "transaction.max.timeout.ms of the brokers"
            )
        if cause.fatal() and cause.name() in _FENCED:
            return FencedProducerError()
        if not cause.fatal():
            self._abort()
        return self.failure(cause, f"writing a transaction to the topic {self.topic}")

    def _abort(self) -> None:
        """End the transaction, so that readers need not wait for it. The next producer does it if this one cannot."""
        from confluent_kafka import KafkaException

        self._producer.purge()
        with suppress(KafkaException):
            self._producer.abort_transaction(ANSWER_SECONDS)
