"""The operators that are measured, each written for Strandline and for Spark."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import strandline as sl
from strandline_bench import spark_peer, value_state
from strandline_bench.events import APART_MS, DELAY_MS, GAP_MS, LEFT_BELOW, SLIDE_MS, WINDOW_MS, ExpectedEvents
from strandline_bench.workload import SEEN, Expected

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

KEPT: Final = "key long, n long, before string"
DELAY: Final = f"{DELAY_MS} milliseconds"

Read = Callable[[], "DataFrame"]
"""A new streaming DataFrame over the input files."""
Check = Callable[["Results", Path, str], None]


class Results:
    """What the operators must put out for some input; worked out when it is asked for the first time."""

    def __init__(self, totals: Callable[[], Expected], events: Callable[[], ExpectedEvents]) -> None:
        self._make_totals, self._make_events = totals, events
        self._totals: Expected | None = None
        self._events: ExpectedEvents | None = None

    @property
    def totals(self) -> Expected:
        """Per key."""
        if self._totals is None:
            self._totals = self._make_totals()
        return self._totals

    @property
    def events(self) -> ExpectedEvents:
        """By event time."""
        if self._events is None:
            self._events = self._make_events()
        return self._events


@dataclass(frozen=True, slots=True)
class Peer:
    """Spark's counterpart of an operator."""

    name: str
    build: Callable[[Read], DataFrame]
    mode: Literal["append", "update"] = "append"
    slow: bool = False
    """Whether it is so slow that it gets its own input with fewer rows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An operator, its counterpart, and the ratio of their speeds that is the target."""

    name: str
    build: Callable[[sl.Job, Read], sl.Stream]
    peer: Peer
    bar: float
    check: Check
    slow: bool = False
    needs: tuple[str, ...] = ()
    """Modules that may be missing."""

    def missing(self) -> str | None:
        """The first needed module that is not installed."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


# --- aggregates and windows ----------------------------------------------------------------------------


def _totals() -> list[Column]:
    from pyspark.sql import functions as F

    return [F.count("*").alias("n"), F.sum("x").alias("s")]


def _aggregate(job: sl.Job, read: Read) -> sl.Stream:
    return job.source(read()).key_by("key").aggregate(n=sl.count(), s=sl.sum("x"))


def _spark_aggregate(read: Read) -> DataFrame:
    return read().groupBy("key").agg(*_totals())


def _timed_source(job: sl.Job, read: Read) -> sl.Stream:
    return job.source(read(), event_time="ts", watermark_delay=DELAY_MS / 1000)


def _windows(spec: Any) -> Callable[[sl.Job, Read], sl.Stream]:
    def build(job: sl.Job, read: Read) -> sl.Stream:
        return _timed_source(job, read).key_by("key").window(spec).aggregate(n=sl.count(), s=sl.sum("x"))

    return build


def _spark_windows(window: Callable[[], Column]) -> Callable[[Read], DataFrame]:
    def build(read: Read) -> DataFrame:
        from pyspark.sql import functions as F

        grouped = read().withWatermark("ts", DELAY).groupBy("key", window().alias("w")).agg(*_totals())
        return grouped.select(
            "key", F.col("w.start").alias("window_start"), F.col("w.end").alias("window_end"), "n", "s"
        )

    return build


def _spark_sliding(slide_ms: int) -> Callable[[], Column]:
    def window() -> Column:
        from pyspark.sql import functions as F

        return F.window("ts", f"{WINDOW_MS} milliseconds", f"{slide_ms} milliseconds")

    return window


def _spark_session() -> Column:
    from pyspark.sql import functions as F

    return F.session_window("ts", f"{GAP_MS} milliseconds")


# --- deduplication and joins ---------------------------------------------------------------------------


def _deduplicate(job: sl.Job, read: Read) -> sl.Stream:
    return _timed_source(job, read).key_by("key").deduplicate(within=DELAY_MS / 1000)


def _spark_deduplicate(read: Read) -> DataFrame:
    return read().withWatermark("ts", DELAY).dropDuplicatesWithinWatermark(["key"])


def _left(frame: DataFrame) -> DataFrame:
    return frame.where(f"x < {LEFT_BELOW}").select("key", "ts", "value")


def _right(frame: DataFrame) -> DataFrame:
    return frame.where(f"x >= {LEFT_BELOW}").selectExpr("key", "ts AS right_ts", "x AS right_x")


def _join(job: sl.Job, read: Read) -> sl.Stream:
    left = _timed_source(job, read).transform(_left).key_by("key")
    right = _timed_source(job, read).transform(_right).key_by("key")
    return left.join(right, within=APART_MS / 1000, left_time="ts", right_time="right_ts")


def _spark_join(read: Read) -> DataFrame:
    left = _left(read().withWatermark("ts", DELAY))
    right = _right(read().withWatermark("ts", DELAY)).withColumnRenamed("key", "right_key")
    apart = f"INTERVAL {APART_MS} MILLISECONDS"
    pairs = left.join(
        right, on=_expression(f"key = right_key AND ts BETWEEN right_ts - {apart} AND right_ts + {apart}")
    )
    return pairs.drop("right_key")


def _expression(text: str) -> Column:
    from pyspark.sql import functions as F

    return F.expr(text)


# --- user code -----------------------------------------------------------------------------------------


class KeepArrow(sl.ArrowProcessor):
    """Does what `value_state.CountAndKeep` does, for many keys at a time."""

    def open(self, context: sl.ArrowContext) -> None:
        self.kept = context.value_state("kept", "n long, value string")

    def keep(self, table: pa.Table) -> tuple[pa.Table, pa.Table, pa.ChunkedArray]:
        """One row per key of the table, what was kept of these keys before, and how many rows each has had by now."""
        rows = table.group_by("key", use_threads=False).aggregate([([], "count_all"), ("value", "last")])
        known = self.kept.get_many(rows)
        n = pc.add(pc.fill_null(known.column("n"), 0), rows.column("count_all"))
        self.kept.put_many(rows, pa.table({"n": n, "value": rows.column("value_last")}))
        return rows, known, n

    def process(self, table: pa.Table, context: sl.ArrowContext) -> pa.Table:
        rows, known, n = self.keep(table)
        before = pc.utf8_slice_codeunits(pc.fill_null(known.column("value"), ""), 0, SEEN)
        return pa.table({"key": rows.column("key"), "n": n, "before": before})


class CountAndKeepPandas(StatefulProcessor):
    """Does what `spark_peer.CountAndKeep` does, on pandas frames."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.kept = handle.getValueState("kept", "n long, value string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        before: str | None = None
        n = 0
        for frame in rows:
            for value in frame["value"]:
                n, old = self.kept.get() or (0, "")
                if before is None:
                    before = old
                n += 1
                self.kept.update((n, value))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "before": [(before or "")[:SEEN]]})

    def close(self) -> None:
        pass


