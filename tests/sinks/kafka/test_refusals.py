"""What a cluster refuses, and a cluster that does not answer: what, where, what to do; and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from strandline.errors import (
    DirectoryNotOursError,
    IncompatibleCheckpointError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
    StrandlineError,
)
from strandline.sinks.kafka import cluster as cluster_module
from strandline.sinks.kafka import marker_topic as marker_topic_module
from strandline.sinks.kafka.producer import TransactionalProducer
from strandline.sinks.kafka.sink import KafkaSink
from strandline.sinks.positions import with_positions
from strandline.sinks.staging import waiting_rows
from strandline.testing.sink import SinkJob, a_context
from strandline_bench.servers.kafka import PASSWORDS, KafkaBroker, transactions
from tests.sinks.kafka.topics import messages, values


def a_job(kafka: KafkaBroker, tmp_path: Path, topic: str | None = None, **options: Any) -> SinkJob:
    context = a_context(tmp_path / "checkpoints")
    servers = options.pop("servers", kafka.servers)
    sink = KafkaSink(servers, topic or kafka.create_topic(), **options)
    return SinkJob(sink.bound(context), context)


def topic_of(job: SinkJob) -> str:
    assert isinstance(job.sink, KafkaSink)
    return job.sink.topic


def alter(kafka: KafkaBroker, topic: str, **options: str) -> None:
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in options.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = kafka.admin
    admin.incremental_alter_configs([resource])[resource].result(30)


def users(kafka: KafkaBroker, job: SinkJob) -> list[str]:
    return [json.loads(value)["user"] for value in values(kafka, topic_of(job))]


def test_a_topic_that_does_not_exist_is_refused_before_the_takeover(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, "nowhere")
    with pytest.raises(StorageRefusedError, match=r"there is no topic 'nowhere'.*kafka-topics.sh --create"):
        job.start()
    assert job.log.generation == 0


def test_a_row_that_is_too_large_stays_staged_until_the_topic_takes_it(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path)
    driver = job.start()
    driver.checkpoint([("small", 1)])
    driver.stage([("before", 1), ("x" * 2_000_000, 2)])
    metadata = driver.complete()
    for _ in range(2):
        with pytest.raises(StorageRefusedError) as raised:
            driver.publish(metadata)
        words = str(raised.value)
        assert "writing a message of 4,000,0" in words
        assert topic_of(job) in words
        assert "raise max.message.bytes of the topic" in words
    assert users(kafka, job) == ["small"]
    with transactions(kafka.servers) as listed:
        assert listed() == {}
    alter(kafka, topic_of(job), max_message_bytes="8000000")
    driver = job.start()  # its first act is to publish the rows
    assert users(kafka, job) == ["small", "before", "x" * 2_000_000]
    driver.checkpoint([("after", 3)])
    assert len(users(kafka, job)) == 4


def test_a_message_that_only_the_broker_finds_too_large_is_named(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path)
    driver = job.start()
    driver.checkpoint([("small", 1)])
    alter(kafka, topic_of(job), max_message_bytes="10000")  # the producer knows the old limit
    driver.stage([("x" * 20_000, 2)])
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=r"writing a message of 40,0\d\d bytes .*MSG_SIZE_TOO_LARGE"):
        driver.publish(metadata)
    assert users(kafka, job) == ["small"]
    alter(kafka, topic_of(job), max_message_bytes="100000")
    driver.publish(metadata)
    assert len(users(kafka, job)) == 2


def test_batches_of_messages_are_no_larger_than_the_topic_takes(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, kafka.create_topic(max_message_bytes="5000"))
    job.start().checkpoint([("x" * 100, number) for number in range(2_000)])
    assert len(users(kafka, job)) == 2_000


def test_a_partition_that_the_topic_does_not_have_is_refused(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, partition="n", value=["user"])
    driver = job.start()
    driver.checkpoint([("a", 0)])
    driver.stage([("b", 5)])
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match="the topic has no partition with that number"):
        driver.publish(metadata)
    assert users(kafka, job) == ["a"]


def test_a_sink_without_a_key_is_refused_by_a_compacted_topic_before_the_takeover(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    job = a_job(kafka, tmp_path, kafka.create_topic(cleanup_policy="compact"), key=[])
    with pytest.raises(StorageRefusedError, match=r"the topic is compacted.* Give the sink of job 'visits' a key="):
        job.start()
    assert job.log.generation == 0


def no_keys(rows: pa.RecordBatch) -> pa.Array:
    return pa.nulls(rows.num_rows, pa.binary())


def test_a_row_without_a_key_waits_until_the_topic_is_not_compacted(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, kafka.create_topic(cleanup_policy="compact"), key=no_keys)
    driver = job.start()
    driver.stage([("a", 0)])
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=r"no message without a key.* set cleanup.policy=delete"):
        driver.publish(metadata)
    alter(kafka, topic_of(job), cleanup_policy="delete")
    job.start()
    assert users(kafka, job) == ["a"]


@pytest.mark.parametrize("limit", ["0", "2147483647"])
def test_a_limit_that_librdkafka_does_not_know_stops_no_job(kafka: KafkaBroker, tmp_path: Path, limit: str) -> None:
    job = a_job(kafka, tmp_path, kafka.create_topic(max_message_bytes=limit))
    driver = job.start()
    if limit != "0":
        driver.checkpoint([("a", 1)])
        assert users(kafka, job) == ["a"]


@pytest.mark.parametrize("options", [{"transaction.timeout.ms": 10_000}, {"message.timeout.ms": 0}], ids=str)
def test_timeouts_fit_each_other(kafka: KafkaBroker, tmp_path: Path, options: dict[str, Any]) -> None:
    job = a_job(kafka, tmp_path, options=options)
    job.start().checkpoint([("a", 1)])
    assert users(kafka, job) == ["a"]


def test_the_marker_waits_for_room_in_the_queue(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, options={"queue.buffering.max.messages": 1})
    job.start().checkpoint([("a", 1), ("b", 2)])
    assert users(kafka, job) == ["a", "b"]


def test_a_marker_that_is_no_text_is_refused_each_time(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path)
    driver = job.start()
    assert isinstance(job.sink, KafkaSink)
    assert job.sink.marker_topic is not None
    assert job.sink.transactional_id is not None
    noise = Producer({"bootstrap.servers": kafka.servers})
    noise.produce(job.sink.marker_topic, b"\xff", job.sink.transactional_id.encode())
    assert noise.flush(30) == 0
    driver.stage([("a", 1)])
    metadata = driver.complete()
    for _ in range(2):
        with pytest.raises(DirectoryNotOursError, match="has a damaged marker of a job"):
            driver.publish(metadata)


def test_rows_that_wait_for_a_transaction_are_missed_if_the_sink_makes_none_any_more(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    job = a_job(kafka, tmp_path)
    exact = job.sink
    driver = job.start()
    driver.checkpoint([("a", 1)])
    driver.stage([("b", 2)])
    driver.complete()
    job.sink = KafkaSink(kafka.servers, topic_of(job), delivery="at_least_once").bound(job.context)
    generation = job.log.generation
    with pytest.raises(IncompatibleCheckpointError, match=r"1 rows .* Start the job once with delivery='exactly_once'"):
        job.start()
    assert job.log.generation == generation
    job.sink = exact
    assert isinstance(exact, KafkaSink)
    driver = job.start()
    assert users(kafka, job) == ["a", "b"]
    driver.stage([("c", 3)])
    job.sink = KafkaSink(kafka.servers, exact.topic, delivery="at_least_once").bound(job.context)
    job.start()
    staging = waiting_rows(job.context, exact.place)
    assert list(staging.storage.list(staging.folder)) == []


def test_an_open_transaction_of_another_sink_hides_the_marker_and_is_named(
    kafka: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sinks share a topic of markers. Their driver dies in the commit of the one, after that of the other."""
    monkeypatch.setattr(marker_topic_module, "_PATIENCE", 1.0)
    markers = kafka.create_topic(cleanup_policy="compact")
    job = a_job(kafka, tmp_path, marker_topic=markers)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    other = Producer({"bootstrap.servers": kafka.servers, "transactional.id": f"other-{markers}"})
    other.init_transactions(30)
    write = TransactionalProducer.write

    def second(*arguments: Any) -> None:
        other.begin_transaction()
        other.produce(markers, b"{}", b"other")
        other.flush(30)
        write(*arguments)

    driver.stage([("b", 2)])
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalProducer, "write", second)
        driver.publish(driver.complete())
    generation = job.log.generation
    with pytest.raises(SinkError, match=r"a transaction is open in the topic of markers"):
        job.start()
    assert job.log.generation == generation
    other.abort_transaction(30)
    job.start().checkpoint([("c", 3)])
    assert users(kafka, job) == ["a", "b", "c"]


