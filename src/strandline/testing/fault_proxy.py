"""An HTTP proxy with faults, to stand between a client and an object store on loopback.

    with FaultProxy("http://127.0.0.1:9000") as proxy:
        proxy.fail("PUT .*/log/", Fault(lose_answer=True), times=1)
        storage = open_storage("s3://bucket/root", {"endpoint": proxy.url, ...})

The proxy keeps the `Host` header, so that signatures stay valid.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_PIECE = 4096
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request. Several things may happen to the same one."""

    delay: float = 0.0
    """Seconds before the request is forwarded."""
    status: int = 0
    """The proxy answers with this status itself, and forwards nothing."""
    code: str = "SlowDown"
    """The code in the body of that answer."""
    cut_request: bool = False
    """The connection ends in the middle of the request's body; nothing is forwarded."""
    lose_answer: bool = False
    """The request is forwarded, and the connection ends without an answer: the client does not know the outcome."""
    cut_answer: bool = False
    """The connection ends in the middle of the answer's body."""
    bytes_per_second: float = 0.0
    """The rate of the request's body, and of the answer's body; 0 is unlimited."""


@dataclass(slots=True)
class _Rule:
    pattern: re.Pattern[str]
    fault: Fault
    left: float
    chance: Callable[[], bool]


class FaultProxy:
    """A proxy that forwards every request to one server, except those that are to have a fault."""

    def __init__(self, upstream: str) -> None:
        """Forward to the server at the URL `upstream`, which must be `http://host:port`."""
        self.requests: list[str] = []
        """Every request so far: `METHOD path?query`, and ` if absent` after it for a conditional write."""
        self.faults = 0
        """How many requests had a fault so far."""
        self._upstream = urlsplit(upstream).netloc
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, pattern: str, fault: Fault, *, times: int | None = None) -> None:
        """Give a fault to requests whose text in `requests` matches; with `times`, only to the first ones."""
        with self._lock:
            left = float("inf") if times is None else times
            self._rules.append(_Rule(re.compile(pattern), fault, left, lambda: True))

    def fail_at_random(self, pattern: str, fault: Fault, *, share: float, seed: int) -> None:
        """Give a fault to a share of the requests whose text matches. The seed decides which ones."""
        chance = random.Random(seed)
        with self._lock:
            self._rules.append(_Rule(re.compile(pattern), fault, float("inf"), lambda: chance.random() < share))

    def heal(self) -> None:
        """Forward everything from now on."""
        with self._lock:
            self._rules.clear()

    def fault_for(self, request: str) -> Fault:
        """Note a request; returns the fault that it gets."""
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.left > 0 and rule.pattern.search(request) and rule.chance():
                    rule.left -= 1
                    self.faults += 1
                    return rule.fault
            return Fault()

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the server."""
        return http.client.HTTPConnection(self._upstream, timeout=600)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that goes away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        condition = " if absent" if self.headers.get("If-None-Match") == "*" else ""
        fault = self.owner.fault_for(f"{self.command} {self.path}{condition}")
        length = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if fault.cut_request:
            self.rfile.read(length // 2)
            self._cut()
            return
        body = self._read(length, fault.bytes_per_second)
        time.sleep(fault.delay)
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>a fault on purpose</Message></Error>"
            self._answer(fault.status, [("Content-Type", "application/xml")], text.encode(), fault)
            return
        status, headers, answer = self._forward(body)
        if fault.lose_answer:
            self._cut()
        else:
            self._answer(status, headers, answer, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _read(self, length: int, rate: float) -> bytes:
        if not rate:
            return self.rfile.read(length)
        pieces = []
        while length:
            piece = self.rfile.read(min(length, _PIECE))
            pieces.append(piece)
            length -= len(piece)
            time.sleep(len(piece) / rate)
        return b"".join(pieces)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = self.owner.connect()
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
            if self.command == "HEAD":
                headers.append(("Content-Length", answer.getheader("Content-Length", "0")))
            return answer.status, headers, content
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: Fault) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.cut_answer:
            self.wfile.write(body[: len(body) // 2])
            self._cut()
        elif fault.bytes_per_second:
            for at in range(0, len(body), _PIECE):
                self.wfile.write(body[at : at + _PIECE])
                time.sleep(len(body[at : at + _PIECE]) / fault.bytes_per_second)
        else:
            self.wfile.write(body)

    def _cut(self) -> None:
        """End the connection at once."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
