"""Rows of one batch that a slot keeps, in memory as long as they fit and on local disk beyond that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from strandline.state.disk_full import disk_full_error


class MemoryLimit:
    """Bytes that several collections of rows may hold in memory together. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether `size` more bytes may be held; if so, they count from now on."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        """These bytes are not held any more."""
        with self._lock:
            self._left += size


class KeptRows:
    """Record batches of one schema, which can be read any number of times until they are discarded."""

    def __init__(self, schema: pa.Schema, memory: MemoryLimit, path: Path) -> None:
        """What `memory` does not allow goes to a file at `path`."""
        self.schema = schema
        self.rows = 0
        self.size = 0
        """In bytes."""
        self._memory = memory
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._path = path
        self._spill: Any = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Raises `StorageFullError` if the rows do not fit into memory, nor on the disk."""
        self.rows += batch.num_rows
        self.size += batch.nbytes
        if self._spill is None and self._memory.take(batch.nbytes):
            self._held.append(batch)
            self._held_bytes += batch.nbytes
            return
        with disk_full_error(self._path.parent):
            if self._spill is None:
                self._path.parent.mkdir(exist_ok=True)
                self._spill = pa.ipc.new_stream(str(self._path), self.schema)
            self._spill.write_batch(batch)

    def seal(self) -> None:
        """Close the file: no more batches are appended."""
        if self._spill is not None:
            with disk_full_error(self._path.parent):
                self._spill.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All batches, in the order in which they were appended. May be called any number of times."""
        yield from self._held
        if self._spill is not None:
            with pa.memory_map(str(self._path)) as source:
                yield from pa.ipc.open_stream(source)

    def discard(self) -> None:
        """Let go of memory and file, also if the disk is full. May be repeated."""
        if self._spill is not None:
            with suppress(OSError):  # the last bytes of a file that is about to be deleted
                self._spill.close()
        self._held = []
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0
        self._path.unlink(missing_ok=True)
