"""Slow, huge and broken requests, and too many of them."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from strandline.rest import connections, guard
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A server whose patience is short."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.5)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    with serving(GivenJob(generated_facts(samples=1))) as client:
        yield client


def connected(client: Client) -> socket.socket:
    address = urlsplit(client.served.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=15)


def answer_to(client: Client, request: bytes) -> bytes:
    """What the server answers until it closes the connection."""
    with connected(client) as raw:
        raw.sendall(request)
        parts = []
        try:
            while part := raw.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_a_client_that_sends_half_a_request_is_cut_off(quick: Client) -> None:
    assert answer_to(quick, b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n") == b""
    assert answer_to(quick, b"") == b""


def test_a_client_that_sends_one_byte_after_the_other_is_cut_off(quick: Client) -> None:
    def drip() -> None:
        for _ in range(500):
            raw.sendall(b"X")
            time.sleep(0.02)

    with connected(quick) as raw, pytest.raises(OSError):
        drip()


def test_a_body_that_does_not_come_is_not_waited_for(quick: Client) -> None:
    head = f"POST /jobs/visits/stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {quick.served.token}\r\n"
    answer = answer_to(quick, f"{head}Content-Length: 10\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within" in answer


def test_a_connection_that_is_used_stays(quick: Client) -> None:
    address = urlsplit(quick.served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=10)
    connection.connect()
    first = connection.sock
    for _ in range(8):
        connection.request("GET", "/jobs")
        answer = connection.getresponse()
        assert (answer.status, len(answer.read()) > 0) == (200, True)
        assert connection.sock is first
        time.sleep(0.3)
    connection.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused(client: Client, chunked: bool) -> None:
    body = b"x" * (guard.MAX_BODY_BYTES + 1)
    headers = {"Transfer-Encoding": "chunked"} if chunked else {}
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    answer = client("POST", "/jobs/visits/stop", sent, headers)
    assert answer.status == 413
    assert "65,536 bytes" in answer.json["errors"][0]


def test_huge_headers_and_nonsense_are_refused(client: Client) -> None:
    for request in (
        b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n",
    ):
        assert answer_to(client, request).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b""))
    assert client("GET", "/jobs").status == 200


def test_too_many_connections_do_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 5)
    with serving(GivenJob(generated_facts(samples=1))) as client:
        held = [connected(client) for _ in range(8)]
        try:
            assert client("GET", "/jobs").status == 503
        finally:
            for one in held:
                one.close()
        for _ in range(100):
            if client("GET", "/jobs").status == 200:
                break
            time.sleep(0.05)
        assert client("GET", "/jobs").status == 200


def test_a_path_outside_the_page_is_not_served(client: Client) -> None:
    for path in ("/../app.py", "/web/../../rest/app.py", "/%2e%2e/rest/app.py", "/web/%2e%2e/rest/app.py"):
        assert client("GET", path).status in (400, 404)


ENDS_WITH_ITS_JOB = """
import sys, threading
sys.path.insert(0, {root!r})
from tests.observe.generated import generated_facts
from tests.rest.served import ANY_PORT, GivenJob
from tests.rest.steered import SteeredJob
from strandline.rest.server import serve

job = SteeredJob()
job.go_on.set()
served = serve(GivenJob(generated_facts(samples=1), job), ANY_PORT)
print(served.url, served.token, flush=True)
while not job.asked:
    threading.Event().wait(0.01)
"""


def test_a_process_that_ends_with_its_job_still_tells_where_the_savepoint_is() -> None:
    from pathlib import Path

    from strandline.rest.server import Served

    code = ENDS_WITH_ITS_JOB.format(root=str(Path(__file__).parents[2]))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, token = process.stdout.readline().split()
        client = Client(Served(url, token, lambda: None))
        id = client("POST", "/jobs/visits/stop", {"targetDirectory": "/s"}).json["request-id"]
        time.sleep(0.5)  # longer than the process needs to reach its end
        assert client.get(f"/jobs/visits/savepoints/{id}")["operation"] == {"location": "/s/savepoint-1"}
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
