"""Scans of RocksDB that notice damage.

The iterators of rocksdict (0.3.29) that are fast, `Rdict.items()`, end silently at a damaged block, as if there were no
more entries. `Rdict.iter()` is slower and tells. So short scans use `iter()`, and a long scan uses `items()` and then
looks with `iter()` whether the place at which it ended is really the end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, cast

from rocksdict import Rdict, RdictIter, ReadOptions

from strandline.errors import DamagedFileError
from strandline.state.backends.rocksdb_setup import bounded

SHORT_SCAN: Final = 32
_CHUNK: Final = 1024

_Entry = tuple[bytes, bytes]


def scan_head(db: Rdict, start: bytes, bounds: ReadOptions, directory: Path) -> list[_Entry]:
    """The first `SHORT_SCAN` entries from `start` on. Fewer are all that there are. Raises `DamagedFileError`."""
    head: list[_Entry] = []
    entries = db.iter(bounds)
    entries.seek(start)
    valid, key, value, following = entries.valid, entries.key, entries.value, entries.next
    while valid():
        head.append((cast(bytes, key()), cast(bytes, value())))
        if len(head) == SHORT_SCAN:
            return head
        following()
    _check_status(entries, directory)
    return head


def long_scan(db: Rdict, head: list[_Entry], bounds: ReadOptions, directory: Path) -> Generator[_Entry]:
    """The entries of `head` and all that follow within `bounds`. Raises `DamagedFileError`.

    `bounds` must live as long as the scan, because iterators point into it.
    """
    yield from head
    last = head[-1][0]
    items = cast(Iterator[_Entry], db.items(from_key=last + b"\0", read_opt=bounds))
    while chunk := list(islice(items, _CHUNK)):
        last = chunk[-1][0]
        yield from chunk
    _check_end(db, last, bounds, directory)


def whole_scan(db: Rdict, directory: Path) -> Iterator[_Entry]:
    """All entries of a database. Raises `DamagedFileError`."""
    bounds = bounded(None)
    head = scan_head(db, b"", bounds, directory)
    return long_scan(db, head, bounds, directory) if head else iter(())


def _check_end(db: Rdict, last: bytes, bounds: ReadOptions, directory: Path) -> None:
    entries = db.iter(bounds)
    entries.seek(last)
    if entries.valid():
        entries.next()
    _check_status(entries, directory)


def _check_status(entries: RdictIter, directory: Path) -> None:
    try:
        entries.status()
    except Exception as error:
        raise_if_damaged(error, directory)
        raise


def raise_if_damaged(error: Exception, directory: Path) -> None:
    """Raise `DamagedFileError` if `error` is RocksDB's error about damaged files."""
    if str(error).startswith("Corruption"):
        raise DamagedFileError(
            f"the state in {directory} is damaged: {error}. Look for errors of the disk; start the job again, so that "
            "the state is restored from a checkpoint."
        ) from error
