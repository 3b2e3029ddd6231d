"""Who is answered: token, Host and Origin, over HTTP and as a decision."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from strandline.errors import ConfigError
from strandline.rest.access import Access, with_token
from strandline.rest.server import RestSettings
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving
from tests.rest.steered import SteeredJob

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Client, SteeredJob]]:
    job = SteeredJob()
    job.go_on.set()
    with serving(GivenJob(generated_facts(samples=1), job)) as client:
        yield client, job


CHANGES = [
    ("POST", "/jobs/visits/checkpoints"),
    ("POST", "/jobs/visits/savepoints"),
    ("POST", "/jobs/visits/stop"),
    ("PATCH", "/jobs/visits?mode=cancel"),
    ("PATCH", "/jobs/visits/rescaling?parallelism=2"),
    ("POST", "/jobs/visits/rescaling?parallelism=2"),
    ("POST", "/jobs/visits/profile"),
    ("POST", "/v1/jobs/visits/stop"),
    ("DELETE", "/jobs/visits"),
    ("POST", "/savepoint-disposal"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("token", [None, "wrong", "short but wrong", TOKEN])
def test_a_changing_call_without_the_right_token_is_refused(
    server: tuple[Client, SteeredJob], method: str, path: str, token: str | None
) -> None:
    client, job = server
    answer = client(method, path, token=token)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "token" in answer.json["errors"][0]
    assert client.served.token not in answer.body.decode()
    assert job.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8081"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "127.0.0.1@evil.example"},
        {"Host": ""},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/jobs/visits/stop"), ("GET", "/jobs/visits/facts")])
def test_a_page_elsewhere_is_refused_even_with_the_token(
    server: tuple[Client, SteeredJob], method: str, path: str, headers: dict[str, str]
) -> None:
    client, job = server
    assert client(method, path, headers=headers).status == 403
    assert job.asked == []


def test_reading_on_loopback_needs_no_token_but_logs_and_profiles_do(server: tuple[Client, SteeredJob]) -> None:
    client, _ = server
    assert client("GET", "/jobs/visits/facts", token=None).status == 200
    assert client("GET", "/metrics", token=None).status == 200
    for path in ("logs", "logs/driver", "processes", f"profile/{'0' * 32}", f"flamegraph/{'0' * 32}"):
        assert client("GET", f"/jobs/visits/{path}", token=None).status == 401
        assert client("GET", f"/v1/jobs/visits/{path}", token=None).status == 401


def test_the_own_page_and_a_link_from_elsewhere_are_answered(server: tuple[Client, SteeredJob]) -> None:
    client, _ = server
    own = urlsplit(client.served.url).netloc
    assert client("GET", "/jobs", headers={"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}).status == 200
    tunnel = {"Host": "localhost:9999", "Origin": "http://localhost:9999"}
    assert client("GET", "/jobs", headers=tunnel).status == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client("GET", "/jobs", headers=link).status == 200


def test_every_answer_has_security_headers_and_none_allows_other_origins(server: tuple[Client, SteeredJob]) -> None:
    client, _ = server
    for path in ("/jobs", "/nothing", "/jobs/visits/logs"):
        headers = client("GET", path, token=None).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not [name for name in headers if name.startswith("access-control")]
        assert "set-cookie" not in headers
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert client("OPTIONS", "/jobs", headers=preflight, token=None).status == 403


def test_elsewhere_than_on_loopback_everything_needs_the_token_but_the_files_of_the_page() -> None:
    settings = RestSettings(bind="0.0.0.0", ports=range(0, 1), token=TOKEN)
    with serving(GivenJob(generated_facts(samples=1)), settings=settings) as client:
        here = {"Host": "127.0.0.1"}
        for path in ("/jobs", "/jobs/visits/facts", "/metrics", "/overview", "/openapi.json", "/v1/jobs"):
            assert client("GET", path, headers=here, token=None).status == 401
            assert client("GET", path, headers=here).status == 200
        for path in ("/", "/nothing.js"):
            assert client("GET", path, headers=here, token=None).status in (200, 404)
        assert client("GET", "/jobs", headers={"Host": "evil.example"}).status == 403
        assert client("GET", "/jobs", headers={"Host": socket.gethostname()}).status == 200


def test_reading_may_be_protected_on_loopback_too() -> None:
    access = Access(TOKEN, token_for_reads=True)
    refusal = access.refusal("GET", "/jobs", {"host": "localhost"})
    assert refusal is not None
    assert refusal.status == 401


def test_names_of_a_proxy_may_be_listed() -> None:
    access = Access(TOKEN, hosts=("jobs.example.org",))
    proxied = {"host": "Jobs.Example.org", "origin": "https://jobs.example.org"}
    assert access.refusal("GET", "/jobs", proxied) is None
    assert access.refusal("POST", "/jobs/x/stop", {**proxied, "authorization": f"Bearer {TOKEN}"}) is None


@pytest.mark.parametrize("token", ["", "short", "with a space", "x" * 201, "umläut-umläut"])
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="rest_token"):
        Access(token)


def test_a_header_that_comes_twice_is_not_half_checked(server: tuple[Client, SteeredJob]) -> None:
    client, _ = server
    address = urlsplit(client.served.url)
    request = (
        f"GET /jobs HTTP/1.1\r\nHost: {address.netloc}\r\nOrigin: http://{address.netloc}\r\nOrigin: http://x\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as raw:
        raw.sendall(request.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 403")


def test_the_token_is_in_no_repr_and_only_in_the_fragment_of_a_link() -> None:
    assert TOKEN not in repr(Access(TOKEN))
    assert TOKEN not in repr(RestSettings(token=TOKEN))
    assert with_token("http://h:1", "a&b c") == "http://h:1/#token=a%26b%20c"
