"""A whole job on a real HDFS: checkpoints, changelog, log, fencing and output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import strandline as sl
from tests.hdfs import mini_hdfs
from tests.jobs.place import Place, Sum
from tests.jobs.three_lives import live_three_times

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def hdfs(tmp_path: Path) -> Iterator[str]:
    with mini_hdfs(tmp_path, data_nodes=2) as url:
        yield url


@pytest.mark.parametrize("changelog", [False, True])
def test_a_job_lives_in_hdfs(place: Place, runs: list[sl.JobRun], hdfs: str, changelog: bool) -> None:
    def job() -> sl.Job:
        made = sl.Job(
            "visits",
            place.spark,
            sl.Config(
                checkpoint_dir=f"{hdfs}/checkpoints",
                checkpoint_interval="500ms",
                changelog=changelog,
                parallelism=2,
                local_dir=str(place.root / "local"),
            ),
        )
        stream = made.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
        stream.sink(sl.ParquetSink(f"{hdfs}/output"))
        return made

    def rows() -> list[tuple[object, ...]]:
        """What Spark's own HDFS client reads."""
        return sorted((tuple(row) for row in place.spark.read.parquet(f"{hdfs}/output").collect()), key=repr)

    live_three_times(place, runs, job, rows)
