"""Ranges of stored keys: the first key of a prefix or of a key group, and the first key after it."""

from __future__ import annotations

from typing import Final

KEY_GROUP_BYTES: Final = 2
"""Every stored key begins with its key group, big endian, so that a range of key groups is a range of keys."""

AFTER_ALL_KEYS: Final = b"\xff" * (KEY_GROUP_BYTES + 1)
"""Greater than every stored key, because there are at most 32768 key groups."""


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys that start with `prefix`, or None if there is no such key."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None


def first_key(key_group: int) -> bytes | None:
    """The start of the keys of `key_group`; None if `key_group` is greater than every possible group."""
    return key_group.to_bytes(KEY_GROUP_BYTES, "big") if key_group < 1 << 8 * KEY_GROUP_BYTES else None


def key_range(key_groups: range | None) -> tuple[bytes, bytes | None]:
    """The range of keys of `key_groups`: its start, and its end or None. Without `key_groups`, all keys."""
    if key_groups is None:
        return b"", None
    return first_key(key_groups.start) or AFTER_ALL_KEYS, first_key(key_groups.stop)
