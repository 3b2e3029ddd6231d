"""A whole job on a real HDFS: checkpoints, changelog, log, fencing and output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import FencedError
from tests.hdfs import mini_hdfs
from tests.jobs.place import Place, Sum, batches, running_sums

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def hdfs(tmp_path: Path) -> Iterator[str]:
    with mini_hdfs(tmp_path, data_nodes=2) as url:
        yield url


@pytest.mark.parametrize("changelog", [False, True])
def test_a_job_lives_in_hdfs(place: Place, runs: list[sl.JobRun], hdfs: str, changelog: bool) -> None:
    data = batches(4)

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

    place.write(data[0])
    place.write(data[1])
    first = job().start()
    runs.append(first)
    first.process_all_available()
    assert rows() == running_sums(data[:2])
    second = job().start()
    runs.append(second)
    place.write(data[2])
    with pytest.raises(FencedError):
        first.await_termination(timeout=60)
    second.process_all_available()
    second.cancel()
    place.write(data[3])
    third = job().start()
    runs.append(third)
    third.process_all_available()
    assert rows() == running_sums(data)
