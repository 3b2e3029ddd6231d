"""Errors on their way from one process to another: a `StrandlineError` arrives as the class that was raised."""

from __future__ import annotations

import msgspec
import pyarrow.flight as flight

from strandline import errors
from strandline.decoding import msgpack_decoder
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.protocol.gate import REFUSED

_FLIGHT_BYTES = 4000
"""How much of a text Flight carries."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as a message."""

    kind: str
    """The name of its class in `strandline.errors`."""
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The message for `error`. A class of another module travels as its base in `strandline.errors`.

        An exception that is not ours arrives as `StrandlineError` and names its class.
        """
        if isinstance(error, StrandlineError):
            names = (one.__name__ for one in type(error).__mro__ if vars(errors).get(one.__name__) is one)
            return cls(next(names), _encodable(str(error)))
        return cls(StrandlineError.__name__, _encodable(f"{type(error).__name__}: {error}"))

    def error(self) -> StrandlineError:
        """The error, to be raised here. A class that this release does not know becomes `StrandlineError`."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, StrandlineError)):
            kind = StrandlineError
        return kind(self.text)


def translate(error: Exception, what: str) -> StrandlineError:
    """What a failed call means: the error that the other side raised, or `SlotLostError` if nobody answered."""
    info = getattr(error, "extra_info", None)
    if info:
        return msgpack_decoder(Failure).decode(bytes(info)).error()
    if f"response code {REFUSED}" in str(error):
        return errors.AuthenticationError(f"{what}: this call does not carry the run's secret")
    if isinstance(error, flight.FlightUnauthenticatedError):
        return errors.AuthenticationError(f"{what}: {error}")
    text = str(error).splitlines()[0][:300] if str(error) else ""
    return SlotLostError(f"{what}: no answer ({type(error).__name__}: {text})")


def flight_error(error: BaseException) -> Exception:
    """`error` in the form in which Flight carries it to the caller, with at most the first part of a long text.

    gRPC sends it as metadata, and drops the whole error if that is larger than 8 kB.
    """
    failure = Failure.of(error)
    short = Failure(failure.kind, failure.text.encode()[:_FLIGHT_BYTES].decode(errors="ignore"))
    carried: Exception = flight.FlightServerError(failure.kind, extra_info=msgspec.msgpack.encode(short))
    return carried


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
