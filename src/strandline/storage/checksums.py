"""Checksums of files, as checkpoint metadata holds them."""

from __future__ import annotations

import zlib
from pathlib import Path


def checksum(path: Path) -> str:
    """The checksum of a local file."""
    value = 0
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            value = zlib.crc32(block, value)
    return checksum_text(value)


def checksum_text(crc32: int) -> str:
    """A checksum as checkpoint metadata holds it."""
    return f"crc32:{crc32:08x}"
