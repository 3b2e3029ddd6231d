"""A job in real time, with a real Kafka: the same rows come out as in micro-batches, whatever happens."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import strandline as sl
from strandline.errors import JobDefinitionError, SlotLostError, SourceDataLostError, StrandlineError
from strandline.pyspark_releases import has_realtime
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.realtime.slots import EpochSlots
from strandline_bench.servers.kafka import KafkaBroker
from tests.jobs.chain import chain, check
from tests.jobs.driver import Driver
from tests.jobs.kafka_place import EachRow, KafkaPlace, cut, some_rows, totals_of
from tests.jobs.place import CONNECTOR
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        not CONNECTOR.is_dir(), reason="Spark's connector to Kafka is missing: run `bash scripts/get_kafka.sh`"
    ),
    pytest.mark.skipif(not has_realtime(), reason="Spark 4.3 is the first with a real-time mode for Python"),
]

KILLS = int(os.environ.get("STRANDLINE_DRIVER_KILLS", "1"))
SEED = int(os.environ.get("STRANDLINE_SEED", str(random.SystemRandom().randrange(1 << 31))))


def test_a_job_goes_from_one_mode_to_the_other_with_any_parallelism(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    topic = kafka.create_topic(partitions=2)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    rows: list[tuple[str, int]] = []

    def go_on(run: sl.JobRun) -> None:
        runs.append(run)
        rows.extend(more := some_rows(60, len(rows)))
        kafka.produce(topic, *more)
        run.process_all_available()
        assert place.totals() == totals_of(rows)

    realtime = place.sums(EachRow(), latency_mode="realtime", changelog=True)
    go_on(run := realtime.start())
    assert run.figures().rows == 60
    run.rescale(1)
    go_on(run)
    run.stop()

    place.options["startingOffsets"] = "latest"  # which no restore looks at
    go_on(run := place.sums(EachRow()).start(parallelism=2))
    savepoint = run.savepoint(str(tmp_path / "savepoints"))
    go_on(run)
    run.stop()

    del rows[180:]  # those after the savepoint come again
    runs.append(run := realtime.start(restore=savepoint, parallelism=1))
    rows.extend(some_rows(60, 180))
    go_on(run)
    run.cancel()
    runs.append(run := realtime.start(parallelism=2))
    run.process_all_available()
    run.stop()
    assert place.totals() == totals_of(rows)


def test_windows_over_two_topics_close_when_both_have_passed_them(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    """Rows pass a union, a filter and a projection on their way. The filter drops the last rows of both topics."""
    one, two = kafka.create_topic(retention_ms="-1"), kafka.create_topic(retention_ms="-1")
    place = KafkaPlace(tmp_path, spark, kafka.servers, one)
    job = place.job(latency_mode="realtime", restart_strategy="fixed-delay", restart_delay="2s")

    def clicks(topic: str) -> sl.Stream:
        place.options["subscribe"] = topic
        frame = place.messages().selectExpr("cast(key as string) user", "cast(value as string) x", "timestamp")
        return job.source(frame, event_time="timestamp", watermark_delay="0s")

    united = clicks(one).union(clicks(two)).transform(lambda df: df.filter("x != 0").select("timestamp", "user"))
    windows = united.key_by("user").window(sl.tumbling("1m"), late="late").aggregate(n=sl.count(), uid="windows")
    windows.sink(sl.ParquetSink(str(place.output)))
    windows.side("late").sink(sl.ParquetSink(str(tmp_path / "late")))
    minute = 60 * 28_000_000

    def produce(topic: str, *rows: tuple[str, int, int]) -> None:
        for user, x, second in rows:
            kafka.produce(topic, (user, x), timestamp=(minute + second) * 1000)

    def counts() -> list[tuple[Any, ...]]:
        return [(row[0], int(row[-1])) for row in place.rows()]

    produce(one, ("a", 1, 0), ("a", 1, 59), ("b", 1, 61))
    produce(two, ("a", 1, 30))
    runs.append(run := job.start())
    run.process_all_available()
    assert counts() == [], "the second topic holds the windows open"
    produce(two, ("c", 1, 62))
    run.process_all_available()
    assert counts() == [("a", 3)]
    produce(one, ("a", 1, 5))
    run.process_all_available()
    assert len(place.rows(tmp_path / "late")) == 1
    os.kill(run.processes().slots[0].pid, signal.SIGKILL)
    wait_until(lambda: run.status == "restarting", what="a run that has no generation")
    savepoint = run.stop(drain=True, savepoint_dir=str(tmp_path / "savepoints"))
    assert counts() == [("a", 3), ("b", 1), ("c", 1)]
    assert savepoint is not None
    assert Path(savepoint).is_dir()
    with pytest.raises(sl.JobFailedError, match="no savepoint was made"):
        run.stop(savepoint_dir=str(tmp_path / "savepoints"))


@pytest.mark.faults
def test_steps_that_read_other_steps(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    """Rows of one step come to the next one within their epoch; whatever happens, each of them does once."""
    topics = {"first": kafka.create_topic(partitions=1), "second": kafka.create_topic(partitions=1)}
    rows: dict[str, list[tuple[str, int]]] = {"first": [], "second": []}
    place = KafkaPlace(tmp_path, spark, kafka.servers, topics["first"])

    def produce(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name, topic in topics.items():
                rows[name].extend(more := some_rows(5, len(rows[name]), users=8))
                kafka.produce(topic, *more)

    def started(**options: Any) -> sl.JobRun:
        frames = []
        for topic in topics.values():
            place.options["subscribe"] = topic
            frames.append(place.source())
        runs.append(chain(place, *frames, **options).start())
        return runs[-1]

    def compare(run: sl.JobRun) -> None:
        run.process_all_available()
        check(place, rows["first"], rows["second"])

    run = started(latency_mode="realtime", changelog=True, checkpoint_interval="100ms")
    produce(0.5)
    compare(run)
    os.kill(run.processes().slots[0].pid, signal.SIGKILL)
    produce(0.5)
    compare(run)
    run.rescale(1)
    produce(0.3)
    run.stop()
    run = started()
    produce(0.3)
    compare(run)
    run.stop()


def test_a_callback_sees_rows_at_once_and_no_checkpoint_is_needed_for_that(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    topic = kafka.create_topic(partitions=1)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    seen: list[tuple[Any, ...]] = []
    job = place.job(latency_mode="realtime", checkpoint_interval="1h")
    counts = job.source(place.source()).key_by("user").process(EachRow(), place.OUTPUT)
    counts.sink(sl.CallbackSink(lambda rows, _batch: seen.extend(tuple(row.values()) for row in rows.to_pylist())))
    runs.append(run := job.start())
    for number in range(1, 4):
        kafka.produce(topic, ("a", number))
    wait_until(lambda: len(seen) == 3, what="the rows")
    assert seen == [("a", 1, 1), ("a", 2, 3), ("a", 3, 6)]
    assert [one for one in run.checkpoints() if one.status == "completed"] == []


@pytest.mark.faults
def test_a_run_begins_again_where_it_began_and_no_checkpoint_follows_a_commit_that_failed(
    tmp_path: Path,
    spark: SparkSession,
    kafka: KafkaBroker,
    runs: list[sl.JobRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All slots have prepared an epoch, and the driver does not learn it. There is no checkpoint yet to go back to."""
    topic = kafka.create_topic(partitions=1)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic, startingOffsets="latest")
    fails, failing, real = threading.Event(), threading.Event(), EpochSlots.prepare

    def prepare(slots: EpochSlots, *request: Any) -> Any:
        answer = real(slots, *request)
        if fails.is_set():
            fails.clear()
            failing.set()
            time.sleep(0.5)  # meanwhile the thread of the checkpoints waits to begin one
            raise SlotLostError("the answers were lost")
        return answer

    monkeypatch.setattr(EpochSlots, "prepare", prepare)
    options: dict[str, Any] = {"restart_strategy": "fixed-delay", "restart_delay": "0s"}
    job = place.sums(EachRow(), latency_mode="realtime", changelog=True, checkpoint_interval="1h", **options)
    runs.append(run := job.start())
    rows: list[tuple[str, int]] = []

    def probed() -> bool:
        kafka.produce(topic, ("probe", 1))
        return run.figures().rows > 0

    wait_until(probed, what="the first row that is read")
    fails.set()

    def ask() -> None:
        failing.wait(30)
        with contextlib.suppress(StrandlineError):  # the next generation may have processed nothing yet
            run.trigger_checkpoint()

    asked = threading.Thread(target=ask)
    asked.start()
    rows += some_rows(50)
    kafka.produce(topic, *rows)
    asked.join(60)
    assert not asked.is_alive()
    rows += some_rows(10, 2)
    kafka.produce(topic, *rows[50:])
    run.process_all_available()
    assert run.figures().restarts == 1
    run.stop()
    totals = place.totals()
    assert totals.pop("probe")[0] >= 1
    assert totals == totals_of(rows)


