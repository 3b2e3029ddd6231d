"""The heap backend: a dict of Python bytes, for state that fits in memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import ClassVar
from uuid import uuid4

from strandline.state.backends.base import Snapshot, SnapshotFile, StateBackend
from strandline.state.backends.full_snapshot import FULL_SNAPSHOT_NAME, write_full_snapshot
from strandline.state.sorted_runs import SortedRuns

_ENTRY_BYTES = 2 * sys.getsizeof(b"") + 104
"""The overhead of an entry in CPython: the headers of two bytes objects, and a dict slot."""


class HeapBackend(StateBackend):
    """Fast, but limited by memory. Its snapshots are always full. The first ordered scan builds an index."""

    name: ClassVar[str] = "heap"

    def __init__(self, compression: str = "lz4") -> None:
        self._data: dict[bytes, bytes] = {}
        self._compression = compression
        self._lock = Lock()
        self._index: SortedRuns | None = None
        self._fresh: list[bytes] = []
        self._stale = 0
        self._size = 0
        self._size_of = 0
        """How many entries there were when `_size` was counted."""
        self._changes = 0
        """Changed entries since `_size` was counted."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self._data.get, keys))

    def get(self, key: bytes) -> bytes | None:
        return self._data.get(key)

    def scan(self, start: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            data = self._data
            found = self._indexed().between(start, end)
            if self._stale:
                # Deleted keys stay in the index until it is rebuilt. Keys that were put again are in it twice.
                return iter([(key, data[key]) for key in dict.fromkeys(found) if key in data])
            return iter([(key, data[key]) for key in found])

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        with self._lock:
            data = self._data
            fresh = self._fresh if self._index is not None else []
            self._changes += len(keys)
            if None not in values:
                if self._index is not None:
                    fresh += [key for key in dict.fromkeys(keys) if key not in data]
                data.update(zip(keys, values, strict=True))  # type: ignore[arg-type]  # no None, as just checked
                return
            for key, value in zip(keys, values, strict=True):
                if value is not None:
                    if key not in data:
                        fresh.append(key)
                    data[key] = value
                elif data.pop(key, None) is not None:
                    self._stale += 1

    def snapshot(self, directory: Path, *, full: bool = False) -> Snapshot:
        with self._lock:
            frozen = self._data.copy()
        return _HeapSnapshot(frozen, directory, self._compression)

    def size_bytes(self) -> int:
        """Counted anew when a tenth of the entries has changed, so that asking often costs little."""
        with self._lock:
            entries = len(self._data)
            if self._changes * 10 >= entries or not self._size_of:
                self._size = sum(map(len, self._data)) + sum(map(len, self._data.values()))
                self._size_of, self._changes = entries, 0
            return self._size * entries // self._size_of if self._size_of else 0

    def estimated_keys(self) -> int:
        """The exact number."""
        return len(self._data)

    def memory_bytes(self) -> int:
        return self.size_bytes() + _ENTRY_BYTES * len(self._data)

    def close(self) -> None:
        with self._lock:
            self._data = {}
            self._index, self._fresh, self._stale = None, [], 0
            self._size = self._size_of = self._changes = 0

    def _indexed(self) -> SortedRuns:
        index = self._index
        if index is None or self._stale > len(self._data):
            index = self._index = SortedRuns()
            index.add(self._data)
            self._stale = 0
        elif self._fresh:
            index.add(self._fresh)
        self._fresh = []
        return index


class _HeapSnapshot(Snapshot):
    """A shallow copy of the dict. The bytes objects are shared with the backend."""

    def __init__(self, frozen: dict[bytes, bytes], directory: Path, compression: str) -> None:
        self._frozen = frozen
        self._directory = directory
        self._compression = compression
        self._files: list[SnapshotFile] | None = None

    def write(self) -> list[SnapshotFile]:
        if self._files is not None:
            return self._files
        frozen = self._frozen
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / FULL_SNAPSHOT_NAME
        size = write_full_snapshot(path, ((key, frozen[key]) for key in sorted(frozen)), self._compression)
        self._files = [SnapshotFile(path.name, path, size, identity=f"full/{uuid4().hex}", shared=False)]
        self._frozen = {}
        return self._files

    def release(self) -> None:
        self._frozen = {}
        shutil.rmtree(self._directory, ignore_errors=True)
