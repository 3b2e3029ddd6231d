"""Typed calls between processes: what a call declares, and the one place that carries calls out.

The calls that a process answers are the methods of an abstract class, such as `SlotCalls`. Each method takes one
request and returns one response. Its mark `@call` declares the deadline, and whether callers of an older generation
are refused. The process implements the class. Its client is a subclass, too: there, each method hands the declared
method and the request to `Client.carry_out`.

A call whose deadline is at most `QUICK` is one message and one reply, and is made again when its connection breaks: it
may be carried out twice. A longer call is a ticket. Its caller names it, and the other process carries it out once. A
caller that has no reply after `STILL_AT_IT` seconds asks again, and then learns as often that the other process is
still at it. So no reply is waited for longer than a few seconds, and a process that is silent is noticed, however long
the work takes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, Generic, TypeVar, cast, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from strandline.decoding import msgpack_decoder
from strandline.errors import SlotLostError
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.failures import Failure, translate
from strandline.runtime.protocol.gate import connect_options
from strandline.runtime.protocol.tls import Tls

Request = TypeVar("Request")
Response = TypeVar("Response")
Method = TypeVar("Method", bound=Callable[..., Any])

SECRET_HEADER: Final = "x-strandline-secret"
QUICK: Final = 5.0
"""The deadline of a call that only reads or notes something, in seconds. A longer call is a ticket."""
LONG: Final = 6 * 3600.0
"""The deadline of a call whose work depends on the size of the state, on user code or on storage, in seconds."""
FORWARDING: Final = 2.0
"""What a task manager gets on top of a slot's deadline when it forwards a call, in seconds."""
STILL_AT_IT: Final = 1.0
"""Seconds that a caller gives a ticket before it asks again, and after which a server says that it is still at it."""
ANSWER: Final = 3.0
"""Seconds for which the caller of a ticket waits for a reply when it has asked again."""
PATIENCE: Final = 8.0
"""Seconds of silence after which a process counts as lost, unless the caller says otherwise."""
TRIES: Final = 3
"""How often in a row the connection of a call may fail before the other process counts as lost."""
PAUSE: Final = 0.05
"""Seconds between two tries."""
AWAIT: Final = "await:"
"""The name of the message that asks for the reply to a ticket begins with this, and ends with the call's id."""
_MOST_ARRIVED: Final = 1000
"""How many tickets are named as arrived in one message. Other replies are kept for the caller's patience."""
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
    call_id: str = ""
    """Names the call if it is a ticket."""
    patience: float = 0.0
    """For how many seconds the caller of a ticket may ask again."""
    arrived: tuple[str, ...] = ()
    """Names earlier tickets of this caller whose replies have arrived, so that the other process can forget them."""


class Reply(msgspec.Struct, Generic[Response], frozen=True, array_like=True):
    """A response, or the failure of the call. A failure in Flight's own form could not hold a long text."""

    response: Response | None = None
    failure: Failure | None = None
    pending: bool = False
    """Whether the process is still at it: the caller asks again."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a call declares."""

    deadline: Callable[[Any], float]
    """Seconds after which the caller gives up, for a request. If it is at most `QUICK`, the call may arrive twice."""
    fenced: bool
    """Whether a caller of an older generation than the callee's is refused."""


_TERMS: Final = "__strandline_call__"


def call(*, deadline: float | Callable[[Any], float], fenced: bool = True) -> Callable[[Method], Method]:
    """Marks a method of a calls class as a call between processes."""
    terms = Terms(deadline if callable(deadline) else lambda _request: deadline, fenced)

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
    return msgpack_decoder(Envelope[request])  # type: ignore[valid-type]  # known only at run time


@cache
def _reply_decoder(method: Callable[..., Any]) -> msgspec.msgpack.Decoder[Reply[Any]]:
    response = get_type_hints(method)["return"]
    return msgpack_decoder(Reply[response])  # type: ignore[valid-type]  # known only at run time


def _connect(address: Address, secret: str, tls: Tls | None) -> Any:
    """A Flight connection. A test may wrap it: the environment variable `CONNECTION_HOOK` names `module:function`."""
    location = address.location(tls=tls is not None)
    if location.startswith("grpc+unix:"):
        client = flight.connect(location, generic_options=_KEEP_ALIVE)
    else:
        encryption = tls.client_options() if tls is not None else {}
        client = flight.connect(location, generic_options=[*_KEEP_ALIVE, *connect_options(secret)], **encryption)
    module, _, function = os.environ.get(CONNECTION_HOOK, "").partition(":")
    return getattr(import_module(module), function)(client) if module else client


class _ReplyState(msgspec.Struct, frozen=True, array_like=True):
    """A reply of which only one thing matters."""

    response: msgspec.Raw
    failure: msgspec.Raw
    pending: bool


