"""The state backend: an ordered store of bytes for one operator's subtask, which moves only by whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from strandline.state.chunks import chunked


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One local file of a snapshot, ready to be uploaded."""

    name: str
    """The name the file must have again when the snapshot is restored (`000015.sst`, `MANIFEST-000004`)."""
    path: Path
    size: int
    identity: str
    """Names the bytes: two files with one identity are equal wherever they are. Never a file name alone."""
    shared: bool
    """Immutable, and likely to be part of later snapshots too (an SST of an incremental snapshot)."""


class Snapshot(ABC):
    """A frozen view of a backend at a barrier. Taking it was the synchronous part; `write` is the rest."""

    @abstractmethod
    def write(self) -> list[SnapshotFile]:
        """Put whatever is not on disk yet into files; called from another thread, beside the next batch."""

    @abstractmethod
    def release(self) -> None:
        """Forget the snapshot and delete its local files. May be called more than once."""


class StateBackend(ABC):
    """Sorted bytes to bytes. Reads may come from several threads; `apply` and `snapshot` never overlap.

    Keys start with the key group (two bytes, big endian), so that a range of key groups is a range of keys.
    """

    name: ClassVar[str]

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, None where there is none. Fastest when `keys` are in ascending order."""

    def get(self, key: bytes) -> bytes | None:
        """The value of one key, or None."""
        return self.get_many([key])[0]

    @abstractmethod
    def scan(self, start: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < end, in ascending order."""

    @abstractmethod
    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Put every pair; None deletes. A segment may come in several calls."""

    def delete_between(self, start: bytes, end: bytes) -> None:
        """Delete all entries with start <= key < end."""
        for keys, _ in chunked(self.scan(start, end)):
            self.apply(keys, [None] * len(keys))

    @abstractmethod
    def snapshot(self, directory: Path, *, full: bool = False) -> Snapshot:
        """Freeze the present contents; `directory` (absent so far) is for the snapshot's files.

        A `full` snapshot can be restored by every backend, whatever the backend's usual ones are like.
        """

    def load(self, chunks: Iterable[tuple[list[bytes], list[bytes]]], scratch: Path) -> None:
        """Add many entries, which come in ascending order of keys; `scratch` is a folder for a moment's use."""
        for keys, values in chunks:
            self.apply(keys, values)

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do
        """Get rid of what was deleted, if that is much: snapshots that follow are smaller, and scans faster.

        May take a while; everything else may go on meanwhile.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """Roughly what the live state takes up, on disk and in memory."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """What the backend holds in memory now."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. May be called more than once."""
