"""A real Kafka on loopback: one process that is broker and controller."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyspark
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from strandline_bench.servers.server import Server, ServerMissingError, free_port

KAFKA = Path(__file__).parents[3] / ".tools" / "kafka"
"""Where scripts/get_kafka.sh puts the broker's jars."""

# One replica of everything, few partitions for Kafka's own topics, and no waiting for members that might still come.
# Clean-up comes soon: of old values in compacted topics, and of transactions that nobody ends. A broker that was killed
# may come back when its session is over. Clients of the second listener have a password, and no rights but those that
# a test gives them.
PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},SASL_PLAINTEXT://127.0.0.1:{guarded}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{guarded}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT
inter.broker.listener.name=PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={login}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
controller.listener.names=CONTROLLER
log.dirs={folder}/data
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
log.cleaner.backoff.ms=200
log.cleaner.dedupe.buffer.size=4194304
"""

PASSWORDS = {"alice": "alice-secret", "bob": "bob-secret"}
LOGIN = (
    " ".join(
        [
            "org.apache.kafka.common.security.plain.PlainLoginModule required",
            *(f'user_{name}="{password}"' for name, password in PASSWORDS.items()),
        ]
    )
    + ";"
)

ENDED = ("CompleteCommit", "CompleteAbort")
"""States of a transaction that nobody waits for."""


class KafkaBroker(Server):
    def __init__(self, folder: Path, *, quick_start: bool = True) -> None:
        """With `quick_start`, Java compiles little: the broker is there sooner, and needs more of a core under load."""
        super().__init__(folder)
        self._jvm = QUICK_START if quick_start else ()
        self._properties = folder / "server.properties"
        self._guarded = free_port()
        self._properties.write_text(
            PROPERTIES.format(port=self.port, controller=free_port(), guarded=self._guarded, folder=folder, login=LOGIN)
        )
        made = self._run(java("kafka.tools.StorageTool", "format", "-t", uuid4().hex[:22], "-c", str(self._properties)))
        assert made.wait(60) == 0, self.log()
        self.admin = AdminClient({"bootstrap.servers": self.servers, "reconnect.backoff.max.ms": 100, "log_level": 0})

    @property
    def servers(self) -> str:
        """The value of `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def guarded(self) -> str:
        """The value of `bootstrap.servers` for a user with a password; see `PASSWORDS`."""
        return f"127.0.0.1:{self._guarded}"

    def create_topic(self, name: str = "", partitions: int = 1, **config: str) -> str:
        """Makes a topic, by default with a name of its own, and gives its name. Options have `_` for `.`."""
        name = name or f"topic-{uuid4().hex[:12]}"
        options = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, partitions, replication_factor=1, config=options)
        self.admin.create_topics([topic])[name].result(30)
        return name

    def produce(self, topic: str, *rows: tuple[str, object], partition: int = -1, timestamp: int = 0) -> None:
        """Writes a message for every key and value; `timestamp` is in milliseconds, and 0 means now."""
        producer = Producer({"bootstrap.servers": self.servers})
        for key, value in rows:
            producer.produce(topic, key=key, value=str(value), partition=partition, timestamp=timestamp)
        assert producer.flush(30) == 0

    def read(self, topic: str) -> list[tuple[str, str]]:
        """Key and value of every message that a topic holds, partition by partition."""
        partitions = self.admin.list_topics(topic, timeout=30).topics[topic].partitions
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": uuid4().hex, "enable.partition.eof": True})
        found: list[tuple[str, str]] = []
        for partition in partitions:
            consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
            while True:
                message = consumer.poll(30)
                assert message is not None, f"partition {partition} of {topic} was not read to its end"
                if (error := message.error()) is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    break
                found.append(((message.key() or b"").decode(), (message.value() or b"").decode()))
        consumer.close()
        return found

    def command(self) -> list[str]:
        return java("kafka.Kafka", str(self._properties), jvm=self._jvm)

    def answers(self) -> bool:
        try:
            return bool(self.admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False


QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def java(main: str, *arguments: str, jvm: Sequence[str] = QUICK_START) -> list[str]:
    return ["java", "-Xmx384m", *jvm, "-cp", f"{KAFKA}/*", main, *arguments]


@contextmanager
def kafka_broker(*, quick_start: bool = True) -> Iterator[KafkaBroker]:
    """Gives a broker that runs; see `KafkaBroker`. Raises `ServerMissingError` without Kafka or Java."""
    if not KAFKA.is_dir() or shutil.which("java") is None:
        raise ServerMissingError("Kafka is not installed: run `bash scripts/get_kafka.sh` (needs Maven and Java 17)")
    folder = Path(tempfile.mkdtemp(prefix="strandline-kafka-"))
    try:
        broker = KafkaBroker(folder, quick_start=quick_start)
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()
    finally:
        shutil.rmtree(folder)


@contextmanager
def transactions(servers: str) -> Iterator[Callable[[], dict[str, str]]]:
    """Gives a function that lists the open transactions: their ids, each with its state.

    librdkafka cannot list transactions, so Kafka's own client does, in a JVM.
    """
    jar = next((Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar"))
    port = launch_gateway(jarpath=str(jar), classpath=f"{KAFKA}/*", die_on_exit=True)
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
    try:
        jvm: Any = gateway.jvm
        settings = jvm.java.util.HashMap()
        settings.put("bootstrap.servers", servers)
        admin = jvm.org.apache.kafka.clients.admin.Admin.create(settings)

        def listed() -> dict[str, str]:
            found = admin.listTransactions().all().get()
            states = {str(one.transactionalId()): str(one.state().toString()) for one in found}
            return {name: state for name, state in states.items() if state not in ("Empty", *ENDED)}

        yield listed
        admin.close()
    finally:
        gateway.shutdown()