_PENDING: Final = msgspec.msgpack.Decoder(_ReplyState)


class Client:
    """Calls one process, on behalf of a run and of its current generation. Safe to use from several threads."""

    def __init__(
        self,
        address: Address,
        secret: str,
        run_id: str,
        generation: Callable[[], int],
        *,
        patience: float = PATIENCE,
        tls: Tls | None = None,
    ) -> None:
        """If the process is silent for `patience` seconds during a ticket, it counts as lost."""
        self.address = address
        self._run_id = run_id
        self._generation = generation
        self._patience = patience
        self._abandoned = 0
        """How often calls were abandoned."""
        self._arrived: deque[str] = deque(maxlen=_MOST_ARRIVED)
        """The tickets whose replies have arrived. The next ticket tells the other process."""
        self._headers = [(SECRET_HEADER.encode(), secret.encode())]
        self._client = _connect(address, secret, tls)

    def carry_out(self, method: Callable[[Any, Request], Response], request: Request) -> Response:
        """The response of the other process to a declared call.

        Raises the error that the call raised there. Raises `SlotLostError` when the process is silent, when the
        deadline is over, and after `abandon`.
        """
        deadline = terms_of(method).deadline(request)
        begun = self._abandoned
        if deadline <= QUICK:
            action = flight.Action(method.__name__, self._envelope(request, ""))
            result = self._ask(method, action, deadline, 0.0, begun)
        else:
            result = self._await(method, request, time.monotonic() + deadline, begun)
        reply = _reply_decoder(method).decode(result)
        if reply.failure is not None:
            raise reply.failure.error()
        return cast("Response", reply.response)

    def _envelope(self, request: Any, call_id: str) -> bytes:
        if not call_id:
            return msgspec.msgpack.encode(Envelope(self._run_id, self._generation(), request))
        arrived = []
        with suppress(IndexError):
            while True:
                arrived.append(self._arrived.popleft())
        return msgspec.msgpack.encode(
            Envelope(self._run_id, self._generation(), request, call_id, self._patience, tuple(arrived))
        )

    def _await(self, method: Callable[..., Any], request: Any, deadline: float, begun: int) -> bytes:
        """The encoded reply to a ticket."""
        call_id = uuid.uuid4().hex
        action = flight.Action(method.__name__, self._envelope(request, call_id))
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SlotLostError(f"{self._called(method)}: not done before the deadline of the call")
            first = STILL_AT_IT if action.type == method.__name__ else 0.0
            result = self._ask(method, action, min(ANSWER, left), min(self._patience, left), begun, first)
            if not _PENDING.decode(result).pending:
                self._arrived.append(call_id)
                return result
            action = flight.Action(f"{AWAIT}{call_id}", b"")  # the request is known there

    def _ask(
        self, method: Callable[..., Any], action: Any, timeout: float, patience: float, begun: int, first: float = 0.0
    ) -> bytes:
        """The encoded reply to one message, which is sent again for as long as the other process may be silent.

        If `first` is set, the reply to the first message comes only when the work is done. So the message is sent again
        after so many seconds, and only then the patience begins.
        """
        options = flight.FlightCallOptions(timeout=min(first or timeout, timeout), headers=self._headers)
        began = time.monotonic()
        broken = 0
        while True:
            if self._abandoned != begun:
                raise SlotLostError(
                    f"{self._called(method)}: the call was given up, because the run ends or the process counts as lost"
                )
            try:
                (result,) = self._client.do_action(action, options)
                return cast("bytes", result.body.to_pybytes())
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                cut = isinstance(error, flight.FlightUnavailableError)
                broken = broken + 1 if cut else 0
                late = isinstance(error, flight.FlightTimedOutError)
                if late and first:
                    options = flight.FlightCallOptions(timeout=timeout, headers=self._headers)
                    first, began = 0.0, time.monotonic()
                    continue
                silent = late and time.monotonic() - began < patience
                if not silent and not (cut and broken < TRIES):
                    raise translate(error, self._called(method)) from error
            time.sleep(PAUSE)

    def _called(self, method: Callable[..., Any]) -> str:
        return f"{method.__name__} at {self.address.host}:{self.address.port}"

    def abandon(self) -> None:
        """Let every call that is under way raise `SlotLostError`, once the reply that it waits for is there or late.

        That takes at most `ANSWER` seconds. Calls that begin later are not affected.
        """
        self._abandoned += 1

    def exchange(self, command: bytes) -> tuple[Any, Any]:
        """A writer and a reader for one exchange of rows."""
        options = flight.FlightCallOptions(headers=self._headers)
        pair: tuple[Any, Any] = self._client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        return pair

    def close(self) -> None:
        self._client.close()
