"""Splits streams of entries into chunks that are fast to process and small enough for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

CHUNK_ENTRIES: Final = 16_384
CHUNK_BYTES: Final = 32 << 20

T = TypeVar("T")
V = TypeVar("V", bytes, bytes | None)


def grouped(things: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive things in groups of at most `limit` in total size. A thing larger than `limit` is alone."""
    group: list[T] = []
    total = 0
    for thing in things:
        one = size(thing)
        if group and total + one > limit:
            yield group
            group, total = [], 0
        group.append(thing)
        total += one
    if group:
        yield group


def chunked(entries: Iterable[tuple[bytes, V]]) -> Iterator[tuple[list[bytes], list[V]]]:
    """Split a stream of entries into chunks. A chunk ends with the entry that reaches a limit."""
    keys: list[bytes] = []
    values: list[V] = []
    size = 0
    for key, value in entries:
        keys.append(key)
        values.append(value)
        size += len(key) + (len(value) if value else 0)
        if len(keys) >= CHUNK_ENTRIES or size >= CHUNK_BYTES:
            yield keys, values
            keys, values, size = [], [], 0
    if keys:
        yield keys, values


def halved(keys: list[bytes], values: list[V]) -> Iterator[tuple[list[bytes], list[V]]]:
    """Split a chunk with large values in halves until every part is small enough or has one entry."""
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    if size <= CHUNK_BYTES or len(keys) == 1:
        yield keys, values
    else:
        middle = len(keys) // 2
        yield from halved(keys[:middle], values[:middle])
        yield from halved(keys[middle:], values[middle:])