def test_rows_that_kafka_has_deleted_end_the_run_unless_the_source_may_lose_them(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    topic = kafka.create_topic(partitions=1)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    rows = some_rows(40)
    kafka.produce(topic, *rows[:10])
    runs.append(run := place.sums(EachRow(), latency_mode="realtime").start())
    run.process_all_available()
    run.stop()
    kafka.produce(topic, *rows[10:])
    cut(kafka, topic, 25)
    gone = f"partition 0 of topic '{topic}' begins at offset 25, and the job has read up to 10"
    with pytest.raises(SourceDataLostError, match=re.escape(gone)):
        place.sums(EachRow(), latency_mode="realtime").start()
    assert place.totals() == totals_of(rows[:10])
    place.options["failOnDataLoss"] = "false"
    runs.append(run := place.sums(EachRow(), latency_mode="realtime").start())
    run.process_all_available()
    assert run.figures().restarts == 0
    assert place.totals() == totals_of(rows[:10] + rows[25:])


@pytest.mark.faults
def test_whatever_is_lost_every_row_is_counted_once(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun]
) -> None:
    topic = kafka.create_topic(partitions=2)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    rows: list[tuple[str, int]] = []
    job = place.sums(
        EachRow(), latency_mode="realtime", changelog=True, heartbeat_timeout="5s", checkpoint_interval="100ms"
    )
    runs.append(run := job.start())

    def more(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            rows.extend(some := some_rows(20, len(rows)))
            kafka.produce(topic, *some)

    def lose(pids: Callable[[], list[int]], how: signal.Signals) -> None:
        before = run.figures().restarts
        more(0.3)
        os.kill(wait_until(pids)[0], how)
        wait_until(lambda: run.figures().restarts > before, 60, f"the restart after {how.name}")
        more(0.3)

    more(0.5)
    lose(lambda: [slot.pid for slot in run.processes().slots], signal.SIGKILL)
    lose(lambda: [slot.pid for slot in run.processes().slots], signal.SIGSTOP)
    lose(lambda: [manager.pid for manager in run.processes().task_managers], signal.SIGKILL)
    run.process_all_available()
    assert place.totals() == totals_of(rows)


class Dies:
    """A call of the cluster during which a task manager is killed, once, when it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.armed = False
        self.killed = threading.Event()
        real = getattr(Cluster, name)

        def dying(cluster: Cluster, *arguments: Any, **options: Any) -> Any:
            if self.armed:
                self.armed = False
                os.kill(cluster.processes()[0].pid, signal.SIGKILL)
                self.killed.set()
            return real(cluster, *arguments, **options)

        monkeypatch.setattr(Cluster, name, dying)


@pytest.mark.faults
def test_a_task_manager_may_die_in_a_commit_or_a_barrier_while_every_core_reads_a_partition(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker, runs: list[sl.JobRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one needs a core to start. So the generation ends, or the query before the last checkpoint."""
    topic = kafka.create_topic(partitions=2)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    commit, barrier = Dies(monkeypatch, "commit"), Dies(monkeypatch, "barrier")
    rows: list[tuple[str, int]] = []
    enough = threading.Event()

    def produce() -> None:
        while not enough.wait(0.02):
            more = some_rows(20, len(rows))
            kafka.produce(topic, *more)
            rows.extend(more)

    options: dict[str, Any] = {"latency_mode": "realtime", "heartbeat_timeout": "3s"}
    runs.append(run := place.sums(EachRow(), changelog=True, checkpoint_interval="200ms", **options).start())
    producer = threading.Thread(target=produce)
    producer.start()
    try:
        wait_until(lambda: run.figures().rows > 100, what="some rows")
        commit.armed = True
        wait_until(lambda: run.figures().restarts == 1, 60, "the restart after a loss in a commit")
        before = run.figures().rows
        wait_until(lambda: run.figures().rows > before, 60, "more rows")
    finally:
        enough.set()
        producer.join()
    run.stop()

    runs.append(run := place.sums(EachRow(), checkpoint_interval="1h", **options).start())
    more = some_rows(20, len(rows))
    kafka.produce(topic, *more)
    rows.extend(more)
    wait_until(lambda: run.figures().rows > 0, what="the rows")
    barrier.armed = True
    run.stop()
    assert commit.killed.is_set()
    assert barrier.killed.is_set()
    runs.append(run := place.sums(EachRow()).start())
    run.process_all_available()
    assert place.totals() == totals_of(rows)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_kills_of_the_driver_neither_lose_nor_repeat_a_row(
    tmp_path: Path, spark: SparkSession, kafka: KafkaBroker
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    topic = kafka.create_topic(partitions=2)
    place = KafkaPlace(tmp_path, spark, kafka.servers, topic)
    rows: list[tuple[str, int]] = []
    source = {"servers": kafka.servers, "topic": topic}
    with Driver(tmp_path, checkpoint_interval="50ms", latency_mode="realtime", changelog=True, kafka=source) as driver:
        for _ in range(KILLS):
            driver.start()
            driver.await_run()
            deadline = time.monotonic() + chance.uniform(0.5, 5.0)
            while time.monotonic() < deadline:
                more = some_rows(40, chance.randrange(1 << 31))
                kafka.produce(topic, *more)
                rows += more
                time.sleep(chance.uniform(0.05, 0.3))  # any moment of an epoch or a checkpoint
            driver.kill()
            place.totals()
        log = tmp_path / "driver.log"
        before = log.stat().st_size
        driver.start()
        driver.finish()
    printed = log.read_bytes()[before:].decode()
    assert not re.search(r"^Traceback|\bERROR\b|^\tat ", printed, re.MULTILINE), printed
    assert place.totals() == totals_of(rows), f"seed {SEED}"


class TestRefusals:
    """What real time does not support is refused by name, before the job is taken over."""

    @pytest.fixture
    def place(self, tmp_path: Path, spark: SparkSession) -> KafkaPlace:
        return KafkaPlace(tmp_path, spark, "localhost:1", "no-topic")

    def test_options_that_do_not_fit(self, place: KafkaPlace) -> None:
        job = place.sums(latency_mode="realtime", batch_interval="1s")
        with pytest.raises(JobDefinitionError, match="batch_interval is for micro-batches"):
            job.start()
        with pytest.raises(JobDefinitionError, match="real time reads on"):
            place.sums(latency_mode="realtime").start(available_now=True)
        with pytest.raises(JobDefinitionError, match="has none in real time"):
            place.sums(latency_mode="realtime", shuffle="spark").start()

    def test_sinks_and_steps_that_do_not_fit(self, place: KafkaPlace) -> None:
        job = place.job(latency_mode="realtime")
        counts = job.source(place.source()).key_by("user").aggregate(n=sl.count())
        counts.sink(sl.ForeachBatchSink(lambda _rows, _batch: None))
        with pytest.raises(JobDefinitionError, match=r"ForeachBatchSink takes rows from Spark.*latency_mode='batch'"):
            job.start()

    @pytest.mark.parametrize(
        ("transform", "why"),
        [
            (lambda df: df.repartition(2), "cannot follow it through Repartition"),
            (lambda df: df.withColumn("x", F.explode(F.array("x", "x"))), "cannot follow it through Generate"),
            (lambda df: df.mapInPandas(lambda frames: frames, df.schema), "a function in Python in front of a step"),
            (lambda df: df.withColumn("x", F.udf(abs, "long")("x")), "a function in Python in front of a step"),
            (lambda df: df.filter("x in (select id from range(3))"), "cannot follow it through a subquery"),
        ],
    )
    def test_a_transform_that_loses_the_offsets_of_rows(
        self, place: KafkaPlace, transform: Callable[[Any], Any], why: str
    ) -> None:
        job = place.job(latency_mode="realtime")
        counts = job.source(place.source()).transform(transform).key_by("user").aggregate(n=sl.count())
        counts.sink(sl.ParquetSink(str(place.output)))
        with pytest.raises(JobDefinitionError, match=why):
            job.start()
        assert not place.checkpoints.exists(), "another driver of the job goes on"

    def test_a_source_that_is_not_kafka(self, place: KafkaPlace) -> None:
        job = place.job(latency_mode="realtime")
        files = place.spark.readStream.schema("user string, x long").parquet(str(place.input))
        job.source(files).key_by("user").aggregate(n=sl.count()).sink(sl.ParquetSink(str(place.output)))
        with pytest.raises(JobDefinitionError, match="reads Kafka, and this job has another source"):
            job.start()
