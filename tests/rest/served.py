"""A real server on loopback over generated facts, and a small client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from strandline.errors import NotFoundError
from strandline.observe.facts import JobFacts
from strandline.observe.views import JobControl, JobView, LogText
from strandline.rest.server import RestSettings, Served, serve_jobs

ANY_PORT = RestSettings(ports=range(0, 1))


@dataclass
class GivenJob:
    """A job whose facts are given."""

    given: JobFacts
    control: JobControl | None = None
    logs: Mapping[str, str] = field(default_factory=lambda: {"driver": "one\ntwo\n", "slot-0": "three\n"})

    @property
    def id(self) -> str:
        return self.given.id

    @property
    def name(self) -> str:
        return self.given.name

    def facts(self) -> JobFacts:
        return self.given

    def processes(self) -> Sequence[str]:
        return list(self.logs)

    def log(self, process: str, max_bytes: int = 100_000) -> LogText:
        if process not in self.logs:
            raise NotFoundError(f"no log of {process}")
        text = self.logs[process]
        return LogText(process, text[-max_bytes:], len(text) > max_bytes)


@dataclass
class GivenJobs:
    """Jobs that are given, newest first."""

    views: list[JobView]

    def all(self) -> Sequence[JobView]:
        return self.views

    def get(self, job: str) -> JobView | None:
        return next((view for view in self.views if job in (view.id, view.name)), None)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Sends requests to a server; with its token, unless told otherwise."""

    served: Served

    def __call__(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        token: str | None = "",
        timeout: float = 20,
    ) -> Answered:
        address = urlsplit(self.served.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=timeout)
        sent = {**({"Authorization": f"Bearer {token or self.served.token}"} if token is not None else {})}
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Any:
        """The JSON of a path that must exist."""
        answer = self("GET", path, **options)
        assert answer.status == 200, (path, answer.status, answer.body[:500])
        return answer.json


@contextmanager
def serving(*views: JobView, settings: RestSettings = ANY_PORT) -> Iterator[Client]:
    """A server over these jobs, until the end of the block."""
    served = serve_jobs(GivenJobs(list(views)), settings)
    try:
        yield Client(served)
    finally:
        served.close()
