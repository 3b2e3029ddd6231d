"""Every example on its sample data, compared with the same computed in plain Python from all rows at once."""

from __future__ import annotations

import importlib
import json
import sqlite3
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import strandline as sl
from strandline.testing import ProcessorHarness
from strandline_bench.servers.kafka import KafkaBroker
from strandline_bench.servers.postgres import Schema
from tests.jobs.place import CONNECTOR
from tests.sinks.kafka.topics import messages

pytestmark = pytest.mark.spark

EXAMPLES = Path(__file__).parents[1] / "examples"
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    """The sample data; the folder of the examples is on the path, as it is for `python examples/demo.py`."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("data")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def output(data: Any, spark: SparkSession, tmp_path: Path) -> Callable[[str], Path]:
    """Runs an example, and gives the folder of its output."""
    demo = importlib.import_module("demo")
    return lambda name: demo.run(spark, name, tmp_path)


def rows_in(folder: Path) -> Rows:
    return sorted((tuple(row.values()) for row in pq.ParquetDataset(str(folder)).read().to_pylist()), key=repr)


MICROSECOND = timedelta(microseconds=1)


def watermark(rows: list[dict[str, Any]], delay: timedelta, time: str = "ts") -> datetime:
    """Where it is when all rows are in."""
    latest: datetime = max(row[time] for row in rows)
    return latest - delay


def test_sessions_are_clicks_without_a_long_pause(data: Any, output: Callable[[str], Path]) -> None:
    *clicks, late = data.clicks()
    gap = timedelta(minutes=5)
    expected = []
    for user in {click["user"] for click in clicks}:
        own = sorted((click for click in clicks if click["user"] == user), key=lambda click: click["ts"])
        cuts = [0, *(at for at, (a, b) in enumerate(pairwise(own), 1) if b["ts"] - a["ts"] >= gap), len(own)]
        for session in (own[start:end] for start, end in pairwise(cuts)):
            end = session[-1]["ts"] + gap
            if end <= watermark(clicks, timedelta(minutes=1)):
                pages, spent = {click["page"] for click in session}, sum(click["cents"] for click in session)
                expected.append((user, session[0]["ts"], end, end - MICROSECOND, len(session), len(pages), spent))
    folder = output("sessions")
    assert len(expected) > 10
    assert rows_in(folder / "sessions") == sorted(expected, key=repr)
    assert rows_in(folder / "late") == [tuple(late.values())]


def test_fraud_is_a_small_charge_and_then_a_large_one_within_a_minute(data: Any, output: Callable[[str], Path]) -> None:
    expected = [
        (small["account"], small["charge"], large["charge"], large["cents"], seconds)
        for small, large in product(data.charges(), repeat=2)
        if small["account"] == large["account"] and small["cents"] <= 100 and large["cents"] >= 50_000
        if 0 <= (seconds := (large["ts"] - small["ts"]).total_seconds()) <= 60
    ]
    assert len(expected) > 5
    assert rows_in(output("fraud")) == sorted(expected, key=repr)


def test_the_fraud_rule_forgets_a_charge_after_a_minute(data: Any) -> None:
    fraud = importlib.import_module("fraud.job")
    with ProcessorHarness(
        fraud.SmallThenLarge(),
        input_schema=f"{fraud.CHARGES}, ms long",
        key="account",
        output_schema=fraud.ALERTS,
        time_mode="event",
        event_time="ts",
        late="drop",
    ) as harness:
        harness.process([("a", "large", data.START, 60_000, 70_000), ("a", "plain", data.START, 2_000, 71_000)])
        assert harness.state("recent", "a") == {"large": (70_000, 60_000)}
        harness.advance_watermark(5_000)
        assert harness.process([("a", "small", data.START, 99, 10_000)]) == [("a", "small", "large", 60_000, 60.0)]
        harness.advance_watermark(129_999)
        assert harness.state("recent", "a") == {"large": (70_000, 60_000)}
        harness.advance_watermark(130_000)
        assert (harness.state("recent", "a"), harness.timers("a")) == ({}, [])


@pytest.mark.slow
def test_totals_change_with_every_file_and_end_in_the_database(data: Any, output: Callable[[str], Path]) -> None:
    orders = data.orders()
    folder = output("totals")
    changes, last = [], {}
    seen = 0
    for file in sorted((folder.parent / "orders").glob("*.parquet")):
        added = pq.read_table(file).to_pylist()
        seen += len(added)
        for shop in {order["shop"] for order in added}:
            cents = [order["cents"] for order in orders[:seen] if order["shop"] == shop]
            last[shop] = (shop, len(cents), sum(cents), min(cents), max(cents), statistics.fmean(cents))
            changes.append(last[shop])
    assert seen == len(orders)
    assert rows_in(folder / "changes") == sorted(changes, key=repr)
    with closing(sqlite3.connect(folder / "totals.db")) as connection:
        assert sorted(connection.execute("SELECT * FROM totals")) == sorted(last.values())


@pytest.mark.slow
def test_the_top_products_of_every_window_that_is_over(data: Any, output: Callable[[str], Path]) -> None:
    views = data.views()
    minute = timedelta(minutes=1)
    expected = []
    end = data.START + minute
    while end <= watermark(views, timedelta(seconds=30)):
        counts = Counter(view["product"] for view in views if end - 10 * minute <= view["ts"] < end)
        best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
        expected += [(end, rank, *item) for rank, item in enumerate(best, 1)]
        end += minute
    assert len(expected) > 100
    assert rows_in(output("top_products")) == sorted(expected, key=repr)


def test_orders_come_with_their_payments_or_without_after_an_hour(data: Any, output: Callable[[str], Path]) -> None:
    orders, payments = data.orders(), data.payments()
    hour, delay = timedelta(hours=1), timedelta(minutes=5)
    now = min(watermark(orders, delay), watermark(payments, delay, "paid_at"))
    paid, unpaid = [], []
    for order in orders:
        own = [p for p in payments if p["order_id"] == order["order_id"] and p["paid_at"] <= order["ts"] + hour]
        paid += [(*order.values(), payment["paid_at"], payment["paid_cents"]) for payment in own]
        if not own and order["ts"] + hour <= now:
            unpaid.append((*order.values(), None, None))
    assert len(unpaid) > 10
    assert len(paid) > len({row[0] for row in paid})  # some in two parts
    assert rows_in(output("payments")) == sorted(paid + unpaid, key=repr)


def test_unusual_charges_go_from_topic_to_topic_once(
    data: Any, spark: SparkSession, tmp_path: Path, kafka: KafkaBroker
) -> None:
    example = importlib.import_module("kafka_to_kafka.job")
    charges = sorted(data.charges(), key=lambda charge: charge["charge"])
    expected: list[tuple[Any, ...]] = []
    seen: dict[str, list[int]] = {}
    for charge in charges:
        before = seen.setdefault(charge["account"], [])
        if len(before) >= example.ENOUGH and charge["cents"] >= example.TIMES * statistics.fmean(before):
            expected.append((charge["account"], charge["charge"], charge["cents"], sum(before) // len(before)))
        before.append(charge["cents"])
    assert len(expected) > 5
    source, target = kafka.create_topic(partitions=2), kafka.create_topic(partitions=2)
    config = sl.Config(checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_interval="500ms", parallelism=2)
    found = []
    for some in (charges[:150], charges[150:]):
        kafka.produce(source, *((charge["account"], json.dumps(charge, default=str)) for charge in some))
        with example.build(spark, kafka.servers, source, target, config).start() as run:
            run.process_all_available()
    for message in messages(kafka, target):
        row = json.loads(message.value() or b"")
        found.append((row["account"], row["charge"], row["cents"], row["usual"]))
    assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_repeated_readings_come_out_once(data: Any, output: Callable[[str], Path]) -> None:
    sent = [tuple(reading.values()) for reading in data.readings()]
    assert len(set(sent)) < len(sent)
    assert rows_in(output("dedup")) == sorted(set(sent), key=repr)


def test_sales_per_minute_come_from_kafka_into_a_delta_table(
    data: Any, spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    if not list(CONNECTOR.glob("*.jar")):
        pytest.skip("Spark's connector to Kafka is not installed: run `bash scripts/get_kafka.sh` (needs Maven)")
    build = importlib.import_module("kafka_to_delta.job").build
    topic = kafka.create_topic(partitions=2)
    config = sl.Config(checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_interval="500ms", parallelism=2)
    orders = data.orders()
    for some in (orders[:70], orders[70:]):  # the job is stopped and started again in between
        producer = Producer({"bootstrap.servers": kafka.servers})
        for order in some:
            producer.produce(topic, json.dumps({**order, "ts": order["ts"].isoformat()}), key=order["shop"])
        assert producer.flush(30) == 0
        with build(spark, kafka.servers, topic, str(tmp_path / "table"), config).start() as running:
            running.process_all_available()
    minute = timedelta(minutes=1)
    sales: dict[tuple[str, datetime], tuple[int, int]] = {}
    for order in orders:
        start = order["ts"].replace(second=0, microsecond=0)
        if start + minute <= watermark(orders, timedelta(minutes=5)):
            count, cents = sales.get((order["shop"], start), (0, 0))
            sales[order["shop"], start] = (count + 1, cents + order["cents"])
    columns = ["shop", "window_start", "window_end", "orders", "cents"]
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().select(columns).to_pylist()
    assert len(sales) > 100
    assert sorted(tuple(row.values()) for row in found) == [
        (shop, start, start + minute, *figures) for (shop, start), figures in sorted(sales.items())
    ]


def test_totals_in_postgres_are_current_and_every_change_is_there(
    data: Any, spark: SparkSession, postgres_schema: Schema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_DB", postgres_schema.uri)
    data.write(tmp_path / "orders", data.orders())
    config = sl.Config(checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_interval="500ms", parallelism=2)
    build = importlib.import_module("changes_to_postgres.job").build
    with build(spark, str(tmp_path / "orders"), postgres_schema.name, config).start() as run:
        run.process_all_available()
    changes, last = [], {}
    seen: list[dict[str, Any]] = []
    for file in sorted((tmp_path / "orders").glob("*.parquet")):
        added = pq.read_table(file).to_pylist()
        seen += added
        for shop in {order["shop"] for order in added}:
            own = [order for order in seen if order["shop"] == shop]
            latest = max(order["ts"] for order in own).replace(tzinfo=UTC)
            last[shop] = (shop, len(own), sum(order["cents"] for order in own), latest)
            changes.append(last[shop])
    assert len(changes) > len(last) == 3
    assert sorted(postgres_schema.query("SELECT * FROM totals")) == sorted(last.values())
    assert sorted(postgres_schema.query("SELECT * FROM total_changes")) == sorted(changes)
