"""The server: where it listens, what it shows, and what it bears."""

from __future__ import annotations

import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from strandline.errors import ConfigError, StrandlineError
from strandline.rest import server as server_module
from strandline.rest.server import RestSettings, ShownJobs, serve
from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts
from tests.rest.served import ANY_PORT, Client, GivenJob, serving


def job(name: str = "visits", status: RunStatus = RunStatus.RUNNING) -> GivenJob:
    return GivenJob(generated_facts(name=name, status=status, samples=1))


def test_runs_of_one_process_share_a_server() -> None:
    settings = RestSettings(ports=range(0, 1), token="of-this-test-alone")  # no runs of other tests
    first, second = serve(job("one"), settings), serve(job("two"), settings)
    try:
        assert (first.url, first.token) == (second.url, second.token)
        assert len(Client(first).get("/jobs")["jobs"]) == 2
        first.close()
        assert [one["name"] for one in Client(second).get("/jobs/overview")["jobs"]] == ["two"]
    finally:
        first.close()
        second.close()
    with pytest.raises(OSError):
        Client(second).get("/jobs")


def test_servers_with_different_tokens_are_apart() -> None:
    one = serve(job("one"), ANY_PORT)
    other = serve(job("two"), RestSettings(ports=range(0, 1), token="another-token"))
    try:
        assert one.url != other.url
        assert other.token == "another-token"
        assert "another-token" not in repr(other)
    finally:
        one.close()
        other.close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use; set rest_port") as caught:
            serve(job(), RestSettings(ports=range(port, port + 1)))
        assert caught.type is ConfigError  # a traceback shows the class that the documentation names


def test_the_log_says_where_the_page_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="strandline"), serving(job()) as client:
        assert f"REST interface and page at {client.served.url}" in caplog.messages


def test_the_first_free_port_of_a_range_is_taken() -> None:
    with serving(job()) as first:
        port = urlsplit(first.served.url).port or 0
        served = serve(job(), RestSettings(ports=range(port, min(port + 50, 65536))))
        try:
            assert (urlsplit(served.url).port or 0) > port
        finally:
            served.close()


def test_a_range_without_a_free_port_is_named() -> None:
    with serving(job()) as one, serving(job()) as other:
        low, high = sorted(urlsplit(client.served.url).port or 0 for client in (one, other))
        with pytest.raises(StrandlineError, match=f"all ports from {low} to {high} of 127.0.0.1 are in use"):
            serve(job(), RestSettings(ports=range(low, high + 1, high - low)))


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ConfigError, match="rest_bind"):
        serve(job(), RestSettings(bind="192.0.2.7", ports=range(0, 1)))


def test_ended_runs_stay_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEPT_RUNS", 3)
    shown = ShownJobs()
    for number in range(6):
        shown.add(job(f"job-{number}", RunStatus.FINISHED))
    assert [view.name for view in shown.all()] == ["job-5", "job-4", "job-3"]


def test_a_later_run_of_a_job_takes_the_place_of_the_earlier_one() -> None:
    shown = ShownJobs()
    first, second = job(), job()
    shown.add(first)
    shown.add(second)
    assert shown.get("visits") is second
    assert not shown.remove(first)
    assert shown.get(second.id) is second


def test_the_server_module_imports_no_web_framework() -> None:
    code = "import sys, strandline.rest.server; print({'fastapi', 'uvicorn', 'starlette'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
