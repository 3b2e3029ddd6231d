"""The Spark data source `strandline`: a state as a DataFrame, and what filters spare Spark of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import strandline as sl
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from strandline.state_reader.spark_source import PUSHDOWN, StateSource
from tests.runtime.taskmanager.changelog.host import PARALLELISM
from tests.state_reader.written import Written, group_of

pytestmark = pytest.mark.spark

INPUT = parse_schema("user string, n int, x decimal(10,2), at timestamp")
ROWS = [(f"u{at}", at % 3, None, None) for at in range(40)]


class Last(sl.KeyedProcessor):
    """Keeps values of several types, with a time to live."""

    def open(self, context: Any) -> None:
        self.last = context.value_state("last", "x decimal(10,2), tags map<string,array<long>>", ttl="1h")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            self.last.update((row.x, {"n": [row.n, None]}))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """A job with one checkpoint."""
    operator = ProcessOperator("last", Last(), ["user", "n"], INPUT, parse_schema("user string"))
    with Written(tmp_path_factory.mktemp("job"), [operator]) as job:
        job.run({"last": ROWS})
        job.checkpoint()
        yield job


class TestSource:
    """One class, so that all tests share the session and the checkpoint."""

    def frame(self, spark: SparkSession, job: Written) -> DataFrame:
        return spark.read.format("strandline").option("path", job.job).option("operator", "last").load()

    def test_a_state_is_a_dataframe(self, spark: SparkSession, job: Written) -> None:
        frame = self.frame(spark, job)
        assert frame.schema.simpleString() == (
            "struct<user:string,n:int,key_group:int,x:decimal(10,2),tags:map<string,array<bigint>>,expiry:timestamp>"
        )
        assert frame.rdd.getNumPartitions() == PARALLELISM
        found = {(row.user, row.n, row.key_group, row.tags["n"][0]) for row in frame.collect()}
        assert found == {(user, n, group_of((user, n)), n) for user, n, _, _ in ROWS}
        assert frame.where("n = 1").count() == 13

    def test_filters_on_keys_and_key_groups_are_pushed_down(self, spark: SparkSession, job: Written) -> None:
        sl.register(spark)
        try:
            frame = self.frame(spark, job)
            assert frame.count() == len(ROWS)
            one = frame.where((F.col("user") == "u7") & (F.col("n") == 1))
            assert [row.user for row in one.collect()] == ["u7"]
            assert "u7" not in one._jdf.queryExecution().executedPlan().toString().split("BatchScan")[0]
            some = frame.where(F.col("user").isin("u7", "u8", "nobody") & F.col("n").isin(1, 2))
            assert sorted(row.user for row in some.collect()) == ["u7", "u8"]
            narrow = frame.where("key_group >= 1 and key_group < 2")
            assert narrow.rdd.getNumPartitions() == 1
            assert narrow.count() == sum(group_of((user, n)) == 1 for user, n, _, _ in ROWS)
            assert frame.where("key_group > 5").count() == 0
            assert frame.where("user = 'u7'").count() == 1
            assert frame.where("user = 'u7' and n = 99999999999").count() == 0
            assert frame.where("user > 'u35' and key_group <= 3 and n = 0").count() == 4
        finally:
            spark.conf.unset(PUSHDOWN)
            spark.dataSource.register(StateSource)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"state": "lst"}, "no state 'lst'; it has: last"),
            ({"operatr": "last"}, "no option 'operatr'; it has path, operator"),
            ({"path": ""}, "needs a path"),
        ],
    )
    def test_wrong_options_say_what_is_right(
        self, spark: SparkSession, job: Written, options: dict[str, str], message: str
    ) -> None:
        with pytest.raises(Exception, match=message):
            spark.read.format("strandline").options(**{"path": job.job, **options}).load()


def test_a_dropped_checkpoint_is_a_clear_error(spark: SparkSession, tmp_path: Path) -> None:
    import shutil

    operator = ProcessOperator("last", Last(), ["user", "n"], INPUT, parse_schema("user string"))
    with Written(tmp_path, [operator]) as job:
        job.run({"last": ROWS})
        path = job.checkpoint()
        frame = spark.read.format("strandline").load(path)
        shutil.rmtree(path)
        with pytest.raises(Exception, match="give the job's folder"):
            frame.collect()
