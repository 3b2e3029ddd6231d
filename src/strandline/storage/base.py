"""The abstract durable storage: what checkpoints need from a file system or an object store."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from strandline.errors import StorageError

TEMPORARY = ".tmp-"
"""The prefix of the names of files that are still being written. `list` never returns them."""
_LONGEST_NAME = 255
"""How many bytes the name of a file may have in a file system."""
_LONGEST_TAIL = _LONGEST_NAME - len(f"{TEMPORARY}{uuid.uuid4().hex}-")
"""How many bytes, from the end of a file's name, its temporary name keeps."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One entry of a listing. `path` is relative to the storage's root."""

    path: str
    size: int
    modified: float
    """Seconds since the epoch."""


class Storage(ABC):
    """A tree of immutable files under one root. Paths are relative and use forward slashes.

    A change is durable when the call returns (synced, or accepted by the object store). Every error is a
    `StorageError`: `NotFoundError`, `AlreadyExistsError`, `StorageFullError`, `StorageRefusedError`,
    `UnknownOutcomeError`.
    """

    url: str
    """The full root; a local path is absolute. `open_storage(url)` opens the same place in any process."""
    options: Mapping[str, str] = MappingProxyType({})
    """The settings with which the storage was opened."""
    root: Path | None = None
    """The folder of this host in which the files lie as they are; None if they lie elsewhere, or in another form."""
    must_be_probed: bool = True
    """Whether only a probe can tell that `create` is exact, because anybody may have written the service behind it."""
    private: bool = True
    """Whether other users of the host must not read the files, where the storage keeps files of a host.

    False for the output of a sink: its files get the permissions that the umask gives."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file. Raises `NotFoundError` if there is no file, or `path` is a folder."""

    @abstractmethod
    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of a file; shorter if the file ends before. Raises `NotFoundError` if there is no file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically: a reader sees the whole file or none. Replaces an existing file."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write a file atomically if none exists. Raises `AlreadyExistsError` otherwise. This call fences drivers."""

    @abstractmethod
    def upload(self, source: Path, path: str) -> None:
        """Copy a local file into the storage, atomically. Replaces an existing file.

        Raises `NotFoundError` if `source` is missing.
        """

    @abstractmethod
    def download(self, path: str, target: Path) -> None:
        """Copy a file to the local path `target`, whose folder must exist. On an error, `target` does not change."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Move a file inside the storage. Replaces `target`. Raises `NotFoundError` if `source` is missing.

        Atomic on a file system. On an object store a crash can leave both files, but never none.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files. A missing file is not an error. A file system also removes folders that become empty."""

    @abstractmethod
    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        """All files below the folder `prefix`, in ascending order of paths; with `after`, only greater paths."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file at `path`. A folder does not count."""

    def folders(self) -> tuple[str, ...]:
        """The names of the folders right below the root, in ascending order. A file system also names empty ones."""
        found: tuple[str, ...] = ()
        after: str | None = None
        # Each listing is ended after its first path, because a folder may have many files.
        while (first := next(iter(self.list(after=after)), None)) is not None:
            name, slash, _rest = first.path.partition("/")
            after = f"{name}0" if slash else name  # "0" comes right after "/"
            if slash:
                found = (*found, name)
        return tuple(sorted(found))  # `a-b/` is listed before `a/`

    def unfinished(self, prefix: str = "") -> Iterator[StoredFile]:
        """The temporary files below the folder `prefix`, of writers that are at work or were killed.

        Only file systems have them: an object store shows whole objects only.
        """
        return iter(())

    def delete_unfinished(self, paths: Iterable[str]) -> None:  # noqa: B027  # a storage without such files inherits it
        """Delete files that `unfinished` returned. A missing file is not an error."""


def temporary_name(name: str) -> str:
    """A new name for a file that gets the name `name` when it is complete. It tells as much of that as it can hold."""
    return f"{TEMPORARY}{uuid.uuid4().hex}-{name.encode()[-_LONGEST_TAIL:].decode(errors='ignore')}"


def intended_name(path: str) -> str:
    """The name that a file of `unfinished` was to get, or the end of it; empty if the file is no such file."""
    name = path.rpartition("/")[2]
    return name.removeprefix(TEMPORARY).partition("-")[2] if name.startswith(TEMPORARY) else ""


def checked_path(path: str) -> str:
    """`path` itself, if every storage accepts it. Raises `StorageError` otherwise."""
    if not is_valid_path(path):
        raise StorageError(
            f"{path!r} is not a valid path in a storage; use a relative path with forward slashes, without '.', '..', "
            f"empty parts, backslashes, control characters, or parts that begin with {TEMPORARY!r}"
        )
    return path


def is_valid_path(path: str) -> bool:
    """Whether every storage accepts the path."""
    parts = path.split("/")
    return (
        all(part not in ("", ".", "..") and not part.startswith(TEMPORARY) for part in parts)
        and "\\" not in path
        and path.isprintable()
    )


def checked_prefix(prefix: str) -> str:
    """The folder `prefix` without a slash at its end. "" is the root."""
    return checked_path(prefix.removesuffix("/")) if prefix else ""
