"""Jobs that write to Kafka: the topic holds what the job emitted, whatever happened to drivers and brokers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import strandline as sl
from strandline.sinks.kafka.messages import MessageForm
from strandline_bench.servers.kafka import KafkaBroker
from tests.jobs.kafka_place import EachRow, KafkaPlace, totals_of
from tests.jobs.place import Place, Sum, batches, running_sums
from tests.sinks.kafka.topics import messages
from tests.waiting import wait_until

pytestmark = pytest.mark.spark


def written(kafka: KafkaBroker, topic: str) -> list[tuple[Any, ...]]:
    """The rows in the topic, sorted, after a check of their keys."""
    found = []
    for message in messages(kafka, topic):
        row = json.loads(message.value() or b"")
        assert (message.key() or b"").decode() == row["user"]
        found.append(tuple(row.values()))
    return sorted(found, key=repr)


def sums(place: Place, sink: sl.KafkaSink, **options: Any) -> sl.Job:
    job = place.job(**options)
    job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums").sink(sink)
    return job


def test_from_kafka_to_kafka_over_a_cancelled_run(spark: SparkSession, tmp_path: Path, kafka: KafkaBroker) -> None:
    source, target = kafka.create_topic(partitions=2), kafka.create_topic(partitions=3)
    place = KafkaPlace(tmp_path, spark, kafka.servers, source)

    def start(**options: Any) -> sl.JobRun:
        job = place.job(**options)
        counted = job.source(place.source()).key_by("user").process(EachRow(), place.OUTPUT, uid="sums")
        counted.sink(sl.KafkaSink(kafka.servers, target))
        return job.start()

    rows = [(f"u{number % 7}", number) for number in range(600)]
    kafka.produce(source, *rows[:200])
    with start() as run:
        run.process_all_available()
        kafka.produce(source, *rows[200:400])
        run.process_all_available()
    run = start(checkpoint_interval="1h")
    kafka.produce(source, *rows[400:])
    wait_until(lambda: run.figures().batches >= 1, what="a batch that no checkpoint covers")
    run.cancel()
    with start() as run:
        run.process_all_available()
    last: dict[str, tuple[int, int]] = {}
    for message in messages(kafka, target):  # partition by partition
        row = json.loads(message.value() or b"")
        assert row["n"] == last.get(row["user"], (0, 0))[0] + 1
        last[row["user"]] = (row["n"], row["s"])
    assert last == totals_of(rows)


@pytest.mark.faults
def test_a_broker_that_is_killed_and_comes_back_costs_no_row(place: Place, kafka: KafkaBroker) -> None:
    topic = kafka.create_topic(partitions=2)
    data = batches(4)
    with sums(place, sl.KafkaSink(kafka.servers, topic), checkpoint_interval="100ms").start() as run:
        place.write(data[0])
        run.process_all_available()
        kafka.kill()
        for rows in data[1:3]:
            place.write(rows)
        wait_until(lambda: run.figures().batches >= 2, what="a batch without a broker")
        kafka.start()
        place.write(data[3])
        run.process_all_available()
    assert written(kafka, topic) == running_sums(data)


def test_a_row_that_is_too_large_ends_the_run_and_is_there_after_the_topic_was_changed(
    place: Place, kafka: KafkaBroker
) -> None:
    topic = kafka.create_topic(max_message_bytes="2000")
    data = [[("a", 1)], [("x" * 4000, 2)]]
    sink = sl.KafkaSink(kafka.servers, topic)
    with sums(place, sink).start() as run:
        place.write(data[0])
        run.process_all_available()
    place.write(data[1])
    run = sums(place, sink).start()
    with pytest.raises(sl.StorageRefusedError, match=r"raise max.message.bytes of the topic"):
        run.await_termination(timeout=60)
    assert written(kafka, topic) == running_sums(data[:1])
    entry = ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    kafka.admin.incremental_alter_configs([resource])[resource].result(30)
    with sums(place, sink).start():
        assert written(kafka, topic) == running_sums(data)  # the first act of a start


def test_rows_at_least_once_are_there_before_a_checkpoint(place: Place, kafka: KafkaBroker) -> None:
    topic = kafka.create_topic(partitions=2)
    sink = sl.KafkaSink(kafka.servers, topic, delivery="at_least_once", headers=None)
    data = batches(2)
    run = sums(place, sink, checkpoint_interval="1h").start()
    for rows in data:
        place.write(rows)
    expected = running_sums(data)
    wait_until(lambda: written(kafka, topic) == expected, what="the rows of two batches")
    run.cancel()
    with sums(place, sink).start() as run:
        run.process_all_available()
    assert set(written(kafka, topic)) == set(expected)


def test_a_refusal_in_a_task_is_told_as_it_is(place: Place, kafka: KafkaBroker) -> None:
    topic = kafka.create_topic(max_message_bytes="2000")
    run = sums(place, sl.KafkaSink(kafka.servers, topic, delivery="at_least_once")).start()
    place.write([("x" * 4000, 2)])
    with pytest.raises(sl.StorageRefusedError, match=r"writing a message of 8,0\d\d bytes to the topic"):
        run.await_termination(timeout=60)


def test_spark_reads_the_values_back_with_the_schema_of_the_rows(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT id, id / 3 AS x, IF(id = 1, DOUBLE('NaN'), IF(id = 2, FLOAT('-Infinity'), 0)) AS odd, "
        "CAST(id AS DECIMAL(30, 10)) / 7 AS d, TIMESTAMP '2024-03-31 02:30:00.123456 UTC' AS ts, "
        "TIMESTAMP_NTZ '2024-03-31 02:30:00.5' AS ntz, DATE '2024-02-29' AS day, X'00FF' AS bin, id = 1 AS yes, "
        "IF(id = 0, NULL, CONCAT('\"\\n', id)) AS text, "
        "NAMED_STRUCT('a', ARRAY(id, NULL), 'm', MAP('k', TIMESTAMP '1969-12-31 23:59:59.5 UTC')) AS nested "
        "FROM RANGE(3)"
    )
    batches = rows.toArrow().to_batches()
    form = MessageForm("here").bound(batches[0].schema)
    values = [value for some in batches for value in form.messages(some).column("value").to_pylist()]
    read = spark.createDataFrame([(value.decode(),) for value in values], "value string")
    again = read.select(F.from_json("value", rows.schema).alias("v")).select("v.*")
    assert repr(sorted(again.collect())) == repr(sorted(rows.collect()))


def broken(_rows: Any) -> list[bytes]:
    raise ValueError("no such customer")


def test_an_error_in_a_serializer_ends_the_run_and_names_the_cause(place: Place, kafka: KafkaBroker) -> None:
    run = sums(place, sl.KafkaSink(kafka.servers, kafka.create_topic(), value=broken)).start()
    place.write([("a", 2)])
    with pytest.raises(sl.UserCodeError, match=r"the function of value= failed: ValueError: no such customer"):
        run.await_termination(timeout=60)
