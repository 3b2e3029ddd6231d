"""The server of a process: answers the calls of one calls class, and exchanges of rows, to callers with the secret."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.flight as flight

from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.runtime.protocol.address import Address, host_identity
from strandline.runtime.protocol.calls import (
    AWAIT,
    SECRET_HEADER,
    STILL_AT_IT,
    Envelope,
    Reply,
    declared_calls,
    request_decoder,
    terms_of,
)
from strandline.runtime.protocol.failures import Failure, flight_error
from strandline.runtime.protocol.gate import Gate
from strandline.runtime.protocol.tickets import Tickets
from strandline.runtime.protocol.tls import Tls

log = logging.getLogger(__name__)

CLOSE_PATIENCE = 1.0
"""Seconds for which a server that closes waits for its callers to notice. gRPC itself waits for twenty."""
_STILL_AT_IT = msgspec.msgpack.encode(Reply(pending=True))

_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT = 1.0
"""Seconds within which the server must take a connection from the gate."""

Exchange = Callable[[Any, bytes, Any, Any], None]
"""Serves one exchange of rows: Flight's context, the command, a reader and a writer."""


class _CheckSecret(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no stubs
    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = headers.get(SECRET_HEADER, [""])[0]
        if not hmac.compare_digest(str(given), self._secret):
            raise flight.FlightUnauthenticatedError("this call does not carry the run's secret")


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no stubs
    def __init__(self, location: str, server: Server, secret: str, **options: Any) -> None:
        super().__init__(location, middleware={"secret": _CheckSecret(secret)}, **options)
        self._server = server

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        return [self._server.answer(action.type, action.body.to_pybytes())]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        try:
            self._server.exchange(context, descriptor.command, reader, writer)
        except flight.FlightError:
            raise
        except BaseException as error:  # else the caller would take this process for lost
            if not isinstance(error, StrandlineError):
                log.exception("exchange failed")
            raise flight_error(error) from error


def _connect(family: socket.AddressFamily, address: Any) -> socket.socket:
    connection = socket.socket(family)
    try:
        connection.settimeout(_CONNECT_TIMEOUT)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


class Server:
    """Serves the calls that `interface` declares, which `process` implements.

    Callers on the same host use a Unix socket, which only the user's own processes reach. Callers from other hosts come
    through a gate.
    """

    def __init__(
        self,
        secret: str,
        interface: type,
        process: object,
        *,
        run_id: str,
        generation: Callable[[], int],
        bind_host: str,
        unix_path: str,
        advertise_host: str | None = None,
        exchange: Exchange | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._run_id = run_id
        self._generation = generation
        self._exchange = exchange
        self.tickets = Tickets()
        self._calls = {name: (declared, getattr(process, name)) for name, declared in declared_calls(interface).items()}
        Path(unix_path).unlink(missing_ok=True)
        self._servers = [_FlightServer(f"grpc+unix://{unix_path}", self, secret)]
        connect = partial(_connect, socket.AF_UNIX, unix_path)
        if tls is not None:
            # Flight offers no TLS on a Unix socket. Whoever finds this port needs a certificate to get further.
            encrypted = _FlightServer(f"grpc+tls://{_LOOPBACK}:0", self, secret, **tls.server_options())
            self._servers.append(encrypted)
            connect = partial(_connect, socket.AF_INET, (_LOOPBACK, encrypted.port))
        # They answer from here on. `serve` is not called: it would take Ctrl-C and SIGTERM away from the process.
        self._gate = Gate(bind_host, secret, connect)
        self.address = Address(host_identity(), unix_path, advertise_host or bind_host, self._gate.port)

    def answer(self, name: str, body: bytes) -> bytes:
        """The encoded reply to an encoded request, or the news that the process is still at it."""
        try:
            if name.startswith(AWAIT):
                return self._await(name.removeprefix(AWAIT))
            declared, method = self._declared(name)
            envelope = request_decoder(declared).decode(body)
            if envelope.call_id not in self.tickets:
                self._check_sender(name, declared, envelope)
            work = partial(self._reply, name, method, envelope.request)
            if not envelope.call_id:
                return work()
            self.tickets.arrived(envelope.arrived)
            reply = self.tickets.carry_out(envelope.call_id, work, envelope.patience)
            return self._await(envelope.call_id) if reply is None else reply
        except Exception as error:  # noqa: BLE001 - every error is a reply
            return self._failed(name, error)

    def _declared(self, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if name not in self._calls:
            raise StrandlineError(f"unknown call {name!r}")
        return self._calls[name]

    def _check_sender(self, name: str, declared: Callable[..., Any], envelope: Envelope[Any]) -> None:
        if envelope.run_id != self._run_id:
            raise StaleAttemptError(f"{name}: the caller belongs to run {envelope.run_id}, not to {self._run_id}")
        if terms_of(declared).fenced and envelope.generation < (current := self._generation()):
            raise StaleAttemptError(
                f"{name}: the caller is of generation {envelope.generation}, but generation {current} has begun"
            )

    def _await(self, call_id: str) -> bytes:
        try:
            reply = self.tickets.reply(call_id, STILL_AT_IT)
        except KeyError:
            raise SlotLostError("the reply to a call was asked for too late") from None
        if reply == b"":
            raise SlotLostError("the call ended without a reply")
        return _STILL_AT_IT if reply is None else reply

    def _reply(self, name: str, method: Callable[..., Any], request: Any) -> bytes:
        try:
            return msgspec.msgpack.encode(Reply(method(request)))
        except BaseException as error:  # noqa: BLE001 - every error is a reply, also one that would end this thread
            return self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> bytes:
        if not isinstance(error, StrandlineError):
            log.error("call %s failed", name, exc_info=error)
        return msgspec.msgpack.encode(Reply(failure=Failure.of(error)))

    def exchange(self, context: Any, command: bytes, reader: Any, writer: Any) -> None:
        """Serves one exchange of rows."""
        if self._exchange is None:
            raise StrandlineError("no data is exchanged with this process")
        self._exchange(context, command, reader, writer)

    def close(self) -> None:
        """Answer no more calls. A caller that is frozen holds this up for at most `CLOSE_PATIENCE` seconds."""
        self._gate.close()
        closing = [threading.Thread(target=server.shutdown, daemon=True) for server in self._servers]
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + CLOSE_PATIENCE
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        Path(self.address.unix_path).unlink(missing_ok=True)
