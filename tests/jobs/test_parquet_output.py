"""What readers of a `ParquetSink` see: columns before there are rows, and which row of a key is the newest."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

import strandline as sl
from tests.jobs.place import Place

pytestmark = pytest.mark.spark


class Twice(sl.KeyedProcessor):
    """Counts rows, and emits every count."""

    def open(self, context: Any) -> None:
        self.seen = context.value_state("seen", "n long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for _ in rows:
            n = (self.seen.get() or 0) + 1
            self.seen.update(n)
            yield (*key, n)


def test_an_output_can_be_read_before_it_has_rows_and_tells_the_newest_row_of_a_key(place: Place) -> None:
    job = place.job()
    stream = job.source(place.source()).key_by("user").process(Twice(), "user string, n long", uid="seen")
    stream.sink(sl.ParquetSink(str(place.output), version_columns=True))
    names = ["user", "n", "_batch", "_position"]
    with job.start() as run:
        early = place.spark.read.parquet(str(place.output))
        assert early.columns == names
        assert early.count() == 0
        for users in ("aab", "bcbba", "ca"):
            place.write([(user, 1) for user in users])
        run.process_all_available()
    files = sorted(place.output.glob("*.parquet"))
    kinds = {tuple((field.name, field.type) for field in pq.read_schema(file)) for file in files}
    assert len(kinds) == 1, "the empty file has the columns of the others"
    rows = place.spark.read.parquet(str(place.output))
    version = F.struct("_batch", "_position")
    newest = rows.groupBy("user").agg(F.max_by("n", version).alias("n"))
    assert sorted(map(tuple, newest.collect())) == [("a", 4), ("b", 4), ("c", 2)]
    assert rows.select(version).distinct().count() == rows.count() == 10
    in_order = rows.orderBy("_batch", "_position").collect()
    assert [row.n for row in in_order if row.user == "b"] == [1, 2, 3, 4]
    with pytest.raises(sl.JobDefinitionError, match="would add a second column '_batch' to the rows"):
        stream.transform(lambda frame: frame.withColumn("_batch", F.lit(1))).sink(
            sl.ParquetSink("elsewhere", version_columns=True)
        )
