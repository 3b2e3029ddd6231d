"""Calls between the processes of a run: Arrow Flight, with the run's secret on every call.

Control messages are actions: a name, a msgpack body, a msgpack answer. A `StrandlineError` raised on one side arrives
as the same class on the other. Data goes through exchanges, which the relay and the slot implement.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from strandline import errors
from strandline.errors import SlotLostError, StrandlineError

log = logging.getLogger(__name__)

_HEADER = "x-strandline-secret"
TCP_ONLY = "STRANDLINE_TCP_ONLY"
"""If this variable is set, Unix sockets are not used even between processes of one host."""

Handler = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process listens: a Unix socket for callers on its host, TCP for all others."""

    host_id: str
    unix_path: str
    host: str
    port: int

    def location(self) -> str:
        """The cheapest way to reach it from here."""
        if TCP_ONLY not in os.environ and self.host_id == host_identity() and os.path.exists(self.unix_path):
            return f"grpc+unix://{self.unix_path}"
        return f"grpc://{self.host}:{self.port}"

    def pack(self) -> list[Any]:
        return [self.host_id, self.unix_path, self.host, self.port]

    @classmethod
    def unpack(cls, data: list[Any]) -> Address:
        return cls(*data)


def host_identity() -> str:
    """The same for two processes exactly when they share a host (and so its Unix sockets and local files)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}:{boot}"


def encode_error(error: BaseException) -> bytes:
    known = isinstance(error, StrandlineError)
    name = type(error).__name__ if known else "StrandlineError"
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return msgspec.msgpack.encode([name, text])


def decode_error(data: bytes) -> StrandlineError:
    name, text = msgspec.msgpack.decode(data)
    kind = getattr(errors, name, StrandlineError)
    error = kind(text)
    assert isinstance(error, StrandlineError)
    return error


def _refusal(text: str) -> Exception:
    """An answer that arrives as `StrandlineError`: the process lives, so it is no lost slot."""
    refusal: Exception = flight.FlightServerError(text, extra_info=encode_error(StrandlineError(text)))
    return refusal


class _CheckSecret(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no stubs
    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = headers.get(_HEADER, [""])[0]
        if not hmac.compare_digest(str(given), self._secret):
            raise flight.FlightUnauthenticatedError("this call does not carry the run's secret")


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no stubs
    def __init__(self, location: str, server: Server) -> None:
        super().__init__(location, middleware={"secret": _CheckSecret(server.secret)})
        self._server = server

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        handler = self._server.actions.get(action.type)
        if handler is None:
            raise _refusal(f"unknown action {action.type!r}")
        try:
            return [msgspec.msgpack.encode(handler(msgspec.msgpack.decode(action.body.to_pybytes())))]
        except Exception as error:
            if not isinstance(error, StrandlineError):
                log.exception("action %s failed", action.type)
            raise flight.FlightServerError(str(error), extra_info=encode_error(error)) from error

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        if self._server.exchange is None:
            raise _refusal("no data is exchanged with this process")
        try:
            self._server.exchange(context, descriptor.command, reader, writer)
        except flight.FlightError:
            raise
        except Exception as error:
            if not isinstance(error, StrandlineError):
                log.exception("exchange failed")
            raise flight.FlightServerError(str(error), extra_info=encode_error(error)) from error


class Server:
    """Serves actions, and exchanges if `exchange` is given, on TCP and on a Unix socket."""

    def __init__(
        self,
        secret: str,
        actions: dict[str, Handler],
        *,
        bind_host: str,
        unix_path: str,
        advertise_host: str | None = None,
        exchange: Callable[[Any, bytes, Any, Any], None] | None = None,
    ) -> None:
        self.secret = secret
        self.actions = actions
        self.exchange = exchange
        Path(unix_path).parent.mkdir(parents=True, exist_ok=True)
        Path(unix_path).unlink(missing_ok=True)
        self._tcp = _FlightServer(f"grpc://{bind_host}:0", self)
        self._unix = _FlightServer(f"grpc+unix://{unix_path}", self)
        # They answer from here on. `serve` is not called: it would take Ctrl-C and SIGTERM away from the process.
        self.address = Address(host_identity(), unix_path, advertise_host or bind_host, self._tcp.port)

    def close(self) -> None:
        for server in (self._tcp, self._unix):
            server.shutdown()
        Path(self.address.unix_path).unlink(missing_ok=True)


class Client:
    """Calls one process. Safe to use from several threads."""

    def __init__(self, address: Address, secret: str) -> None:
        self.address = address
        self._headers = [(_HEADER.encode(), secret.encode())]
        self._client = flight.connect(address.location(), disable_server_verification=True)

    def options(self, timeout: float | None = None) -> Any:
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def call(self, action: str, body: Any = None, timeout: float | None = None) -> Any:
        """The answer of `action`; the error it raised there; `SlotLostError` when nobody answers."""
        try:
            request = flight.Action(action, msgspec.msgpack.encode(body))
            results = list(self._client.do_action(request, self.options(timeout)))
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise translate(error, f"{action} at {self.address.host}:{self.address.port}") from error
        return msgspec.msgpack.decode(results[0].body.to_pybytes())

    def exchange(self, command: bytes) -> tuple[Any, Any]:
        """A writer and a reader for one exchange."""
        pair: tuple[Any, Any] = self._client.do_exchange(flight.FlightDescriptor.for_command(command), self.options())
        return pair

    def close(self) -> None:
        self._client.close()


def translate(error: Exception, what: str) -> StrandlineError:
    """The error that the other side raised, or that it could not be reached."""
    info = getattr(error, "extra_info", None)
    if info:
        return decode_error(bytes(info))
    if isinstance(error, flight.FlightUnauthenticatedError):
        return errors.AuthenticationError(f"{what}: {error}")
    return SlotLostError(
        f"{what}: no answer ({type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''})"
    )


ANY = ("0.0.0.0", "::")
"""Addresses to listen on that mean every network of the host, and that nobody can call."""


def default_bind_host(master: str, configured: str | None) -> str:
    """What the processes of a run listen on: loopback alone when Spark runs in one process, else every network."""
    if configured:
        return configured
    return "127.0.0.1" if master == "local" or master.startswith("local[") else ANY[0]


def own_host(bind_host: str, peer: str) -> str:
    """What others call this host by, if it listens on `bind_host` and `peer` is one of them."""
    if bind_host not in ANY:
        return bind_host
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: only asks which of the host's addresses would be used
        return str(probe.getsockname()[0])
