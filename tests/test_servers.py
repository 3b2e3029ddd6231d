"""The servers of the tests: data survives their kills, and a client sees that they are frozen or gone."""

from __future__ import annotations

import socket

import psycopg
import pytest
from confluent_kafka import KafkaException

from strandline_bench.servers.kafka import KafkaBroker
from strandline_bench.servers.postgres import Postgres


def test_kafka_keeps_messages_over_a_kill_and_an_orderly_end(kafka: KafkaBroker) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, ("a", "one"), ("b", "two"))
    kafka.kill()
    with pytest.raises(KafkaException):
        kafka.admin.list_topics(timeout=0.5)
    kafka.start()
    kafka.produce(topic, ("a", "three"))
    kafka.stop()
    kafka.start()
    assert kafka.read(topic) == [("a", "one"), ("b", "two"), ("a", "three")]


def test_a_frozen_kafka_answers_again_after_the_thaw(kafka: KafkaBroker) -> None:
    kafka.freeze()
    with pytest.raises(KafkaException):
        kafka.admin.list_topics(timeout=0.5)
    kafka.thaw()
    assert kafka.admin.list_topics(timeout=30).brokers


def test_postgres_keeps_rows_over_a_kill_and_an_orderly_end(postgres: Postgres) -> None:
    uri = postgres.create_database()
    with psycopg.connect(uri) as connection:
        connection.execute("CREATE TABLE numbers AS SELECT x FROM generate_series(1, 3) AS x")
    postgres.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(uri)
    postgres.start()
    postgres.stop()
    postgres.start()
    with psycopg.connect(uri) as connection:
        assert connection.execute("SELECT x FROM numbers ORDER BY x").fetchall() == [(1,), (2,), (3,)]


def test_a_frozen_postgres_answers_again_after_the_thaw(postgres: Postgres) -> None:
    postgres.freeze()
    with socket.create_connection(("127.0.0.1", postgres.port), timeout=0.5) as connection:
        connection.sendall(bytes([0, 0, 0, 8, 4, 210, 22, 47]))  # asks for TLS, which PostgreSQL answers with a letter
        with pytest.raises(TimeoutError):
            connection.recv(1)
        postgres.thaw()
        connection.settimeout(30)
        assert connection.recv(1) == b"N"
