"""A Kafka cluster as a sink sees it: how to connect, what topics there are, and what its errors mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from strandline.errors import ConfigError, SinkError, StorageRefusedError
from strandline.redaction import without_values
from strandline.sinks.extras import required

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _ClientLog:
    """What librdkafka says by itself: it repeats itself while a broker is down, and failed calls tell what matters."""

    def log(self, _level: int, *words: Any) -> None:
        logger.debug(*words)


_client_log = _ClientLog()

ANSWER_SECONDS = 30.0
"""How long a call waits for the cluster."""

OWN_OPTIONS = {
    "bootstrap.servers": "bootstrap_servers=",
    "metadata.broker.list": "bootstrap_servers=",
    "transactional.id": "transactional_id=",
    "partitioner": "partitioner=",
    "acks": "nothing: the sink waits for all replicas that are in sync",
    "request.required.acks": "nothing: the sink waits for all replicas that are in sync",
    "enable.idempotence": "nothing: it is on",
    "isolation.level": "nothing: it is read_committed",
    "group.id": "nothing: the sink joins no group",
    "on_delivery": "nothing: the sink checks each delivery",
    "delivery.report.only.error": "nothing: the sink checks each delivery",
    "error_cb": "nothing: errors are in the log and in the error of a failed call",
    "logger": "nothing: the sink logs as strandline.sinks.kafka",
}
"""Options that the sink sets, and what to use instead."""

_CONNECTION = (
    "security.",
    "sasl.",
    "ssl.",
    "enable.ssl",
    "enable.sasl",
    "oauth",
    "https.",
    "socket.",
    "broker.",
    "client.",
    "reconnect.",
    "retry.backoff",
    "connections.",
    "metadata.",
    "topic.metadata.",
    "api.version.",
    "debug",
)
"""How the names of options begin that are about the connection. The other options are for producers."""

_LASTING = {
    "_AUTHENTICATION": "check the user and the password in options=",
    "SASL_AUTHENTICATION_FAILED": "check the user and the password in options=",
    "_SSL": "check the ssl.* settings in options=",
    "TOPIC_AUTHORIZATION_FAILED": "give the user Describe and Write on the topic, and Read on the topic of markers",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "give the user Describe and Write on the transactional id",
    "CLUSTER_AUTHORIZATION_FAILED": "give the user IdempotentWrite on the cluster, and Create for the topic of markers",
    "POLICY_VIOLATION": "ask who runs the cluster",
    "INVALID_TRANSACTION_TIMEOUT": "the brokers allow no longer transactions than their transaction.max.timeout.ms; "
    "raise it there, or set a smaller transaction.timeout.ms in options=",
    "MSG_SIZE_TOO_LARGE": "raise max.message.bytes of the topic (and message.max.bytes, if options= has it), or make "
    "the row smaller",
    "RECORD_LIST_TOO_LARGE": "set a smaller batch.size in options=",
    "INVALID_RECORD": "a compacted topic takes no message without a key: leave out rows whose key is null. Rows that "
    "are staged keep their key: set cleanup.policy=delete on the topic until they are written",
    "INVALID_TIMESTAMP": "the topic refuses times that are too far from now: see its message.timestamp.*.max.ms",
    "INVALID_CONFIG": "ask who runs the cluster",
    "INVALID_REPLICATION_FACTOR": "there are fewer brokers than replicas: make the topic yourself",
    "INVALID_TOPIC_EXCEPTION": "the name is no name of a topic",
    "UNSUPPORTED_VERSION": "the brokers are too old",
    "_UNSUPPORTED_FEATURE": "the brokers are too old, or librdkafka was built without it",
    "_UNKNOWN_TOPIC": "make the topic",
    "_UNKNOWN_PARTITION": "the topic has no partition with that number: add partitions to the topic. Rows that are "
    "staged keep their partition",
}
"""Errors that would come again, and what to do."""
_LEADER_MOVES = ("NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "_NOENT")
"""Errors of a partition that is new, or whose broker has just gone: another one will lead it soon."""
_SILENCE = ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_MSG_TIMED_OUT", "_RESOLVE", "_WAIT_COORD")
"""Errors that mean that no broker answered. Why is told by an event that came before."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What a sink wants to know of a topic."""

    partitions: int
    replicas: int
    operations: frozenset[str] | None
    """What the user may do with the topic, in capitals; None if the cluster does not say."""


