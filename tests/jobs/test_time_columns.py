"""Which columns of a stream carry event time: through transforms, unions and every kind of step. No job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import strandline as sl
from strandline.errors import JobDefinitionError
from strandline.operators.columns.time_columns import default_time_column, time_columns

pytestmark = pytest.mark.spark

MINUTE = 60_000


class Pass(sl.KeyedProcessor):
    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> Iterator[Any]:
        yield from rows


class Sources:
    """A job, and streams of it with the columns user, ts and another number; ts is their event time."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root = root
        self.spark = spark
        self.job = sl.Job("times", spark, sl.Config(checkpoint_dir=str(root)))

    def stream(self, number: str = "x", time: str = "ts") -> sl.Stream:
        frame = self.spark.readStream.schema(f"user string, {time} timestamp, {number} long").parquet(str(self.root))
        return self.job.source(frame, event_time=time, watermark_delay="5s")


@pytest.fixture
def sources(tmp_path: Path, spark: SparkSession) -> Sources:
    return Sources(tmp_path, spark)


def times(stream: sl.Stream) -> tuple[str | None, dict[str, int]]:
    """The default time column of a stream, and all its time columns with their lags."""
    return default_time_column(stream.schema), time_columns(stream.schema)


def test_a_selected_or_renamed_column_stays_event_time_and_a_computed_one_does_not(sources: Sources) -> None:
    source = sources.stream()
    own = sources.spark.readStream.schema("user string, ts timestamp").parquet(str(sources.root))
    assert times(source) == ("ts", {"ts": 0})
    assert times(sources.job.source(own.withWatermark("ts", "1 minute"))) == ("ts", {"ts": 0})
    renamed = source.transform(lambda rows: rows.select("user", F.col("ts").alias("when")))
    assert times(renamed) == ("when", {"when": 0})
    computed = source.transform(lambda rows: rows.select("user", F.expr("ts + interval 1 hour").alias("ts")))
    assert times(computed) == (None, {})


def test_the_rows_of_windows_carry_event_time(sources: Sources) -> None:
    keyed = sources.stream().key_by("user")
    tumbling = keyed.window(sl.tumbling("10m"), allowed_lateness="1m").aggregate(n=sl.count())
    assert times(tumbling) == (
        "window_time",
        {"window_start": 11 * MINUTE, "window_end": MINUTE, "window_time": MINUTE},
    )
    sliding = keyed.window(sl.sliding("10m", "5m")).aggregate(n=sl.count())
    assert times(sliding) == ("window_time", {"window_start": 10 * MINUTE, "window_end": 0, "window_time": 0})
    sessions = keyed.window(sl.session("10m")).aggregate(n=sl.count())
    assert times(sessions) == ("window_time", {"window_end": 0, "window_time": 0})


def test_the_start_of_a_session_is_refused_as_event_time_also_under_another_name(sources: Sources) -> None:
    sessions = sources.stream().key_by("user").window(sl.session("10m")).aggregate(n=sl.count())
    renamed = sessions.transform(lambda rows: rows.withColumnRenamed("window_start", "began"))
    with pytest.raises(
        JobDefinitionError, match=r"time='began': 'began' cannot be event time: a session .* use window_time"
    ):
        renamed.key_by("user").deduplicate(within="1h", time="began")


@pytest.mark.parametrize(("how", "default"), [("inner", "ts"), ("left", "ts"), ("right", "paid"), ("full", None)])
def test_both_times_of_a_join_are_event_time(sources: Sources, how: Any, default: str | None) -> None:
    orders, payments = sources.stream().key_by("user"), sources.stream("y", "paid").key_by("user")
    joined = orders.join(payments, how, within=("-1m", "10m"))
    assert times(joined) == (default, {"ts": 10 * MINUTE, "paid": MINUTE})
    later = orders.join(payments, how, within=("1m", "10m"))
    assert times(later) == (default, {"ts": 10 * MINUTE, "paid": 0})
    if default is None:
        with pytest.raises(JobDefinitionError, match=r"several event time columns: ts, paid. Name one with time="):
            joined.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count())
    else:
        joined.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count())


def test_deduplication_keeps_time_columns_and_their_distance_from_the_column_that_it_reads(sources: Sources) -> None:
    windows = sources.stream().key_by("user").window(sl.tumbling("10m"), allowed_lateness="1m").aggregate(n=sl.count())
    by_user = windows.key_by("user")
    assert times(by_user.deduplicate()) == times(windows)
    by_time = by_user.deduplicate(within="1h")
    assert times(by_time) == ("window_time", {"window_start": 10 * MINUTE, "window_end": 0, "window_time": 0})
    by_start = by_user.deduplicate(within="1h", time="window_start")
    assert times(by_start) == ("window_time", {"window_start": 0, "window_end": 0, "window_time": 0})


def test_a_key_column_of_an_aggregate_stays_event_time(sources: Sources) -> None:
    windows = sources.stream().key_by("user").window(sl.tumbling("10m")).aggregate(n=sl.count())
    assert times(windows.key_by("window_end").aggregate(n=sl.sum("n"))) == ("window_end", {"window_end": 0})
    assert times(windows.key_by("user").aggregate(n=sl.sum("n"))) == (None, {})


