"""One processor, the same rows, both engines: Spark's own `transformWithState`, and ours."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from strandline.testing.harness import ProcessorHarness

pytestmark = pytest.mark.spark

INPUT = "k string, day date, ts timestamp, s struct<a:int,b:string>, timers array<long>"
OUTPUT = "text string"


def processor() -> StatefulProcessor:
    class Everything(StatefulProcessor):
        """All kinds of state, values that Spark converts, timers of the past, and timers that delete each other."""

        def init(self, handle: Any) -> None:
            self.handle = handle
            self.value = handle.getValueState(
                "a value", "t timestamp, s struct<a:int,b:string>, d date, x decimal(10,2), z string"
            )
            self.list = handle.getListState("list", "n int")
            self.map = handle.getMapState("map", "k string", "n long")
            self.calls = 0

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.calls += 1
            for row in rows:
                self.list.appendValue((len(row.timers),))
                self.map.updateValue((f"{row.ts.second}",), (self.calls,))
                for time in row.timers:
                    self.handle.registerTimer(time)
                last = row
            before = self.value.get(), self.map.getValue(("none",)), self.map.getValue((f"{last.ts.second}",))
            self.value.update((last.ts, last.s, datetime(2024, 1, 2, 3), Decimal("1.005"), 7))
            state = before, list(self.list.get()), sorted(self.map.iterator()), sorted(self.handle.listTimers())
            yield Row(text=f"{key} {last.s} {state} {timerValues.getCurrentWatermarkInMs()}", unknown=1)

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            time = expiredTimerInfo.getExpiryTimeInMs()
            listed = sorted(self.handle.listTimers())
            if time % 10 == 1:
                self.handle.deleteTimer(time + 1)
            if time % 10 == 3:
                self.handle.registerTimer(time + 1)
            value = self.value.get()
            if time % 10 == 5:
                self.value.clear()
            yield Row(text=f"{key!r}@{time} {listed} {value} {timerValues.getCurrentWatermarkInMs()}")

    return Everything()


def row(key: str, second: int, *timers: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(second, UTC)
    return {"k": key, "day": "2024-01-01", "ts": time.isoformat(), "s": {"a": second, "b": "x"}, "timers": [*timers]}


BATCHES = [
    [row("a", 10, 0, 5005), row("b", 9)],
    [row("a", 20, 9001, 9002, 9003, 10_000)],
    [row("a", 20, 4000, 20_001), row("b", 15), row("c", 10)],  # c is late
]


def in_spark(spark: SparkSession, home: Path) -> dict[int, list[str]]:
    session = spark.newSession()
    for name, value in {
        "shuffle.partitions": "1",
        "session.timeZone": "UTC",
        "streaming.noDataMicroBatches.enabled": "false",
        "streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }.items():
        session.conf.set(f"spark.sql.{name}", value)
    (home / "in").mkdir()
    for at, batch in enumerate(BATCHES):
        file = home / "in" / f"{at}.json"
        file.write_text("\n".join(map(json.dumps, batch)))
        os.utime(file, (at, at))
    source = session.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(home / "in"))
    found: dict[int, list[str]] = {}

    def collect(frame: DataFrame, batch_id: int) -> None:
        found[batch_id] = sorted(row.text for row in frame.collect())

    query = (
        source.withWatermark("ts", "0 seconds")
        .groupBy("k", "day")
        .transformWithState(processor(), OUTPUT, "append", "EventTime")
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(home / "checkpoints"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def in_strandline() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    with ProcessorHarness(
        processor(),
        input_schema=INPUT,
        key=["k", "day"],
        output_schema=OUTPUT,
        time_mode="EventTime",
        event_time="ts",
    ) as harness:
        latest = 0
        for at, batch in enumerate(BATCHES):
            times = [datetime.fromisoformat(one["ts"]) for one in batch]
            harness.watermark_ms = latest or None
            rows = [
                {**one, "ts": time, "day": datetime.fromisoformat(one["day"]).date()}
                for one, time in zip(batch, times, strict=True)
            ]
            found[at] = sorted(row.text for row in harness.process(rows))
            latest = max(latest, *(round(time.timestamp() * 1000) for time in times))
        assert harness.late_rows == 1
    return found


@pytest.mark.slow
def test_both_engines_yield_the_same(spark: SparkSession, tmp_path: Path) -> None:
    assert in_strandline() == in_spark(spark, tmp_path)
