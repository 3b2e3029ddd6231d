"""Decoders of msgspec that any thread may ask for.

msgspec notes what it knows of a struct at the struct, before that is complete. If two threads make decoders of one
struct at the same time, one of them may decode with half of it, and the process crashes. So they are made one at a
time. A module that makes a decoder while it is imported needs this only for structs of other modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Decoder = TypeVar("Decoder")

_making = threading.Lock()
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json: dict[Any, msgspec.json.Decoder[Any]] = {}


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The decoder of MessagePack for a type."""
    return _made(_msgpack, msgspec.msgpack.Decoder, kind)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of JSON for a type."""
    return _made(_json, msgspec.json.Decoder, kind)


def converted(value: object, kind: type[T]) -> T:
    """Plain values as a type. Raises `msgspec.ValidationError` if they do not fit it."""
    json_decoder(kind)  # makes what msgspec needs to know of the type
    return msgspec.convert(value, kind)


def _made(known: dict[Any, Decoder], make: Callable[[Any], Decoder], kind: Any) -> Decoder:
    with _making:
        if kind not in known:
            known[kind] = make(kind)
        return known[kind]
