"""Changes bytes and trees of values at random, towards what breaks readers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

EDGES = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 32767, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LARGE = ((1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
TEXTS = (
    "",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "//x",
    "a//b/shared/c",
    "a\0b",
    "\x1b[2J",
    "a\nb",
    "\ud7ff\ue000",
    "x" * 300,
    "x" * 20_000,
    "9" * 5_000,
    "1e999",
    "NaN",
    "_metadata",
    "00000000000000000007.segment",
    "{" * 3_000,
    "[" * 3_000,
    "array<" * 2_000,
)
FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e300, float("inf"), float("-inf"), float("nan"))


def mutated_bytes(random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    """`data` with one to six changes. `others` are inputs of the same format, to take pieces from."""
    found = bytearray(data)
    for _ in range(min(6, 1 + int(random.expovariate(0.9)))):
        random.choice(_BYTE_CHANGES)(random, found, others)
    return bytes(found)


def _flip(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _number(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    size = random.choice((1, 2, 4, 4, 8, 8))
    if len(data) < size:
        return
    at = random.randrange(len(data) - size + 1)
    if random.random() < 0.6:
        at -= at % size
    value = random.choice((*EDGES, *LARGE, len(data), random.getrandbits(8 * size))) % (1 << (8 * size))
    data[at : at + size] = value.to_bytes(size, random.choice(("little", "big")))


def _near(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    """A number in the data becomes a little larger or smaller."""
    size = random.choice((4, 8))
    if len(data) < size:
        return
    at = random.randrange(len(data) - size + 1)
    form = "<q" if size == 8 else "<i"
    (value,) = struct.unpack_from(form, data, at)
    near = (value + random.choice((-8, -1, 1, 8, 64))) % (1 << (8 * size))
    data[at : at + size] = near.to_bytes(size, "little")


def _insert(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    at = random.randrange(len(data) + 1)
    count = random.choice((1, 2, 4, 8, 64, 1024))
    data[at:at] = random.randbytes(count) if random.random() < 0.5 else bytes((random.randrange(256),)) * count


def _delete(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    if data:
        at = random.randrange(len(data))
        del data[at : at + random.choice((1, 2, 4, 8, 64, len(data)))]


def _repeat(random: Random, data: bytearray, _others: tuple[bytes, ...]) -> None:
    if data:
        at = random.randrange(len(data))
        piece = data[at : at + random.choice((1, 4, 8, 64, 512))]
        data[at:at] = piece * random.choice((1, 1, 2, 100))


def _splice(random: Random, data: bytearray, others: tuple[bytes, ...]) -> None:
    other = random.choice(others)
    if data and other:
        at, there = random.randrange(len(data)), random.randrange(len(other))
        size = random.choice((4, 16, 64, 512))
        data[at : at + size] = other[there : there + size]


_BYTE_CHANGES: tuple[Callable[[Random, bytearray, tuple[bytes, ...]], None], ...] = (
    _flip,
    _flip,
    _set,
    _number,
    _number,
    _near,
    _insert,
    _delete,
    _repeat,
    _splice,
)


def mutated_tree(random: Random, tree: Any) -> Any:
    """A copy of a tree of lists, dicts and plain values, with one to four changes."""
    for _ in range(min(4, 1 + int(random.expovariate(1.2)))):
        tree = _changed(random, tree)
    return tree


def _changed(random: Random, tree: Any) -> Any:
    """Walk down at random, and change what is there."""
    if isinstance(tree, list) and tree and random.random() < 0.9:
        at = random.randrange(len(tree))
        act = random.random()
        if act < 0.05:
            return tree[:at] + tree[at + 1 :]
        if act < 0.1:
            return tree[: at + 1] + tree[at:] * random.choice((1, 1, 3))
        return [*tree[:at], _changed(random, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        key = random.choice(list(tree))
        act = random.random()
        rest = {name: value for name, value in tree.items() if name != key}
        if act < 0.05:
            return rest
        if act < 0.2:
            return {**rest, random.choice(TEXTS): tree[key]}
        return {**tree, key: _changed(random, tree[key])}
    return _value(random, tree)


def _value(random: Random, before: Any) -> Any:
    """A hostile value: mostly one of the same type."""
    if random.random() < 0.15:
        before = random.choice((None, True, 0, 0.0, "", b"", [], {}))
    if isinstance(before, bool) or before is None:
        return random.choice((None, True, False, 0, ""))
    if isinstance(before, int):
        return random.choice((*EDGES, *LARGE, before + 1, before - 1))
    if isinstance(before, float):
        return random.choice((*FLOATS, before + 1))
    if isinstance(before, str):
        if before and random.random() < 0.4:
            at = random.randrange(len(before))
            return before[:at] + random.choice(("/", "..", "\0", "é", "\n", "0", "")) + before[at + 1 :]
        return random.choice(TEXTS)
    if isinstance(before, bytes):
        return mutated_bytes(random, before, (before,)) if before else random.choice((b"", b"\xff", b"x" * 5000))
    return _nested(random, before)


def _nested(random: Random, before: Any) -> Any:
    deep: Any = before
    for _ in range(random.choice((1, 5, 400))):
        deep = [deep] if random.random() < 0.7 else {"x": deep}
    return random.choice(([], {}, deep, [before] * 50))
