"""One processor, the same rows, both engines: Spark's own `transformWithState`, and ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from strandline.operators.spark.spark_operator import SparkRows
from strandline.testing.harness import ProcessorHarness

pytestmark = pytest.mark.spark

INPUT = "k string, day date, ts timestamp, s struct<a:int,b:string>, timers array<long>"
OUTPUT = "text string"


INITIAL = "k string, day date, n int"


def processor(rows: SparkRows) -> StatefulProcessor:
    class Everything(StatefulProcessor):
        """All kinds of state, values that Spark converts, timers of the past, and timers that delete each other.

        Also a state that `init` deletes, and attributes that the initial state leaves behind.
        """

        def init(self, handle: Any) -> None:
            self.handle = handle
            self.value = handle.getValueState(
                "a value", "t timestamp, s struct<a:int,b:string>, d date, x decimal(10,2), z string"
            )
            self.list = handle.getListState("list", "n int")
            self.map = handle.getMapState("map", "k string", "n long")
            self.gone = handle.getValueState("gone", "n int")
            handle.deleteIfExists("gone")
            self.calls = 0
            self.initial: list[int] = []

        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            n = initialState.n if rows == "row" else int(initialState["n"].sum())
            self.initial.append(n)
            self.list.appendValue((n,))
            self.handle.registerTimer(n)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.calls += 1
            for row in self.plain(rows):
                self.list.appendValue((len(row.timers),))
                self.map.updateValue((f"{row.ts.second}",), (self.calls,))
                for time in row.timers:
                    self.handle.registerTimer(int(time))
                last = row
            before = self.value.get(), self.map.getValue(("none",)), self.map.getValue((f"{last.ts.second}",))
            self.value.update((last.ts, last.s, datetime(2024, 1, 2, 3), Decimal("1.005"), 7))
            state = before, list(self.list.get()), sorted(self.map.iterator()), sorted(self.handle.listTimers())
            seen = f"{sorted(self.initial)} {self.failed(self.gone.get)} {timerValues.getCurrentWatermarkInMs()}"
            yield self.made(f"{key} {last.s} {state} {seen}")

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
            yield self.made(f"{key!r}@{time} {listed} {value} {timerValues.getCurrentWatermarkInMs()}")

        def failed(self, call: Callable[[], Any]) -> str:
            try:
                return f"no error, but {call()}"
            except PySparkRuntimeError:
                return "an error of Spark's"

        def plain(self, given: Any) -> Iterator[Any]:
            return iter(given) if rows == "row" else (row for frame in given for row in frame.itertuples())

        def made(self, text: str) -> Any:
            return Row(text=text, unknown=1) if rows == "row" else pd.DataFrame({"unknown": 1, "text": [text]})

    return Everything()


def row(key: str, second: int, *timers: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(second, UTC)
    return {"k": key, "day": "2024-01-01", "ts": time.isoformat(), "s": {"a": second, "b": "x"}, "timers": [*timers]}


BATCHES = [
    [row("a", 10, 0, 5005), row("b", 9)],
    [row("a", 20, 9001, 9002, 9003, 10_000)],
    [row("a", 20, 4000, 20_001), row("b", 15), row("c", 10)],  # c is late
]


BEFORE = [("a", date(2024, 1, 1), 5), ("z", date(2024, 1, 1), 10_003)]


def in_spark(spark: SparkSession, home: Path, rows: SparkRows) -> dict[int, list[str]]:
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
    files = session.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(home / "in"))
    found: dict[int, list[str]] = {}

    def collect(frame: DataFrame, batch_id: int) -> None:
        found[batch_id] = sorted(row.text for row in frame.collect())

    source = files.withWatermark("ts", "0 seconds").groupBy("k", "day")
    initial = session.createDataFrame(BEFORE, INITIAL).groupBy("k", "day")
    transform = source.transformWithState if rows == "row" else source.transformWithStateInPandas
    query = (
        transform(processor(rows), OUTPUT, "append", "EventTime", initial)
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(home / "checkpoints"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def in_strandline(rows: SparkRows) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    with ProcessorHarness(
        processor(rows),
        input_schema=INPUT,
        key=["k", "day"],
        output_schema=OUTPUT,
        time_mode="EventTime",
        event_time="ts",
        rows=rows,
        initial_schema=INITIAL,
    ) as harness:
        harness.process_initial(BEFORE)
        latest = 0
        for at, batch in enumerate(BATCHES):
            times = [datetime.fromisoformat(one["ts"]) for one in batch]
            harness.watermark_ms = latest or None
            given = [
                {**one, "ts": time, "day": datetime.fromisoformat(one["day"]).date()}
                for one, time in zip(batch, times, strict=True)
            ]
            found[at] = sorted(row.text for row in harness.process(given))
            latest = max(latest, *(round(time.timestamp() * 1000) for time in times))
        assert harness.late_rows == 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["row", "pandas"])
def test_both_engines_yield_the_same(spark: SparkSession, tmp_path: Path, rows: SparkRows) -> None:
    assert in_strandline(rows) == in_spark(spark, tmp_path, rows)
