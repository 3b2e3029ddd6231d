"""A whole job against a real S3 server on loopback: checkpoints, log, fencing and output in the object store."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pytest
from moto.server import ThreadedMotoServer

import strandline as sl
from strandline.errors import FencedError
from tests.runtime.conftest import Place, Sum, running_sums
from tests.runtime.test_recovery import batches

pytestmark = pytest.mark.spark

KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="jobs")
        yield url
    finally:
        server.stop()


def test_a_job_lives_in_an_object_store(place: Place, runs: list[sl.JobRun], endpoint: str) -> None:
    data = batches(4)

    def job() -> sl.Job:
        options = {**KEYS, "endpoint": endpoint, "allow_http": "true"}
        made = sl.Job(
            "visits",
            place.spark,
            sl.Config(
                checkpoint_dir="s3://jobs/checkpoints",
                checkpoint_interval="500ms",
                parallelism=2,
                storage_options=options,
            ),
        )
        stream = made.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
        stream.sink(sl.ParquetSink("s3://jobs/output"))
        return made

    def rows() -> list[tuple[object, ...]]:
        storage = fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=endpoint.removeprefix("http://"), scheme="http"
        )
        table = ds.dataset("jobs/output", filesystem=storage, format="parquet").to_table()
        return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)

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
