"""Errors on their way from one process to another: a `StrandlineError` arrives as the class that was raised."""

from __future__ import annotations

import msgspec
import pyarrow.flight as flight

from strandline import errors
from strandline.errors import SlotLostError, StrandlineError


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as a message."""

    kind: str
    """The name of its class in `strandline.errors`."""
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The message for `error`. An exception that is not ours arrives as `StrandlineError` and names its class."""
        if isinstance(error, StrandlineError):
            return cls(type(error).__name__, str(error))
        return cls(StrandlineError.__name__, f"{type(error).__name__}: {error}")

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
        return msgspec.msgpack.decode(bytes(info), type=Failure).error()
    if isinstance(error, flight.FlightUnauthenticatedError):
        return errors.AuthenticationError(f"{what}: {error}")
    text = str(error).splitlines()[0][:300] if str(error) else ""
    return SlotLostError(f"{what}: no answer ({type(error).__name__}: {text})")


def flight_error(error: BaseException) -> Exception:
    """`error` in the form in which Flight carries it to the caller."""
    carried: Exception = flight.FlightServerError(str(error), extra_info=msgspec.msgpack.encode(Failure.of(error)))
    return carried