def test_a_longer_transaction_than_the_brokers_allow_is_refused(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, options={"transaction.timeout.ms": 1_000_000})
    with pytest.raises(StorageRefusedError, match=r"transaction.max.timeout.ms.* set a smaller transaction.timeout.ms"):
        job.start()


def test_a_topic_of_markers_that_would_lose_the_marker_is_refused(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, marker_topic=kafka.create_topic(retention_ms="1000"))
    with pytest.raises(StorageRefusedError, match=r"has cleanup.policy=delete, so it would lose the marker"):
        job.start()


def test_a_topic_of_markers_that_was_deleted_is_named(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path)
    first = job.start().checkpoint([("a", 1)])
    assert isinstance(job.sink, KafkaSink)
    markers = str(job.sink.marker_topic)
    kafka.admin.delete_topics([markers])[markers].result(30)
    job.newest = msgspec.structs.replace(first, properties=with_positions({}, {job.sink.place: first.batch_id}))
    with pytest.raises(SinkFilesMissingError, match=f"the job's marker in the topic '{markers}' is gone"):
        job.start()


def test_brokers_that_are_down_at_the_start_are_an_error_that_may_pass(
    kafka: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 1.0)
    job = a_job(kafka, tmp_path)
    kafka.kill()
    with pytest.raises(SinkError, match=r"no broker of 127.0.0.1:\d+ answers as it should"):
        job.start()
    assert job.log.generation == 0
    kafka.start()
    monkeypatch.undo()
    job.start().checkpoint([("a", 1)])
    assert users(kafka, job) == ["a"]


