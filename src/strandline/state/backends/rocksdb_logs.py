"""Checks the frame of RocksDB's log files (MANIFEST and write-ahead log) before RocksDB reads them.

RocksDB (as in rocksdict 0.3.29) reads a record of an unknown type again and again without end, and holds Python's
global lock meanwhile. It checks the checksums and the content of records itself.

A log file consists of blocks of 32 kB. A record has a header (checksum, length, type) and stays within its block; a
longer record is split. Less than a header at the end of a block is filled with zeros.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_BLOCK: Final = 32 << 10
_HEADER: Final = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def is_log_file(name: str) -> bool:
    """Whether a file of a database with this name is a log file."""
    return name.startswith("MANIFEST-") or name.endswith(".log")


def log_problem(path: Path) -> str | None:
    """What is wrong with the frame of a log file; None if RocksDB can read it."""
    data = path.read_bytes()
    at, open_record = 0, False
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            if any(data[at : at + left]):
                return f"the end of a block is not empty at byte {at}"
            at += left
            continue
        if len(data) - at < _HEADER.size:
            return "it ends within a record"
        _checksum, length, kind = _HEADER.unpack_from(data, at)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return f"the record at byte {at} has the unknown type {kind}"
        if (kind in (_MIDDLE, _LAST)) != open_record:
            return f"a part of a record is missing before byte {at}"
        if _HEADER.size + length > min(left, len(data) - at):
            return f"the record at byte {at} is cut off"
        open_record = kind in (_FIRST, _MIDDLE)
        at += _HEADER.size + length
    return "it ends within a record" if open_record else None
