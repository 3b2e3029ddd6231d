"""Columns may have any name and most types; those that cannot work are refused where the job is written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.errors import JobDefinitionError
from tests.jobs.place import Place

pytestmark = pytest.mark.spark

DOT, TICK, TIME = "a.b", "c`d", "the.time"
TYPES = pa.schema([(DOT, pa.string()), (TICK, pa.int64()), (TIME, pa.timestamp("us", "UTC")), ("x", pa.int64())])


class Last(sl.KeyedProcessor):
    def process(self, key: Any, rows: Any, context: sl.ProcessContext) -> Any:
        for row in rows:
            last = row
        yield (*key, last[TIME].second, last.x)


def test_names_with_dots_and_backticks_work_in_every_step(place: Place, runs: list[sl.JobRun]) -> None:
    times = [datetime(2024, 1, 1, 0, 0, second, tzinfo=UTC) for second in (1, 2, 3, 50)]
    rows = [("k", 1, times[0], 5), ("k", 1, times[1], 6), ("k", 2, times[2], 7), ("end", 0, times[3], 0)]
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), TYPES, strict=True)]
    pq.write_table(pa.Table.from_arrays(columns, schema=TYPES), place.input / "0.parquet")
    frame = place.spark.readStream.schema(place.spark.read.parquet(str(place.input)).schema).parquet(str(place.input))
    job = place.job()
    stream = job.source(frame, event_time=TIME, watermark_delay="0s")
    keyed = stream.key_by(DOT, TICK)
    other = stream.transform(lambda rows: rows.withColumnsRenamed({TIME: "its.time", "x": "y`"})).key_by(DOT, TICK)
    names = f"`{DOT}` string, `c``d` long, second int, x long"
    steps = {
        "window": keyed.window(sl.tumbling("10s")).aggregate(n=sl.count(), s=sl.sum("x")),
        "process": keyed.process(Last(), names, time_mode="event"),
        "first": keyed.deduplicate(within="10s"),
        "total": keyed.aggregate(n=sl.count()),
        "pairs": keyed.join(other, within="0s"),
    }
    for name, stream in steps.items():
        stream.sink(sl.ParquetSink(str(place.root / name)))
    run = job.start()
    runs.append(run)
    run.process_all_available()
    run.stop()
    found = {name: place.rows(place.root / name) for name in steps}
    assert [(row[0], row[1], *row[-2:]) for row in found["window"]] == [("k", 1, 2, 11), ("k", 2, 1, 7)]
    assert found["process"] == [("end", 0, 50, 0), ("k", 1, 2, 6), ("k", 2, 3, 7)]
    assert sorted(row[:2] for row in found["first"]) == [("end", 0), ("k", 1), ("k", 2)]
    assert sorted(found["total"]) == [("end", 0, 1), ("k", 1, 2), ("k", 2, 1)]
    assert len(found["pairs"]) == 4


def test_columns_of_types_that_cannot_work_are_refused_when_the_job_is_built(place: Place) -> None:
    texts = "s struct<c:array<string collate UTF8_LCASE>>, c string collate UNICODE_CI"
    schema = f"m map<string,int>, t timestamp_ntz, {texts}"
    frame = place.spark.readStream.schema(schema).parquet(str(place.input))
    job = place.job()
    stream = job.source(frame)
    with pytest.raises(JobDefinitionError, match=r"key_by\('m'\): the column of type map<string,int> cannot be a key"):
        stream.key_by("t", "m")
    for column in ("c", "s"):
        with pytest.raises(JobDefinitionError, match=rf"key_by\('{column}'\).*collation makes different texts equal"):
            stream.key_by(column)
    with pytest.raises(JobDefinitionError, match=r"event_time='t'.*of type timestamp_ntz.*cast\('timestamp'\)"):
        job.source(frame, event_time="t", watermark_delay="1s")