def test_a_marker_outlives_the_compaction_of_its_topic_and_many_other_messages(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    markers = kafka.create_topic(
        cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.001", segment_bytes="1048576"
    )
    job = a_job(kafka, tmp_path, marker_topic=markers)
    driver = job.start()
    for number in range(5):
        driver.checkpoint([("a", number)])
    noise = Producer({"bootstrap.servers": kafka.servers})
    for number in range(500):
        noise.produce(markers, b"x", b"other")
        if number % 100 == 0:
            noise.flush(30)
    assert noise.flush(30) == 0
    before = len(messages(kafka, markers))
    again = job.start()
    again.checkpoint([("b", 1)])
    assert users(kafka, job) == ["a"] * 5 + ["b"]
    assert before >= 500


# --- rights ---------------------------------------------------------------------------------------


def login(name: str, password: str | None = None) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": name,
        "sasl.password": password or PASSWORDS[name],
    }


def allow(kafka: KafkaBroker, kind: Any, name: str, *operations: Any) -> None:
    """Gives alice rights to something that only one test uses."""
    admin = kafka.admin
    bindings = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:alice", "*", operation, AclPermissionType.ALLOW)
        for operation in operations
    ]
    for future in admin.create_acls(bindings).values():
        future.result(30)


def test_rights_are_missed_one_by_one(kafka: KafkaBroker, tmp_path: Path) -> None:
    topic, markers = kafka.create_topic(), kafka.create_topic(cleanup_policy="compact")
    names: dict[str, Any] = {"transactional_id": f"id-{topic}", "marker_topic": markers}
    job = a_job(kafka, tmp_path, topic, servers=kafka.guarded, options=login("alice"), **names)
    kind, operation = ResourceType, AclOperation
    with pytest.raises(StorageRefusedError, match="TOPIC_AUTHORIZATION_FAILED"):
        job.start()
    allow(kafka, kind.TOPIC, topic, operation.DESCRIBE)
    with pytest.raises(StorageRefusedError, match=r"may not write to the topic .*: give it the right Write"):
        job.start()
    allow(kafka, kind.TOPIC, topic, operation.WRITE)
    with pytest.raises(StrandlineError, match=markers):
        job.start()
    allow(kafka, kind.TOPIC, markers, operation.READ, operation.WRITE, operation.DESCRIBE)
    with pytest.raises(StorageRefusedError, match=r"TRANSACTIONAL_ID_AUTHORIZATION_FAILED.*Describe and Write"):
        job.start()
    allow(kafka, kind.TRANSACTIONAL_ID, f"id-{topic}", operation.DESCRIBE, operation.WRITE)
    job.start().checkpoint([("a", 1)])
    assert users(kafka, job) == ["a"]


def test_a_wrong_password_is_refused_and_not_shown(
    kafka: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 3.0)
    job = a_job(kafka, tmp_path, "any", servers=kafka.guarded, options=login("alice", "wrong-password"))
    with pytest.raises(StorageRefusedError, match="check the user and the password") as raised:
        job.start()
    assert "wrong-password" not in str(raised.value)
