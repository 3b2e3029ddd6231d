"""The graph of a job as people see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import strandline as sl
from strandline.observe.facts import Vertex, vertex_id
from strandline.observe.graph import vertices_of, with_parallelism
from strandline.runtime.driver.figures import SourceFigures
from tests.jobs.place import Place, Sum

pytestmark = pytest.mark.spark


class Forgetful(Sum):
    """Its state goes away after an hour."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long", ttl="1h")


def write_rows(rows: DataFrame, batch_id: int) -> None:
    raise AssertionError("the job is never started")


def test_vertices_come_after_those_that_they_read_and_stateless_steps_lie_on_the_edges(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    job = place.job()
    unused = job.source(place.source())
    clicks, users = job.source(place.source()), job.source(place.source())
    assert unused is not clicks
    both = clicks.union(users.transform(lambda rows: rows.where("x > 0")))
    sums = both.key_by("user").process(Sum(), Place.OUTPUT, uid="sums")
    counts = both.key_by("user").process(Forgetful(), Place.OUTPUT, uid="counts")
    known = sums.key_by("user").deduplicate(ttl="1h", uid="known")
    known.union(counts).sink(sl.ParquetSink(str(place.output)))
    users.sink(sl.ForeachBatchSink(write_rows))

    graph = vertices_of(job._graph)
    assert [vertex.name for vertex in graph] == [
        "source-1",
        "source-2",
        "sums",
        "known",
        "counts",
        "sink-0",
        "sink-1",
    ]
    seen: set[str] = set()
    for vertex in graph:
        assert set(vertex.inputs) <= seen
        seen.add(vertex.id)
    of = {vertex.name: vertex for vertex in graph}
    sources = (of["source-1"].id, of["source-2"].id)
    assert of["sums"].inputs == of["counts"].inputs == sources
    assert of["known"].inputs == (vertex_id("step", "sums"),)
    assert of["sink-0"].inputs == (of["known"].id, of["counts"].id)
    assert of["sink-1"].inputs == (of["source-2"].id,)
    assert [of[name].state_expires for name in ("sums", "counts", "known")] == [False, True, True]
    assert (of["sums"].description, of["known"].description) == ("process by user", "deduplicate by user")
    assert of["sink-0"].description == f"ParquetSink({place.output})"
    assert of["sink-1"].description == "ForeachBatchSink(write_rows)"
    assert of["source-1"].description.startswith("FileSource[")


def test_spark_describes_the_sources_if_there_is_one_stream_for_each() -> None:
    graph = (Vertex("a", "source-0", "source", "one"), Vertex("b", "sums", "step", "process", 1, ("a",)))
    told = SourceFigures("FileStreamSource[in]")
    assert [vertex.description for vertex in with_parallelism(graph, 3, [told])] == ["FileStreamSource[in]", "process"]
    assert [vertex.description for vertex in with_parallelism(graph, 3, [told, told])] == ["one", "process"]
    assert [vertex.parallelism for vertex in with_parallelism(graph, 3)] == [1, 3]
