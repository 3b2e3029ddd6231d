"""Checksums of files, in the form that checkpoint metadata stores."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path


def checksum(path: Path, note: Callable[[int], None] = lambda _count: None) -> str:
    """The checksum of a local file. `note` gets the number of bytes of each block that was read."""
    value = 0
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            value = zlib.crc32(block, value)
            note(len(block))
    return checksum_text(value)


def checksum_text(crc32: int) -> str:
    """A CRC-32 in the form that checkpoint metadata stores."""
    return f"crc32:{crc32:08x}"
