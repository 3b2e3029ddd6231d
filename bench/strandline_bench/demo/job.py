"""The demo's job, as a user would write it, and the batch computation that its output must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strandline as sl
from strandline_bench.demo.clicks import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from strandline.operators.process.process_context import ProcessContext

BADGES = {3: "bronze", 6: "silver", 10: "gold"}
"""The badges, by the number of purchases that a user needs for each."""


class AwardBadges(sl.KeyedProcessor):
    """Counts a user's purchases, and says once when they are enough for a badge."""

    def open(self, context: ProcessContext) -> None:
        self.purchases = context.value_state("purchases", "n long")

    def process(self, key: tuple[Any, ...], rows: Iterator[Any], context: ProcessContext) -> Iterator[tuple[Any, ...]]:
        before = self.purchases.get() or 0
        after = before + sum(1 for _ in rows)
        self.purchases.update(after)
        for needed, badge in BADGES.items():
            if before < needed <= after:
                yield (*key, badge)


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of the demo."""

    root: Path

    @property
    def clicks(self) -> Path:
        return self.root / "clicks"

    @property
    def counts(self) -> Path:
        return self.root / "counts"

    @property
    def badges(self) -> Path:
        return self.root / "badges"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def log(self) -> Path:
        return self.root / "spark.log"


def build(spark: SparkSession, folders: Folders) -> sl.Job:
    """Clicks and amounts per user, and badges for those who buy often."""
    config = sl.Config(
        checkpoint_dir=str(folders.checkpoints),
        checkpoint_interval="1s",
        num_retained=3,
        local_dir=str(folders.scratch),
        parallelism=2,
    )
    job = sl.Job("clicks", spark, config)
    clicks = job.source(spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folders.clicks)))
    counts = clicks.key_by("user").aggregate(n=sl.count(), cents=sl.sum("cents"), uid="counts")
    counts.sink(sl.ParquetSink(str(folders.counts)))
    purchases = clicks.transform(lambda rows: rows.where("cents > 0").select("user"))
    badges = purchases.key_by("user").process(AwardBadges(), "user string, badge string", uid="badges")
    badges.sink(sl.ParquetSink(str(folders.badges)))
    return job


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the job's output differs from a batch computation over all its input."""

    rows: int
    users: int
    badges: int
    wrong_users: int
    """Users that are missing, unexpected, or have wrong values."""
    max_difference: int
    """The largest difference of any count or amount."""
    wrong_badges: int
    """Badges that are missing, or were awarded twice or to the wrong user."""

    @property
    def equal(self) -> bool:
        return self.wrong_users == 0 and self.wrong_badges == 0 and self.max_difference == 0

    def facts(self) -> dict[str, Any]:
        """The figures, and the verdict."""
        return {"equal": self.equal, **asdict(self)}


def compare(spark: SparkSession, folders: Folders) -> Comparison:
    """Read the output back with plain Spark, and compute the same from the input in one batch."""
    from pyspark.sql import functions as F

    clicks = spark.read.schema(SCHEMA).parquet(str(folders.clicks))
    expected = clicks.groupBy("user").agg(
        F.count("*").alias("n"), F.sum("cents").alias("cents"), F.sum(F.expr("int(cents > 0)")).alias("purchases")
    )
    expected = expected.cache()
    last = (
        spark.read.parquet(str(folders.counts))
        .groupBy("user")
        .agg(F.max(F.struct("n", "cents")).alias("last"))
        .select("user", F.col("last.n").alias("out_n"), F.col("last.cents").alias("out_cents"))
    )
    difference = F.greatest(
        F.abs(F.coalesce("n", F.lit(0)) - F.coalesce("out_n", F.lit(0))),
        F.abs(F.coalesce("cents", F.lit(0)) - F.coalesce("out_cents", F.lit(0))),
    )
    both = (
        expected.join(last, "user", "full_outer")
        .agg(
            F.sum("n").alias("rows"),
            F.count("n").alias("users"),
            F.max(difference).alias("max_difference"),
            F.count(F.when((difference > 0) | F.isnull("n") | F.isnull("out_n"), 1)).alias("wrong"),
        )
        .first()
    )
    assert both is not None
    due = expected.select(
        "user",
        F.explode(F.array(*(F.struct(F.lit(n).alias("at"), F.lit(b).alias("badge")) for n, b in BADGES.items()))),
    ).select("user", "col.at", "col.badge")
    due = due.join(expected.select("user", "purchases"), "user").where("purchases >= at").select("user", "badge")
    awarded = _output(spark, folders.badges, "user string, badge string")
    result = Comparison(
        rows=both["rows"] or 0,
        users=both["users"],
        badges=awarded.count(),
        wrong_users=both["wrong"],
        max_difference=both["max_difference"] or 0,
        wrong_badges=due.exceptAll(awarded).count() + awarded.exceptAll(due).count(),
    )
    expected.unpersist()
    return result


def _output(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    """The rows of a sink, which has no files if it never got a row."""
    if not any(folder.glob("*.parquet")):
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(str(folder))
