"""`KafkaSink` keeps the contract of sinks with a marker."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.kafka.sink import KafkaSink
from strandline.testing.sink import SCHEMA, Row, SinkContract, SinkJob, a_context
from strandline_bench.servers.kafka import KafkaBroker
from tests.sinks.kafka.topics import values


@pytest.mark.slow
def test_a_million_rows_are_one_transaction(kafka: KafkaBroker, tmp_path: Path) -> None:
    context = a_context(tmp_path)
    job = SinkJob(KafkaSink(kafka.servers, kafka.create_topic(partitions=4)).bound(context), context)
    driver = job.start()
    batches = (
        pa.RecordBatch.from_arrays(
            [pa.array([f"u{first}"] * 10_000), pa.array(range(first, first + 10_000))], schema=SCHEMA
        )
        for first in range(0, 1_000_000, 10_000)
    )
    driver.batches += 1
    driver.staged += job.sink.stager(context).stage(batches, driver.batch, 0)
    driver.publish(driver.complete())
    assert isinstance(job.sink, KafkaSink)
    assert sorted(json.loads(value)["n"] for value in values(kafka, job.sink.topic)) == list(range(1_000_000))


class TestAppend(SinkContract):
    @pytest.fixture
    def sink(self, kafka: KafkaBroker) -> ExactlyOnceSink:
        self.kafka = kafka
        return KafkaSink(kafka.servers, kafka.create_topic(partitions=3))

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, KafkaSink)
        return [(row["user"], row["n"]) for row in map(json.loads, values(self.kafka, sink.topic))]
