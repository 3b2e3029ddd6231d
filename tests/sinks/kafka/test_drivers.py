"""Two drivers of one job, and other programs: whoever freezes, dies or wakes up, a row is in the topic once."""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from pyspark import cloudpickle

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.errors import SinkError, StorageRefusedError, StrandlineError
from strandline.sinks.kafka.sink import KafkaSink
from strandline.testing.sink import Row, SinkDriver, SinkJob, a_context
from strandline_bench.servers.kafka import KafkaBroker, transactions
from tests.sinks.kafka.topics import messages, values
from tests.waiting import wait_until


def a_job(kafka: KafkaBroker, tmp_path: Path, topic: str | None = None, **options: Any) -> SinkJob:
    context = a_context(tmp_path / "checkpoints")
    sink = KafkaSink(kafka.servers, topic or kafka.create_topic(partitions=2), **options)
    return SinkJob(sink.bound(context), context)


def topic_of(job: SinkJob) -> str:
    assert isinstance(job.sink, KafkaSink)
    return job.sink.topic


def rows(kafka: KafkaBroker, job: SinkJob) -> list[Row]:
    return sorted((row["user"], row["n"]) for row in map(json.loads, values(kafka, topic_of(job))))


def some_rows(count: int, first: int = 0) -> list[Row]:
    return [(f"u{number % 50}", number) for number in range(first, first + count)]


CHILD = """
import os, pickle, signal, sys
import confluent_kafka
from strandline.errors import FencedError, SinkError
from strandline.sinks.base import SinkCommit

work, call, moment = sys.argv[1:4]

class Freezing(confluent_kafka.Producer):
    def __getattribute__(self, name):
        known = super().__getattribute__(name)
        if name != call:
            return known
        def frozen(*arguments):
            if moment == "before":
                self.flush(30) if call == "commit_transaction" else None
                os.kill(os.getpid(), signal.SIGSTOP)
            known(*arguments)
            if moment == "after":
                os.kill(os.getpid(), signal.SIGSTOP)
        return frozen

confluent_kafka.Producer = Freezing
with open(work, "rb") as file:
    sink, context, log, metadata = pickle.load(file)
target = sink.target(context)
print("ready", flush=True)
try:
    target.publish(SinkCommit(metadata.checkpoint_id, metadata.batch_id, metadata.sink_files, log))
    print("published", flush=True)
except FencedError:
    print("fenced", flush=True)
except SinkError as error:
    print(error, flush=True)
"""


@contextmanager
def publishing(
    driver: SinkDriver, metadata: CheckpointMetadata, folder: Path, call: str = "-", moment: str = "-"
) -> Iterator[subprocess.Popen[str]]:
    """Another process publishes, and stops before or after a call of Kafka's producer."""
    work = folder / "work.pickle"
    work.write_bytes(cloudpickle.dumps((driver.job.sink, driver.job.context, driver.log, metadata)))  # type: ignore[no-untyped-call]
    command = [sys.executable, "-c", CHILD, str(work), call, moment]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


MOMENTS = [
    ("init_transactions", "before"),
    ("init_transactions", "after"),
    ("begin_transaction", "before"),
    ("commit_transaction", "before"),
    ("commit_transaction", "after"),
]


@pytest.mark.faults
@pytest.mark.parametrize(("call", "moment"), MOMENTS)
def test_a_driver_that_freezes_in_a_commit_and_wakes_up_after_its_successor_began_writes_nothing(
    kafka: KafkaBroker, tmp_path: Path, call: str, moment: str
) -> None:
    job = a_job(kafka, tmp_path)
    old = job.start()
    old.checkpoint(some_rows(10))
    old.stage(some_rows(500, 10))
    metadata = old.complete()
    with publishing(old, metadata, tmp_path, call, moment) as child:
        process = psutil.Process(child.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30, "the frozen driver")
        new = job.start()
        new.checkpoint(some_rows(10, 510))
        process.send_signal(signal.SIGCONT)
        said, _ = child.communicate(timeout=60)
        # Without the lost answer, the frozen driver may still have had the marker that it had seen.
        assert said == "fenced\n" or (call, moment, said) == ("commit_transaction", "after", "published\n")
    new.checkpoint(some_rows(10, 520))
    assert rows(kafka, job) == sorted(some_rows(530))


