"""How many bytes of how many files were read so far, also of those that are not read to their ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Reading:
    """Counts in several threads. `total` is what will be read in all."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._done = 0
        self._blocks: dict[int, int] = {}
        """How many bytes of each file were read block by block."""
        self._parts: dict[int, Callable[[], int]] = {}
        """What tells how far each file is that is being read."""
        self._most = 0

    def so_far(self) -> tuple[int, int]:
        """The bytes that were read, and those that will have been read at the end. The first never gets smaller."""
        with self._lock:
            now = self._done + sum(self._blocks.values()) + sum(part() for part in self._parts.values())
            self._most = max(self._most, min(now, self.total))
            return self._most, self.total

    def begin(self, file: int, part: Callable[[], int]) -> None:
        """A file is being read; `part` tells how far it is."""
        with self._lock:
            self._parts[file] = part

    def read(self, file: int, count: int) -> None:
        """So many more bytes of the file were read."""
        with self._lock:
            self._blocks[file] = self._blocks.get(file, 0) + count

    def end(self, file: int, size: int) -> None:
        """The file of so many bytes was read, or cannot be."""
        with self._lock:
            self._parts.pop(file, None)
            self._blocks.pop(file, None)
            self._done += size


def bytes_in(folder: Path) -> int:
    """The bytes of the files in a folder, also of temporary ones; 0 if there is no folder."""
    size = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                size += path.stat().st_size
    return size
