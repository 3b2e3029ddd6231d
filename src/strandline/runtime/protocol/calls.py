"""Typed calls between processes: what a call declares, and the one place that carries calls out.

The calls that a process answers are the methods of an abstract class, such as `SlotCalls`. Each method takes one
request and returns one response. Its mark `@call` declares the deadline, whether the call may be repeated, and whether
callers of an older generation are refused. The process implements the class. Its client is a subclass, too: there, each
method hands the declared method and the request to `Client.carry_out`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, Generic, TypeVar, cast, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.failures import Failure, translate

Request = TypeVar("Request")
Response = TypeVar("Response")
Method = TypeVar("Method", bound=Callable[..., Any])

SECRET_HEADER: Final = "x-strandline-secret"
QUICK: Final = 5.0
"""The deadline of a call that only reads or notes something, in seconds."""
LONG: Final = 6 * 3600.0
"""The deadline of a call whose work depends on the size of the state, on user code or on storage, in seconds."""
FORWARDING: Final = 2.0
"""What a task manager gets on top of a slot's deadline when it forwards a call, in seconds."""
TRIES: Final = 2
"""How often a call that may be repeated is tried."""
PAUSE: Final = 0.05
"""Seconds between two tries."""
CONNECTION_HOOK: Final = "STRANDLINE_CONNECTION_HOOK"
_KEEP_ALIVE: Final = [("grpc.keepalive_time_ms", 330_000), ("grpc.keepalive_timeout_ms", 20_000)]
"""A peer whose host vanished without closing the connection is noticed by these pings while a call waits.

gRPC servers disconnect clients that ping more often than every five minutes during a silent call, and Flight offers no
option to change that."""


class Nothing(msgspec.Struct, frozen=True, array_like=True):
    """The request of a call that needs none."""


NOTHING: Final = Nothing()


class Envelope(msgspec.Struct, Generic[Request], frozen=True, array_like=True):
    """A request with its sender: every control call names the caller's run and generation."""

    run_id: str
    generation: int
    request: Request


class Reply(msgspec.Struct, Generic[Response], frozen=True, array_like=True):
    """A response, or the failure of the call. A failure in Flight's own form could not hold a long text."""

    response: Response | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a call declares."""

    deadline: Callable[[Any], float]
    """Seconds after which the caller gives up, for a request."""
    repeatable: bool
    """Whether the caller may try again when the connection fails. If the call arrives twice, its effect is the same."""
    fenced: bool
    """Whether a caller of an older generation than the callee's is refused."""


_TERMS: Final = "__strandline_call__"


def call(
    *, deadline: float | Callable[[Any], float], repeatable: bool, fenced: bool = True
) -> Callable[[Method], Method]:
    """Marks a method of a calls class as a call between processes."""
    terms = Terms(deadline if callable(deadline) else lambda _request: deadline, repeatable, fenced)

    def mark(method: Method) -> Method:
        setattr(method, _TERMS, terms)
        return method

    return mark


def terms_of(method: Callable[..., Any]) -> Terms:
    """What a declared call declares."""
    terms: Terms = getattr(method, _TERMS)
    return terms


def declared_calls(interface: type) -> dict[str, Callable[..., Any]]:
    """The calls of a calls class, by name."""
    return {name: method for name, method in vars(interface).items() if hasattr(method, _TERMS)}


@cache
def request_decoder(method: Callable[..., Any]) -> msgspec.msgpack.Decoder[Envelope[Any]]:
    """Decodes the envelope of a declared call."""
    hints = get_type_hints(method)
    (request,) = (kind for name, kind in hints.items() if name != "return")
    return msgspec.msgpack.Decoder(Envelope[request])  # type: ignore[valid-type]  # known only at run time


@cache
def _reply_decoder(method: Callable[..., Any]) -> msgspec.msgpack.Decoder[Reply[Any]]:
    response = get_type_hints(method)["return"]
    return msgspec.msgpack.Decoder(Reply[response])  # type: ignore[valid-type]  # known only at run time


def _connect(address: Address) -> Any:
    """A Flight connection. A test may wrap it: the environment variable `CONNECTION_HOOK` names `module:function`."""
    client = flight.connect(address.location(), disable_server_verification=True, generic_options=_KEEP_ALIVE)
    module, _, function = os.environ.get(CONNECTION_HOOK, "").partition(":")
    return getattr(import_module(module), function)(client) if module else client


class Client:
    """Calls one process, on behalf of a run and of its current generation. Safe to use from several threads."""

    def __init__(self, address: Address, secret: str, run_id: str, generation: Callable[[], int]) -> None:
        self.address = address
        self._run_id = run_id
        self._generation = generation
        self._headers = [(SECRET_HEADER.encode(), secret.encode())]
        self._client = _connect(address)

    def carry_out(self, method: Callable[[Any, Request], Response], request: Request) -> Response:
        """The response of the other process to a declared call.

        Raises the error that the call raised there, or `SlotLostError` when nobody answers before the deadline.
        """
        terms = terms_of(method)
        body = msgspec.msgpack.encode(Envelope(self._run_id, self._generation(), request))
        action = flight.Action(method.__name__, body)
        options = flight.FlightCallOptions(timeout=terms.deadline(request), headers=self._headers)
        tries = TRIES if terms.repeatable else 1
        while True:
            tries -= 1
            try:
                (result,) = self._client.do_action(action, options)
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                broken = isinstance(error, flight.FlightUnavailableError)
                if broken and tries > 0:
                    time.sleep(PAUSE)
                    continue
                raise translate(error, f"{method.__name__} at {self.address.host}:{self.address.port}") from error
            reply = _reply_decoder(method).decode(result.body.to_pybytes())
            if reply.failure is not None:
                raise reply.failure.error()
            return cast("Response", reply.response)

    def exchange(self, command: bytes) -> tuple[Any, Any]:
        """A writer and a reader for one exchange of rows."""
        options = flight.FlightCallOptions(headers=self._headers)
        pair: tuple[Any, Any] = self._client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        return pair

    def close(self) -> None:
        self._client.close()
