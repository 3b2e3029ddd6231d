"""Columns that a job names, as PySpark users write them. Nothing runs: a session is needed to describe frames."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import strandline as sl

pytestmark = pytest.mark.spark


@pytest.fixture
def frame(spark: SparkSession) -> DataFrame:
    rate = spark.readStream.format("rate").load()
    return rate.selectExpr("timestamp AS ts", "'A' AS user", "value AS n", "named_struct('place', 'x') AS at")


@pytest.fixture
def events(spark: SparkSession, frame: DataFrame) -> sl.Stream:
    return sl.Job("visits", spark, sl.Config(checkpoint_dir="ckpt")).source(frame)


def keys(keyed: sl.KeyedStream) -> list[str]:
    counted = keyed.aggregate(total=sl.count())
    return counted.schema.names[:-1]


def test_a_key_is_a_name_a_column_or_an_expression_with_a_name(events: sl.Stream, frame: DataFrame) -> None:
    assert keys(events.key_by("user", "n")) == ["user", "n"]
    assert keys(events.key_by(["user", "n"])) == ["user", "n"]
    assert keys(events.key_by(F.col("user"), "n")) == ["user", "n"]
    assert keys(events.key_by(F.col("`user`"))) == ["user"]
    assert keys(events.key_by(frame.user, frame["n"])) == ["user", "n"]
    assert keys(events.key_by(F.lower("user").alias("u"), (F.col("n") % 2).alias("odd"))) == ["u", "odd"]
    assert keys(events.key_by(F.col("at.place"))) == ["place"]
    lowered = events.key_by(F.lower("user").alias("u"))
    assert lowered.deduplicate().schema.names == ["ts", "user", "n", "at", "u"]
    assert keys(lowered.aggregate(n=sl.count()).key_by(F.col("u"), "n")) == ["u", "n"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ((), "key_by needs at least one column$"),
        (([],), "key_by needs at least one column$"),
        (("usr",), r"key_by\('usr'\): no column 'usr'; did you mean 'user'\?$"),
        ((F.col, "usr"), r"key_by\(usr\): no column 'usr'; did you mean 'user'\?$"),
        ((F.lower, "user"), r"key_by\(lower\(user\)\): the expression has no name, .*; write \.alias\('\.\.\.'\)"),
        ((5,), r"key_by\(5\): a int is no column; give the name of a column, or a Column such as F\.col\('user'\)$"),
    ],
)
def test_what_is_no_key_column_is_named(events: sl.Stream, column: tuple[Any, ...], message: str) -> None:
    made = [column[0](column[1])] if column and callable(column[0]) else column  # columns need a session
    with pytest.raises(sl.JobDefinitionError, match=message):
        events.key_by(*made)


def test_an_alias_does_not_replace_a_column_of_the_stream(events: sl.Stream) -> None:
    with pytest.raises(sl.JobDefinitionError, match="has a column 'n' already; choose another alias"):
        events.key_by(F.lower("user").alias("n"))


def test_a_transform_that_returns_no_frame_is_named(events: sl.Stream) -> None:
    def forgets(frame: DataFrame) -> Any:
        frame.filter("n > 1")

    with pytest.raises(sl.JobDefinitionError, match=r"forgets\): the function returned None, not a DataFrame; is its"):
        events.transform(forgets)
    with pytest.raises(sl.JobDefinitionError, match=r"returned a list, not a DataFrame; return the DataFrame itself"):
        events.transform(lambda frame: [frame])  # type: ignore[arg-type,return-value]


def test_a_time_column_that_does_not_exist_is_named_with_or_without_a_delay(
    spark: SparkSession, frame: DataFrame
) -> None:
    job = sl.Job("visits", spark, sl.Config(checkpoint_dir="ckpt"))
    for delay in (None, "10s"):
        with pytest.raises(sl.JobDefinitionError, match=r"no column 'tss'; did you mean 'ts'\?$"):
            job.source(frame, event_time="tss", watermark_delay=delay)
    with pytest.raises(sl.JobDefinitionError, match="give both"):
        job.source(frame, event_time="ts")


@pytest.mark.parametrize("name", ["__sl_key_group", "__sl_pane", "__sl_anything"])
def test_names_that_steps_give_to_their_own_columns_are_refused(events: sl.Stream, name: str) -> None:
    renamed = events.transform(lambda rows: rows.withColumnRenamed("n", name))
    with pytest.raises(sl.JobDefinitionError, match=f"begin with '__sl_' are reserved; rename '{name}'"):
        renamed.key_by("user")