def test_a_processor_says_which_of_its_columns_is_event_time(sources: Sources) -> None:
    keyed = sources.stream().key_by("user")
    schema = "user string, ts timestamp, x long"
    assert times(keyed.process(Pass(), schema, time_mode="event")) == (None, {})
    declared = keyed.process(Pass(), schema, time_mode="event", output_time="ts", output_delay="5m")
    assert times(declared) == ("ts", {"ts": 5 * MINUTE})
    with pytest.raises(JobDefinitionError, match=r"output_time='tss': no column 'tss'; did you mean 'ts'\?"):
        keyed.process(Pass(), schema, time_mode="event", output_time="tss")


def test_a_union_is_as_far_behind_as_the_furthest_of_its_streams(sources: Sources) -> None:
    source = sources.stream()
    keyed, schema = source.key_by("user"), "user string, ts timestamp, x long"
    behind = keyed.process(Pass(), schema, time_mode="event", output_time="ts", output_delay="5m")
    unknown = keyed.process(Pass(), schema)
    assert times(source.union(behind)) == times(behind.union(source)) == ("ts", {"ts": 5 * MINUTE})
    assert times(source.union(unknown)) == times(unknown.union(source)) == (None, {})


def test_a_union_inside_a_transform_is_as_far_behind_as_any_time_column_of_the_step(sources: Sources) -> None:
    left, right = sources.stream().key_by("user"), sources.stream("y", "paid").key_by("user")
    joined = left.join(right, within=("-1h", "0s"))
    assert times(joined) == ("ts", {"ts": 0, "paid": 60 * MINUTE})
    paid = F.col("paid").alias("ts")
    both = joined.transform(lambda rows: rows.select("user", "ts").union(rows.select("user", paid)))
    assert times(both) == ("ts", {"ts": 60 * MINUTE})
    assert times(both.transform(lambda rows: rows.where("user > 'a'"))) == ("ts", {"ts": 60 * MINUTE})
    alike = joined.transform(lambda rows: rows.select("user", "ts").union(rows.select("user", "ts")))
    assert times(alike) == ("ts", {"ts": 0})

    sessions = left.window(sl.session("1m")).aggregate(n=sl.count())
    start = F.col("window_start").alias("window_time")
    ends = sessions.transform(lambda rows: rows.select("user", "window_time").union(rows.select("user", start)))
    with pytest.raises(JobDefinitionError, match="'window_time' cannot be event time: a session may last"):
        ends.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count())


def test_a_union_of_columns_with_different_types_is_refused(sources: Sources) -> None:
    source = sources.stream()
    texts = source.transform(lambda rows: rows.withColumn("x", F.col("x").cast("string")))
    with pytest.raises(
        JobDefinitionError, match=r"the column 'x' is bigint in one and string in the other; cast it in a transform"
    ):
        source.union(source, texts)
    nullable = source.transform(lambda rows: rows.withColumn("x", F.lit(1).cast("long")))
    assert source.union(nullable).schema.names == ["user", "ts", "x"]


def test_a_computed_column_may_be_as_far_behind_as_what_it_is_computed_from(sources: Sources) -> None:
    orders, payments = sources.stream().key_by("user"), sources.stream("y", "paid").key_by("user")
    both = orders.join(payments, "full", within=("-1m", "10m"))
    merged = both.transform(lambda rows: rows.select("user", F.coalesce("ts", "paid").alias("at")))
    assert times(merged) == (None, {})
    assert merged._lag_ms("at") == 10 * MINUTE
    assert (both._lag_ms("ts"), both._lag_ms("paid")) == (10 * MINUTE, MINUTE)
    passed = merged.key_by("user").process(Pass(), merged.schema)
    assert passed._lag_ms("at") == 10 * MINUTE
    assert passed.union(sources.stream().transform(lambda rows: rows.selectExpr("user", "ts as at")))._lag_ms("at") == (
        10 * MINUTE
    )


def test_every_step_with_a_clock_takes_the_name_of_its_time_column(sources: Sources) -> None:
    computed = sources.stream().transform(
        lambda rows: rows.select("user", F.expr("ts + interval 1 hour").alias("later"), "x")
    )
    keyed = computed.key_by("user")
    steps: tuple[Callable[[], object], ...] = (
        lambda: keyed.process(Pass(), computed.schema, time_mode="event"),
        lambda: keyed.window(sl.tumbling("1m")).aggregate(n=sl.count()),
        lambda: keyed.deduplicate(within="1m"),
    )
    for step in steps:
        with pytest.raises(JobDefinitionError, match=r"no event time column. Name the column with time="):
            step()
    frame = sources.spark.readStream.schema("ts timestamp").parquet(str(sources.root))
    with pytest.raises(JobDefinitionError, match=r"watermark_delay='soon' is no duration; write one such as '10s'"):
        sources.job.source(frame, event_time="ts", watermark_delay="soon")
    with pytest.raises(JobDefinitionError, match=r"Name the column with left_time="):
        keyed.join(sources.stream("y").key_by("user"), within="1m")
    with pytest.raises(JobDefinitionError, match=r"time='x': the time column 'x' is of type bigint"):
        keyed.process(Pass(), computed.schema, time_mode="event", time="x")
    with pytest.raises(JobDefinitionError, match=r"time='later' needs time_mode='event'"):
        keyed.process(Pass(), computed.schema, time="later")
    keyed.process(Pass(), computed.schema, time_mode="event", time="later")
    keyed.window(sl.tumbling("1m"), "later").aggregate(n=sl.count())
    keyed.deduplicate(within="1m", time="later")
    keyed.join(sources.stream("y").key_by("user"), within="1m", left_time="later")
