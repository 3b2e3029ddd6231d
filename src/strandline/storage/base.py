"""Durable storage: what a file system or an object store must be able to do for checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from strandline.errors import StorageError

TEMPORARY = ".tmp-"
"""How the name of a file begins that is still being written; such files are never listed."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One entry of a listing; `path` is relative to the storage's root."""

    path: str
    size: int
    modified: float
    """Seconds since the epoch."""


class Storage(ABC):
    """A tree of immutable files under one root. Paths are relative, with forward slashes.

    Everything here is durable when the call returns (synced, or accepted by the object store). Every error is a
    `StorageError`: `NotFoundError`, `AlreadyExistsError`, `StorageFullError`, `UnknownOutcomeError`.
    """

    url: str
    """The root in full (a local path is absolute): `open_storage(url)` opens the same place in any process."""
    options: Mapping[str, str] = MappingProxyType({})
    """The settings that it was opened with."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole file. `NotFoundError` if there is none, also where `path` is a folder."""

    @abstractmethod
    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of a file; less where the file ends before. `NotFoundError` if there is no file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write atomically: a reader sees the whole file or none. Replaces what was there."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write atomically, only if nothing is there: else `AlreadyExistsError`. This is what fences a driver."""

    @abstractmethod
    def upload(self, source: Path, path: str) -> None:
        """Copy a local file in, atomically. Replaces what was there. `NotFoundError` if `source` is missing."""

    @abstractmethod
    def download(self, path: str, target: Path) -> None:
        """Copy a file out; `target`'s folder exists. On an error, `target` is as it was before."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Move a file inside the storage; replaces `target`. `NotFoundError` if `source` is missing.

        Atomic on a file system. On an object store a crash can leave both, never neither.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; one that is missing already is no error. Empty folders go too where folders exist."""

    @abstractmethod
    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        """All files below the folder `prefix`, in ascending order of path; with `after`, only greater paths."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file; a folder is none."""


def checked_path(path: str) -> str:
    """`path` itself if every storage can hold it; else `StorageError`."""
    parts = path.split("/")
    if (
        any(part in ("", ".", "..") or part.startswith(TEMPORARY) for part in parts)
        or "\\" in path
        or not path.isprintable()
    ):
        raise StorageError(
            f"{path!r} is no path in a storage; use a relative path with forward slashes, without '.', '..', empty "
            f"parts, backslashes, control characters, or parts that begin with {TEMPORARY!r}"
        )
    return path


def checked_prefix(prefix: str) -> str:
    """The folder `prefix` without a slash at its end; "" is the root."""
    return checked_path(prefix.removesuffix("/")) if prefix else ""
