"""A whole job against a real S3 server on loopback: checkpoints, log, fencing and output in the object store."""

from __future__ import annotations

import pyarrow.dataset as ds
import pyarrow.fs as fs
import pytest

import strandline as sl
from tests.jobs.place import Place, Sum
from tests.jobs.three_lives import live_three_times
from tests.s3 import BUCKET, KEYS

pytestmark = pytest.mark.spark


def test_a_job_lives_in_an_object_store(place: Place, runs: list[sl.JobRun], s3_endpoint: str) -> None:
    def job() -> sl.Job:
        options = {**KEYS, "endpoint": s3_endpoint, "allow_http": "true"}
        made = sl.Job(
            "visits",
            place.spark,
            sl.Config(
                checkpoint_dir=f"s3://{BUCKET}/job/checkpoints",
                checkpoint_interval="500ms",
                parallelism=2,
                local_dir=str(place.root / "local"),
                storage_options=options,
            ),
        )
        stream = made.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
        stream.sink(sl.ParquetSink(f"s3://{BUCKET}/job/output"))
        return made

    def rows() -> list[tuple[object, ...]]:
        storage = fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=s3_endpoint.removeprefix("http://"), scheme="http"
        )
        table = ds.dataset(f"{BUCKET}/job/output", filesystem=storage, format="parquet").to_table()
        return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)

    live_three_times(place, runs, job, rows)