def _process(
    processor: Callable[[], Any], rows: Literal["row", "pandas", "arrow"] = "row"
) -> Callable[[sl.Job, Read], sl.Stream]:
    def build(job: sl.Job, read: Read) -> sl.Stream:
        needed = job.source(read().select("key", "value"))
        return needed.key_by("key").process(processor(), KEPT, rows=rows)

    return build


def _spark_row(read: Read) -> DataFrame:
    grouped = read().select("key", "value").groupBy("key")
    return grouped.transformWithState(spark_peer.CountAndKeep(), KEPT, "append", "none")


def _spark_pandas(read: Read) -> DataFrame:
    grouped = read().select("key", "value").groupBy("key")
    return grouped.transformWithStateInPandas(CountAndKeepPandas(), KEPT, "append", "none")


def _kept(results: Results, output: Path, who: str) -> None:
    results.totals.check_process(output, who)


ROW_FLAVOUR: Final = Peer("transformWithState", _spark_row, slow=True)
PANDAS_FLAVOUR: Final = Peer("transformWithStateInPandas", _spark_pandas, slow=True)
ADAPTER: Final = "strandline.operators.spark.spark_operator"

ENTRIES: Final = (
    Entry(
        "aggregate",
        _aggregate,
        Peer("groupBy(key)", _spark_aggregate, "update"),
        2,
        lambda results, output, who: results.totals.check_aggregate(output, who),
    ),
    Entry(
        "window",
        _windows(sl.tumbling(WINDOW_MS / 1000)),
        Peer("groupBy(window)", _spark_windows(_spark_sliding(WINDOW_MS))),
        1,
        lambda results, output, who: results.events.check_windows(output, WINDOW_MS, who),
    ),
    Entry(
        "sliding",
        _windows(sl.sliding(WINDOW_MS / 1000, SLIDE_MS / 1000)),
        Peer("groupBy(sliding window)", _spark_windows(_spark_sliding(SLIDE_MS))),
        1,
        lambda results, output, who: results.events.check_windows(output, SLIDE_MS, who),
    ),
    Entry(
        "session",
        _windows(sl.session(GAP_MS / 1000)),
        Peer("groupBy(session_window)", _spark_windows(_spark_session)),
        1,
        lambda results, output, who: results.events.check_sessions(output, who),
    ),
    Entry(
        "deduplicate",
        _deduplicate,
        Peer("dropDuplicatesWithinWatermark", _spark_deduplicate),
        1,
        lambda results, output, who: results.events.check_first_rows(output, who),
    ),
    Entry(
        "join",
        _join,
        Peer("stream-stream join", _spark_join),
        1,
        lambda results, output, who: results.events.check_pairs(output, who),
    ),
    Entry("process", _process(value_state.CountAndKeep), ROW_FLAVOUR, 20, _kept),
    Entry("process-arrow", _process(KeepArrow, "arrow"), ROW_FLAVOUR, 20, _kept),
    Entry("spark-row", _process(spark_peer.CountAndKeep), ROW_FLAVOUR, 20, _kept, needs=(ADAPTER,)),
    Entry(
        "spark-pandas",
        _process(CountAndKeepPandas, "pandas"),
        PANDAS_FLAVOUR,
        10,
        _kept,
        slow=True,
        needs=(ADAPTER, "pandas"),
    ),
)
