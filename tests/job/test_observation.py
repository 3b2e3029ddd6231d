"""What makes a run visible may fail, and the run does not notice; only a port that the user named must be free."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import CheckpointNotFoundError, ConfigError
from tests.jobs.place import Place

pytestmark = pytest.mark.spark


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_before_the_job_starts(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            place.sums(rest_port=port).start()
    assert not place.checkpoints.exists()


def test_a_start_that_is_refused_leaves_no_server(tmp_path: Path, spark: SparkSession) -> None:
    place = Place(tmp_path, spark)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CheckpointNotFoundError):
        place.sums(rest_port=port).start(restore=str(tmp_path / "nothing"))
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_that_is_not_of_this_host_is_an_error_before_the_job_starts(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    with pytest.raises(ConfigError, match="rest_bind"):
        place.sums(rest_port=0, rest_bind="256.0.0.1").start()
    assert not place.checkpoints.exists()


def test_a_run_without_a_page_goes_on_and_one_with_a_page_is_seen_after_its_end(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    place.write([("a", 1)])
    taken = two_ports()
    ports = "-".join(str(server.getsockname()[1]) for server in taken)
    try:
        with place.sums(rest_port=ports).start() as run:
            assert run.ui_url is None
            assert "<a href" not in run._repr_html_()
    finally:
        for server in taken:
            server.close()
    assert run.status is sl.RunStatus.STOPPED

    run = place.sums(rest_port=0).start(available_now=True)
    assert run.ui_url is not None
    run.await_termination(60)
    job = run._observation.job
    assert job is not None
    facts = job.facts()
    assert (facts.status, facts.runs, facts.driver.ui_url) == ("finished", False, run.ui_url)
    with urlopen(f"{run.ui_url}/jobs/overview", timeout=5) as answer:
        (shown,) = [one for one in json.load(answer)["jobs"] if one["jid"] == facts.id]
    assert shown["state"] == "FINISHED"


def two_ports() -> tuple[socket.socket, socket.socket]:
    """Two servers at ports next to each other."""
    for port in range(20_000, 30_000, 2):
        with suppress(OSError):
            first = socket.create_server(("127.0.0.1", port))
            try:
                return first, socket.create_server(("127.0.0.1", port + 1))
            except OSError:
                first.close()
    raise AssertionError("no two ports next to each other are free")
