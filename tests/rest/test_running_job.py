"""A job that really runs, steered over HTTP: checkpoint, savepoint, profile, rescale, stop; and what it says then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from strandline.observe.facts import vertex_id
from strandline.rest.server import Served
from tests.jobs.place import Place, batches
from tests.rest.served import Client
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

TOKEN = "a-token-of-this-test"


def done(client: Client, method: str, path: str, polled: str, body: object = None) -> Any:
    """The result of an operation, as soon as it has ended."""
    started = client(method, f"/jobs/visits/{path}", body)
    assert started.status == 202, started.body
    place = f"/jobs/visits/{polled}/{started.json['request-id']}"
    wait_until(lambda: client.get(place)["status"]["id"] == "COMPLETED")
    operation = client.get(place)["operation"]
    assert "failure-cause" not in operation, operation
    return operation


def test_a_running_job_is_seen_and_steered_over_http(tmp_path: Path, spark: SparkSession) -> None:
    place = Place(tmp_path, spark)
    rows = iter(batches(20, rows=50))
    place.write(next(rows))
    with place.sums(rest_port=0, rest_token=TOKEN).start() as run:
        assert run.ui_url is not None
        client = Client(Served(run.ui_url, TOKEN, lambda: None))
        run.process_all_available()
        wait_until(lambda: client.get("/jobs/visits")["state"] == "RUNNING")

        checkpoint = done(client, "POST", "checkpoints", "checkpoints")["checkpointId"]
        wait_until(lambda: client.get("/jobs/visits/checkpoints")["latest"]["completed"] is not None)
        path = f"/jobs/visits/checkpoints/details/{checkpoint}"
        wait_until(lambda: b'"status":"COMPLETED"' in client("GET", path).body)  # the facts may be older
        tasks = client.get(f"/jobs/visits/checkpoints/details/{checkpoint}")["tasks"]
        assert list(tasks) == [vertex_id("step", "sums")]

        saved = done(client, "POST", "savepoints", "savepoints", {"target-directory": str(tmp_path / "saved")})
        assert (Path(saved["location"]) / "_metadata").exists()
        assert done(client, "POST", "profile", "profile", {"seconds": 0.3})["samples"] > 0

        rescaled = done(client, "PATCH", "rescaling?parallelism=1", "rescaling")["rescaling"]
        assert (rescaled["parallelism_before"], rescaled["parallelism"]) == (2, 1)
        place.write(next(rows))
        run.process_all_available()
        wait_until(lambda: b'_parallelism{job_id="' in client("GET", "/metrics").body)
        wait_until(lambda: len(client.get("/jobs/visits/rescales/history")) == 1)

        stopped = done(client, "POST", "stop", "stop", {"targetDirectory": str(tmp_path / "last")})
        assert (Path(stopped["location"]) / "_metadata").exists()
        assert run.await_termination(30)
        wait_until(lambda: client.get("/jobs/visits")["state"] == "FINISHED")
        refused = client("POST", "/jobs/visits/checkpoints")
        assert (refused.status, "it is stopped" in refused.json["errors"][0]) == (409, True)
        assert TOKEN not in client("GET", "/jobs/visits/facts").body.decode()
