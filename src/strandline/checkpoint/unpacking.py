"""Decompresses bytes that may be crafted: never more of them than were announced, and few from a small file."""

from __future__ import annotations

from backports import zstd

MAX_RATIO = 256
"""Content has at most so many times the bytes of its stored form, so that a crafted small file takes little memory."""


def unpacked(packed: bytes | memoryview, size: int) -> bytes:
    """The content of `packed`; it has another length than `size` if `size` is wrong. Raises `zstd.ZstdError`."""
    # One byte more than announced, so that a longer content is noticed without decompressing all of it.
    return zstd.ZstdDecompressor().decompress(packed, size + 1)
