"""A job that reads from a real Kafka: what the job has read is in its checkpoints, and nothing is lost in silence."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import SparkSession

import strandline as sl
from strandline_bench.servers.kafka import KafkaBroker
from tests.jobs.driver import Driver
from tests.jobs.kafka_place import IMPATIENT, EachRow, KafkaPlace, Rows, cut, some_rows, totals_of
from tests.jobs.place import CONNECTOR
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        not CONNECTOR.is_dir(), reason="Spark's connector to Kafka is missing: run `bash scripts/get_kafka.sh`"
    ),
]

KILLS = int(os.environ.get("STRANDLINE_DRIVER_KILLS", "1"))
SEED = int(os.environ.get("STRANDLINE_SEED", str(random.SystemRandom().randrange(1 << 31))))


class TestKafkaSource:
    def test_a_restore_goes_on_at_the_offsets_of_its_checkpoint(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        """Whatever `startingOffsets` says. The savepoint is older than the newest checkpoint: rows come again."""
        topic = kafka.create_topic(partitions=2)
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
        first, second, third = some_rows(100, 1), some_rows(100, 2), some_rows(100, 3)
        kafka.produce(topic, *first)
        runs.append(run := place.sums(EachRow()).start())
        run.process_all_available()
        savepoint = run.savepoint(str(tmp_path / "savepoints"))
        kafka.produce(topic, *second)
        run.process_all_available()
        run.stop()
        assert place.totals() == totals_of(first + second)

        kafka.produce(topic, *third)
        place.options["startingOffsets"] = "latest"
        runs.append(run := place.sums(EachRow()).start(restore=savepoint, parallelism=1))
        run.process_all_available()
        run.stop()
        assert place.totals() == totals_of(first + second + third)

    def test_partitions_and_topics_that_come_while_the_job_runs_are_read_from_their_start(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        one, two = kafka.create_topic(), kafka.create_topic()
        pattern = f"{one}.*|{two}"
        place = KafkaPlace(tmp_path, spark, kafka.servers, "", **{"kafka.metadata.max.age.ms": "500"})
        del place.options["subscribe"]
        place.options["subscribePattern"] = pattern
        kafka.produce(one, ("a", 1), ("b", 2))
        kafka.produce(two, ("a", 3))
        runs.append(run := place.sums(EachRow()).start())
        run.process_all_available()
        assert place.totals() == {"a": (2, 4), "b": (1, 2)}

        kafka.admin.create_partitions([NewPartitions(one, 3)])[one].result(30)
        three = kafka.create_topic(f"{one}-more")
        kafka.produce(one, ("c", 5), partition=2)
        kafka.produce(three, ("d", 6))

        def seen() -> bool:
            run.process_all_available()
            return {"c", "d"} <= place.totals().keys()

        wait_until(seen, what="rows of the new partition and of the new topic")
        run.stop()
        kafka.produce(three, ("d", 7))
        runs.append(run := place.sums(EachRow()).start())
        run.process_all_available()
        assert place.totals() == {"a": (2, 4), "b": (1, 2), "c": (1, 5), "d": (2, 13)}

    def test_a_topic_that_was_cut_ends_the_job_unless_it_may_lose_rows(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        topic = kafka.create_topic()
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
        kafka.produce(topic, ("a", 1), ("b", 2))
        runs.append(run := place.sums(EachRow()).start())
        run.process_all_available()
        run.stop()
        kafka.produce(topic, ("a", 10), ("a", 20))
        cut(kafka, topic, before=3)

        runs.append(run := place.sums(EachRow()).start())
        with pytest.raises(sl.SourceDataLostError, match=rf"job visits, batch .*{topic}-0.*failOnDataLoss=false"):
            run.await_termination(timeout=60)
        assert run.status == "failed"
        assert run.figures().restarts == 0
        assert place.totals() == {"a": (1, 1), "b": (1, 2)}, "nothing after the gap is visible"

        place.options["failOnDataLoss"] = "false"
        runs.append(run := place.sums(EachRow()).start())
        run.process_all_available()
        assert place.totals() == {"a": (2, 21), "b": (1, 2)}

    def test_a_compacted_topic_gives_each_message_that_is_left_just_once(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        topic = kafka.create_topic(
            cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01", max_compaction_lag_ms="100"
        )
        for x in range(10):
            kafka.produce(topic, ("a", x), ("b", x))

        def compacted() -> Rows:
            kafka.produce(topic, ("c", 0))  # the cleaner works on segments that are closed, and a message closes one
            kept = [(user, int(x)) for user, x in kafka.read(topic) if user != "c"]
            return kept if len(kept) < 10 else []

        rows = wait_until(compacted, what="the compaction")
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic, maxOffsetsPerTrigger="7")
        runs.append(run := place.sums(EachRow()).start(available_now=True))
        run.await_termination(timeout=60)
        left = place.totals()
        del left["c"]
        assert left == totals_of(rows), "the offsets have gaps"

    def test_a_limit_of_offsets_cuts_what_is_there_into_batches(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        topic = kafka.create_topic(partitions=2)
        rows = some_rows(100)
        kafka.produce(topic, *rows)
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic, maxOffsetsPerTrigger="30")
        runs.append(run := place.sums(EachRow()).start(available_now=True))
        run.await_termination(timeout=60)
        assert run.status == "finished"
        assert run.figures().batches >= 4
        assert place.totals() == totals_of(rows)

    def test_the_time_of_a_message_is_its_event_time(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        topic = kafka.create_topic(retention_ms="-1")  # the messages have times of years ago
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
        job = place.job()
        frame = place.messages().selectExpr("cast(key as string) user", "timestamp")
        clicks = job.source(frame, event_time="timestamp", watermark_delay="10s")
        windows = clicks.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count(), uid="windows")
        windows.transform(lambda df: df.selectExpr("user", "unix_timestamp(window_start) start", "n")).sink(
            sl.ParquetSink(str(place.output))
        )
        minute = 60 * 28_000_000
        for second, user in ((0, "a"), (59, "a"), (61, "a"), (30, "b")):
            kafka.produce(topic, (user, 1), timestamp=(minute + second) * 1000)
        runs.append(run := job.start())
        run.process_all_available()
        assert place.rows() == []
        kafka.produce(topic, ("a", 1), timestamp=(minute + 71) * 1000)
        run.process_all_available()
        assert place.rows() == [("a", minute, 2), ("b", minute, 1)]

    def test_a_broker_that_is_down_at_the_start_and_in_the_middle_costs_restarts_alone(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        topic = kafka.create_topic()
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic, **IMPATIENT)
        rows = some_rows(50)
        kafka.produce(topic, *rows)
        kafka.kill()
        runs.append(run := place.sums(EachRow()).start())
        wait_until(lambda: run.recoveries(), 60, "a restart while there is no broker")
        reason = run.recoveries()[0].reason
        assert "job visits: a Kafka source (" in reason
        assert ") cannot be read: TimeoutException" in reason
        assert "kafka.bootstrap.servers" in reason
        kafka.start()
        run.process_all_available()
        assert place.totals() == totals_of(rows)

        before = run.figures().restarts
        kafka.kill()
        wait_until(lambda: run.figures().restarts > before, 60, "a restart while the broker is down")
        kafka.start()
        kafka.produce(topic, *rows)
        run.process_all_available()
        assert place.totals() == totals_of(rows + rows)

    def test_a_job_without_restarts_says_that_no_broker_answers(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        place = KafkaPlace(tmp_path, spark, kafka.servers, kafka.create_topic(), **IMPATIENT)
        kafka.freeze()
        runs.append(run := place.sums(EachRow(), restart_strategy="none").start())
        with pytest.raises(sl.SourceError, match="look whether the brokers run"):
            run.await_termination(timeout=60)

    def test_a_topic_that_does_not_exist_is_named_as_the_cause(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
    ) -> None:
        place = KafkaPlace(tmp_path, spark, kafka.servers, "no-such-topic", **IMPATIENT)
        runs.append(run := place.sums(EachRow(), restart_strategy="none").start())
        with pytest.raises(sl.SourceError, match="the topic does not exist"):
            run.await_termination(timeout=60)

    @pytest.mark.faults
    @pytest.mark.timeout(600)
    def test_kills_of_the_driver_neither_lose_nor_repeat_a_message(
        self, tmp_path: Path, spark: SparkSession, kafka: KafkaBroker
    ) -> None:
        print(f"seed {SEED}")
        chance = random.Random(SEED)
        topic = kafka.create_topic(partitions=2)
        place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
        rows: Rows = []
        source = {"servers": kafka.servers, "topic": topic, "maxOffsetsPerTrigger": "60"}
        with Driver(tmp_path, checkpoint_interval="200ms", kafka=source) as driver:
            for _ in range(KILLS):
                driver.start()
                driver.await_run()
                deadline = time.monotonic() + chance.uniform(0.5, 4.0)
                while time.monotonic() < deadline:
                    more = some_rows(40, chance.randrange(1 << 31))
                    kafka.produce(topic, *more)
                    rows += more
                    time.sleep(chance.uniform(0.05, 0.3))  # any moment of a batch or a checkpoint
                driver.kill()
                place.totals()
            driver.start()
            driver.finish()
        assert place.totals() == totals_of(rows), f"seed {SEED}"
