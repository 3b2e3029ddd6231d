"""The abstract state backend: an ordered store of bytes for one operator's subtask, changed only by whole batches."""

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
    """The name that the file must have when the snapshot is restored (`000015.sst`, `MANIFEST-000004`)."""
    path: Path
    size: int
    identity: str
    """A name for the bytes: two files with the same identity have the same content. A file name alone is not enough."""
    shared: bool
    """Whether the file is immutable and later snapshots may contain it too, as an SST of an incremental snapshot."""


class Snapshot(ABC):
    """A frozen view of a backend at a barrier. Taking it is the synchronous part, `write` is the asynchronous part."""

    @abstractmethod
    def write(self) -> list[SnapshotFile]:
        """Write everything that is not on disk yet to files. Runs in another thread, beside the next batch."""

    @abstractmethod
    def release(self) -> None:
        """Delete the local files of the snapshot. May be called more than once."""


@dataclass(frozen=True, slots=True)
class CacheReads:
    """Reads of data blocks since the state was opened."""

    hits: int
    misses: int


class StateBackend(ABC):
    """A sorted map from bytes to bytes. Several threads may read. `apply` and `snapshot` never run at the same time.

    Keys start with the key group (two bytes, big endian), so that a range of key groups is a range of keys.
    """

    name: ClassVar[str]

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, None for a missing key. Fastest if `keys` are in ascending order."""

    def get(self, key: bytes) -> bytes | None:
        """The value of one key, or None."""
        return self.get_many([key])[0]

    @abstractmethod
    def scan(self, start: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < end, in ascending order."""

    @abstractmethod
    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Put every pair; the value None deletes the key. A segment may be applied in several calls."""

    def delete_between(self, start: bytes, end: bytes) -> None:
        """Delete all entries with start <= key < end."""
        for keys, _ in chunked(self.scan(start, end)):
            self.apply(keys, [None] * len(keys))

    @abstractmethod
    def snapshot(self, directory: Path, *, full: bool = False) -> Snapshot:
        """Freeze the current content. `directory`, which does not exist yet, takes the files of the snapshot.

        Every backend can restore a `full` snapshot, whatever format its own snapshots have.
        """

    def load(self, chunks: Iterable[tuple[list[bytes], list[bytes]]], scratch: Path) -> None:
        """Add many entries, in ascending key order. Temporary files go into the folder `scratch`."""
        for keys, values in chunks:
            self.apply(keys, values)

    def compact(self) -> None:  # noqa: B027 - a backend may have nothing to do
        """Free the space of deleted entries if there are many, so that snapshots get smaller and scans faster.

        May take long. All other methods may be called in the meantime.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """The approximate size of the live state, on disk and in memory."""

    @abstractmethod
    def estimated_keys(self) -> int:
        """About how many entries there are. Cheap: a backend that does not know gives an estimate."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """The memory that the backend uses now."""

    def cache_reads(self) -> CacheReads | None:
        """How many reads of blocks the cache has answered, and how many it has not; None without a cache."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. May be called more than once."""