class Cluster:
    """Connections to one cluster, made when they are needed."""

    def __init__(self, servers: str, options: Mapping[str, Any], where: str) -> None:
        """`where` names the sink in errors."""
        self._servers = servers
        self._options = dict(options)
        self._where = where
        self._admin: AdminClient | None = None
        self._trouble: KafkaError | None = None
        """What a client reported last about its connection."""

    def for_producer(self, **settings: Any) -> dict[str, Any]:
        """The settings of a producer. Options of the user override `settings`, whose names have `_` for `.`."""
        named = {name.replace("_", "."): value for name, value in settings.items()}
        return {**self._common(), **named, **self._options}

    def for_reader(self) -> dict[str, Any]:
        """The settings of a client that does not produce."""
        options = {name: value for name, value in self._options.items() if name.startswith(_CONNECTION)}
        return {**self._common(), **options}

    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self._servers,
            "client.id": "strandline",
            "log_level": 5,
            "error_cb": self._note,
            "logger": _client_log,
        }

    def _note(self, error: KafkaError) -> None:
        self._trouble = error

    # --- topics -----------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicFacts | None:
        """What is known of a topic; None if it does not exist."""
        from confluent_kafka import KafkaException, TopicCollection

        asked = self.admin().describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=ANSWER_SECONDS
        )
        try:
            found = self._answer(asked[name], f"looking for the topic {name}")
        except KafkaException as error:
            if error.args[0].name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
                return None
            raise self.failure(error.args[0], f"looking for the topic {name}") from error
        operations = found.authorized_operations
        return TopicFacts(
            len(found.partitions),
            min((len(partition.replicas) for partition in found.partitions), default=1),
            frozenset(operation.name for operation in operations) if operations is not None else None,
        )

    def topic_options(self, name: str) -> dict[str, str]:
        """The options of a topic; none if the user may not see them."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]  # documented as public

        resource = ConfigResource(ResourceType.TOPIC, name)
        asked = self.admin().describe_configs([resource], request_timeout=ANSWER_SECONDS)
        try:
            found = self._answer(asked[resource], f"reading the options of the topic {name}")
        except KafkaException as error:
            if not error.args[0].name().endswith("AUTHORIZATION_FAILED"):
                raise self.failure(error.args[0], f"reading the options of the topic {name}") from error
            logger.debug("%s: the options of the topic %s may not be read: %s", self._where, name, error)
            return {}
        return {entry.name: entry.value for entry in found.values() if entry.value is not None}

    def create_topic(self, name: str, replicas: int, options: Mapping[str, str]) -> None:
        """Make a topic of one partition, unless it exists."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        topic = NewTopic(name, 1, replication_factor=replicas, config=dict(options))
        asked = self.admin().create_topics([topic], operation_timeout=ANSWER_SECONDS, request_timeout=ANSWER_SECONDS)
        try:
            self._answer(asked[name], f"making the topic {name}")
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                settings = " ".join(f"--config {option}={value}" for option, value in options.items())
                advice = (
                    "or have somebody make it: kafka-topics.sh --create "
                    f"--topic {name} --partitions 1 --replication-factor {replicas} {settings}"
                )
                raise self.failure(error.args[0], f"making the topic {name}", advice) from error

    def end(self, name: str) -> int:
        """The offset after the last message of partition 0, whether or not its transaction has ended."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        partition = TopicPartition(name, 0)
        doing = f"looking for the end of the topic {name}"
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            asked = self.admin().list_offsets(
                {partition: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=ANSWER_SECONDS,
            )
            try:
                return int(self._answer(asked[partition], doing).offset)
            except KafkaException as error:
                if error.args[0].name() not in _LEADER_MOVES or time.monotonic() > deadline:
                    raise self.failure(error.args[0], doing) from error
            time.sleep(0.1)

    def admin(self) -> AdminClient:
        """The client for questions. Raises `ConfigError` if an option is wrong."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            try:
                self._admin = AdminClient(self.for_reader())
            except KafkaException as error:
                raise ConfigError(f"{self._where}: options=: {error.args[0].str()}") from error
        return self._admin

    def _answer(self, asked: Future[T], doing: str) -> T:
        """The answer to a question. Raises `KafkaException` if the cluster, or the client, gave an error."""
        from confluent_kafka import KafkaError

        try:
            return asked.result(ANSWER_SECONDS + 5)  # the client gives up before that
        except FutureTimeoutError as error:
            raise self.failure(KafkaError(KafkaError._TIMED_OUT), doing) from error

    def close(self) -> None:
        """Let go of connections. They are made again when they are needed."""
        self._admin = None
        self._trouble = None

    # --- errors -----------------------------------------------------------------------------------

    def failure(self, error: KafkaError, doing: str, advice: str = "") -> SinkError | StorageRefusedError:
        """The error to raise for an error of Kafka's: whether it may pass, and what to do."""
        if self._admin is not None:
            self._admin.poll(0)  # has `_note` called
        cause = error
        if error.name() in _SILENCE and self._trouble is not None and self._trouble.name() in _LASTING:
            cause = self._trouble
        words = f"{self._where}: {doing} failed: {self._shown(cause.str())} ({cause.name()})"
        if cause.name() in _LASTING:
            todo = _LASTING[cause.name()] + (f"; {advice}" if advice else "")
            return StorageRefusedError(f"{words}. What to do: {todo}. Rows that are staged stay staged")
        if error.name() in _SILENCE:
            seen = f"; last seen: {self._shown(self._trouble.str())}" if self._trouble is not None else ""
            return SinkError(f"{words}; no broker of {self._servers} answers as it should{seen}")
        return SinkError(f"{words}{f'; {advice}' if advice else ''}")

    def _shown(self, text: str) -> str:
        return without_values(text, _secrets(self._options))


def checked_options(where: str, options: Mapping[str, Any], partitioner: str) -> dict[str, Any]:
    """The options of a sink, if librdkafka takes them. Contacts nobody. Raises `ConfigError`."""
    kafka = required("confluent_kafka", "kafka", where)
    for name in options:
        if name in OWN_OPTIONS:
            raise ConfigError(f"{where}: options= has {name!r}, which the sink sets itself; use {OWN_OPTIONS[name]}")
    try:
        kafka.Producer({**options, "partitioner": partitioner, "transactional.id": "check", "logger": _client_log})
    except kafka.KafkaException as error:
        text = without_values(error.args[0].str(), _secrets(options))
        given = f"partitioner={partitioner!r}" if '"partitioner"' in text else "options="
        raise ConfigError(
            f"{where}: {given}: {text}; the names and values are those of librdkafka (its CONFIGURATION.md), without "
            "Spark's prefix 'kafka.'"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: options=: {without_values(str(error), _secrets(options))}; the names and values are those of "
            "librdkafka"
        ) from error
    return dict(options)


def _secrets(options: Mapping[str, Any]) -> list[str]:
    words = ("password", "secret", "key.pem", "sasl.username", "jaas")
    return [str(value) for name, value in options.items() if any(word in name for word in words)]