@pytest.mark.faults
def test_a_transaction_that_takes_too_long_is_ended_by_the_brokers_and_says_so(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    job = a_job(kafka, tmp_path, options={"transaction.timeout.ms": 1000, "message.timeout.ms": 1000})
    driver = job.start()
    driver.stage(some_rows(500))
    metadata = driver.complete()
    with (
        publishing(driver, metadata, tmp_path, "commit_transaction", "before") as child,
        transactions(kafka.servers) as listed,
    ):
        process = psutil.Process(child.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30, "the frozen driver")
        wait_until(lambda: listed() == {}, 30, "the end of the transaction")
        process.send_signal(signal.SIGCONT)
        said, _ = child.communicate(timeout=60)
    assert "the brokers ended the transaction" in said
    assert "raise transaction.timeout.ms" in said
    driver.publish(metadata)
    assert rows(kafka, job) == sorted(some_rows(500))


@pytest.mark.faults
def test_drivers_that_freeze_or_die_at_random_leave_every_row_once_and_no_open_transaction(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    job = a_job(kafka, tmp_path)
    driver = job.start()
    count = 0
    for _ in range(4):
        driver.stage(some_rows(20_000, count))
        metadata = driver.complete()
        count += 20_000
        with publishing(driver, metadata, tmp_path) as child:
            time.sleep(chance.uniform(0.0, 0.4))
            frozen = chance.random() < 0.5
            child.send_signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            driver = job.start()
            driver.checkpoint(some_rows(10, count))
            count += 10
            if frozen:
                child.send_signal(signal.SIGCONT)
                child.communicate(timeout=60)
    driver.checkpoint(some_rows(10, count))
    assert rows(kafka, job) == sorted(some_rows(count + 10))
    with transactions(kafka.servers) as listed:
        assert listed() == {}


def test_a_driver_that_lets_go_leaves_no_threads(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path)
    gc.collect()
    gc.disable()  # it would find the producer, some day
    try:
        job.start().target.close()
        before = psutil.Process().num_threads()
        for number in range(4):
            driver = job.start()
            driver.checkpoint(some_rows(10, 10 * number))
            driver.target.close()
        wait_until(lambda: psutil.Process().num_threads() <= before + 4, 10, "the end of the producers' threads")
    finally:
        gc.enable()


class Faulty(Producer):
    """A producer whose first answers to `commit_transaction` are lost, before or after Kafka has carried it out."""

    lost: int
    carried_out: bool

    def commit_transaction(self, timeout: float = -1) -> None:
        lose = type(self).lost > 0
        type(self).lost -= lose
        if not lose or self.carried_out:
            super().commit_transaction(timeout)
        if lose:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "lost on purpose"))


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_lost_answer_to_a_commit_leads_to_another_look(
    kafka: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    job = a_job(kafka, tmp_path)
    driver = job.start()
    driver.checkpoint(some_rows(10))
    driver.target.close()
    with monkeypatch.context() as patch:
        patch.setattr(confluent_kafka, "Producer", type("One", (Faulty,), {"lost": 2, "carried_out": carried_out}))
        driver.stage(some_rows(10, 10))
        metadata = driver.complete()
        with pytest.raises(SinkError, match=r"writing a transaction to the topic .* lost on purpose"):
            driver.publish(metadata)
        for _ in range(2):
            try:
                driver.publish(metadata)
            except SinkError:
                assert not carried_out
    driver.publish(metadata)
    driver.checkpoint(some_rows(10, 20))
    assert rows(kafka, job) == sorted(some_rows(30))
    with transactions(kafka.servers) as listed:
        assert listed() == {}


def test_a_program_with_the_same_transactional_id_ends_in_a_clear_error(kafka: KafkaBroker, tmp_path: Path) -> None:
    job = a_job(kafka, tmp_path, transactional_id="taken")
    driver = job.start()
    for number in range(3):
        other = Producer({"bootstrap.servers": kafka.servers, "transactional.id": "taken"})
        other.init_transactions(30)
        driver.stage(some_rows(10, 10 * number))
        metadata = driver.complete()
        if number < 2:
            driver.publish(metadata)
    with pytest.raises(StorageRefusedError, match=r"another program uses the transactional id 'taken'.* 3 commits"):
        driver.publish(metadata)
    again = job.start()
    again.checkpoint(some_rows(10, 30))
    assert rows(kafka, job) == sorted(some_rows(40))


def test_two_jobs_that_take_turns_with_one_transactional_id_do_not_fight_for_ever(
    kafka: KafkaBroker, tmp_path: Path
) -> None:
    jobs = [a_job(kafka, tmp_path / str(number), transactional_id="shared") for number in range(2)]
    drivers = [job.start() for job in jobs]
    errors: list[StrandlineError] = []
    while not errors:
        for driver in drivers:
            try:
                driver.checkpoint(some_rows(1, driver.batches))
            except StorageRefusedError as error:
                errors.append(error)
                break
    assert "another program uses the transactional id 'shared'" in str(errors[0])
    for job, driver in zip(jobs, drivers, strict=True):
        job.start()
        assert rows(kafka, job) == sorted(some_rows(driver.batches))


def test_a_job_with_the_marker_of_another_job_is_refused(kafka: KafkaBroker, tmp_path: Path) -> None:
    topic = kafka.create_topic()
    options: dict[str, Any] = {"transactional_id": "mine", "marker_topic": f"{topic}-markers"}
    a_job(kafka, tmp_path, topic, **options).start().checkpoint(some_rows(1))
    context = a_context(tmp_path / "other", job="clicks")
    other = SinkJob(KafkaSink(kafka.servers, topic, **options).bound(context), context)
    with pytest.raises(StrandlineError, match="the transactional id 'mine' is that of job 'visits'"):
        other.start()


@pytest.mark.slow
@pytest.mark.faults
def test_a_broker_that_dies_freezes_and_comes_back_while_rows_are_written(kafka: KafkaBroker, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    job = a_job(kafka, tmp_path)
    driver = job.start()
    count = 0
    for disturb in (kafka.kill, kafka.freeze, kafka.stop):
        driver.stage(some_rows(50_000, count))
        count += 50_000
        metadata = driver.complete()
        failures: list[BaseException] = []

        def publish(metadata: CheckpointMetadata = metadata, failures: list[BaseException] = failures) -> None:
            for _ in range(6):
                try:
                    driver.publish(metadata)
                    return
                except SinkError as error:
                    print(error)
                except BaseException as error:
                    failures.append(error)
                    raise
            failures.append(AssertionError("six tries"))

        thread = threading.Thread(target=publish)
        thread.start()
        time.sleep(chance.uniform(0.0, 0.6))
        disturb()
        time.sleep(0.5)
        kafka.ensure_running()
        thread.join(180)
        assert not thread.is_alive()
        assert failures == []
    found = [json.loads(message.value() or b"") for message in messages(kafka, topic_of(job))]
    assert sorted((row["user"], row["n"]) for row in found) == sorted(some_rows(count))
    last: dict[str, int] = {}
    for row in found:  # partition by partition: each key keeps its order
        assert last.get(row["user"], -1) < row["n"]
        last[row["user"]] = row["n"]
