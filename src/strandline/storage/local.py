"""Durable storage in a file system: the local disk, or a network mount that every host can access."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import unquote, urlsplit

from strandline.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    UnknownOutcomeError,
)
from strandline.storage.base import (
    TEMPORARY,
    Storage,
    StoredFile,
    checked_path,
    checked_prefix,
    is_valid_path,
    temporary_name,
)

T = TypeVar("T")

_SYNCED_BYTES = 4 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStorage(Storage):
    """Files below one folder. The first write creates the folder.

    A file is written under a temporary name and synced. Then it gets its final name in one step: by a rename if it may
    replace another file, by a hard link if it may not. Folders are synced too, so that names survive a power cut.

    New files and folders of a private storage are for their owner alone. If the root exists and its group may write
    there, they are for the group, too.
    """

    root: Path
    must_be_probed = False

    def __init__(self, url: str) -> None:
        self.root = _root(url)
        self.url = str(self.root)

    def read(self, path: str) -> bytes:
        with _reading(self._at(path)), _opened(self._at(path)) as file:
            return file.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with _reading(self._at(path)), _opened(self._at(path)) as file:
            file.seek(offset)
            return file.read(length)

    def write(self, path: str, data: bytes) -> None:
        self._put(path, lambda temporary: _write_bytes(temporary, data), self._replace)

    def create(self, path: str, data: bytes) -> None:
        self._put(path, lambda temporary: _write_bytes(temporary, data), self._link)

    def upload(self, source: Path, path: str) -> None:
        if not source.is_file():
            raise NotFoundError(f"cannot upload {source} to {self._at(path)}: there is no such local file")
        self._put(path, lambda temporary: _copy(source, temporary, sync=True), self._replace)

    def download(self, path: str, target: Path) -> None:
        source = self._at(path)
        if not source.is_file():
            raise _missing(source)
        copy_out(target, lambda temporary: _copy(source, temporary, sync=False))

    def rename(self, source: str, target: str) -> None:
        old, new = self._at(source), self._at(target)
        if not old.is_file():
            raise _missing(old)
        with _translated(new):
            self._in_folder(new.parent, lambda: old.replace(new))
        for folder in {new.parent, old.parent}:
            with _name_synced(new):
                _sync_folder(folder)
        self._prune(old.parent)

    def delete(self, paths: Iterable[str]) -> None:
        folders: set[Path] = set()
        for path in paths:
            file = self._at(path)
            with _translated(file), suppress(*_NO_FILE):
                file.unlink()
                folders.add(file.parent)
        for folder in folders:
            with _translated(folder), suppress(FileNotFoundError):
                _sync_folder(folder)
            self._prune(folder)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        folder = checked_prefix(prefix)
        found = _collect(self.root / folder, f"{folder}/" if folder else "", after)
        return iter(sorted(found, key=lambda file: file.path))

    def folders(self) -> tuple[str, ...]:
        with _translated(self.root), suppress(*_NO_FILE), os.scandir(self.root) as entries:
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
            return tuple(sorted(name for name in names if is_valid_path(name)))
        return ()

    def exists(self, path: str) -> bool:
        with _translated(self._at(path)):
            return self._at(path).is_file()

    def unfinished(self, prefix: str = "") -> Iterator[StoredFile]:
        for folder, _folders, names in os.walk(self.root / checked_prefix(prefix)):
            for name in names:
                if name.startswith(TEMPORARY):
                    file = Path(folder, name)
                    with suppress(FileNotFoundError):  # It was finished after the folder was read.
                        stat = file.stat()
                        yield StoredFile(file.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime)

    def delete_unfinished(self, paths: Iterable[str]) -> None:
        for path in paths:
            file = self.root / path
            with _translated(file):
                file.unlink(missing_ok=True)
            self._prune(file.parent)

    # --- how ---------------------------------------------------------------------------------

    def _at(self, path: str) -> Path:
        return self.root / checked_path(path)

    def _put(self, path: str, fill: Callable[[Path], None], name: Callable[[Path, Path], None]) -> None:
        """Write a file under a temporary name with `fill`, then give it its final name with `name`."""
        target = self._at(path)
        temporary = _temporary(target)
        try:
            with _translated(target):
                # While the temporary file exists, a concurrent delete cannot remove the folder as empty.
                self._in_folder(target.parent, lambda: self._touch(temporary))
                fill(temporary)
                name(temporary, target)
            with _name_synced(target):
                _sync_folder(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink()

    @staticmethod
    def _replace(temporary: Path, target: Path) -> None:
        temporary.replace(target)

    @staticmethod
    def _link(temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
        except FileExistsError:
            # Over NFS, the reply to a successful link can be lost. The repeated call then finds the link.
            if temporary.stat().st_nlink == 2:
                return
            raise AlreadyExistsError(f"{target} cannot be created: it exists already") from None
        except OSError as e:
            if e.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise StorageError(
                    f"cannot create {target}: {e.strerror}; the file system has no hard links, which are needed to "
                    "fence drivers; use a file system with hard links, or an object store"
                ) from e
            raise

    def _in_folder(self, folder: Path, act: Callable[[], T]) -> T:
        """Call `act` with an existing `folder`. Repeats it if a concurrent delete removes the folder."""
        for _ in range(20):
            try:
                self._make_folder(folder)
                return act()
            except FileNotFoundError:
                continue
        try:
            self._make_folder(folder)
        except FileNotFoundError as e:
            raise _no_folder(folder, e.strerror or str(e)) from e
        return act()

    def _make_folder(self, folder: Path) -> None:
        missing: list[Path] = []
        while not folder.is_dir():
            missing.append(folder)
            if folder.parent == folder:
                break
            folder = folder.parent
        for new in reversed(missing):
            try:
                new.mkdir(mode=0o700 if self.private and self._ours(new) else 0o777)
                if self._for_group(new):
                    new.chmod(new.stat().st_mode | 0o770)
            except FileExistsError as e:
                if _is_no_folder(new):
                    raise _no_folder(missing[0], f"{new} is not a folder") from e
            except OSError as e:
                if e.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
                    raise _no_folder(missing[0], f"{new.parent} does not allow it: {e.strerror}") from e
                raise
            _sync_folder(new.parent)

    def _touch(self, file: Path) -> None:
        file.touch(exist_ok=False, mode=0o600 if self.private else 0o666)
        if self._for_group(file):
            file.chmod(0o660)

    def _for_group(self, new: Path) -> bool:
        """Whether the owner of the root shares it with a group on purpose: the umask alone must not decide that."""
        return self.private and self.root in new.parents and bool(self.root.stat().st_mode & stat.S_IWGRP)

    def _ours(self, path: Path) -> bool:
        return self.root in (path, *path.parents)

    def _prune(self, folder: Path) -> None:
        """Remove `folder` and the folders above it while they are empty, but never the root."""
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return  # Not empty, or no permission. A folder that stays does no harm.
            folder = folder.parent


def copy_out(target: Path, fill: Callable[[Path], None]) -> None:
    """Write the local file `target` with `fill`, which gets a temporary path. On an error, `target` does not change."""
    temporary = _temporary(target)
    try:
        with _translated(target):
            fill(temporary)
            temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _collect(folder: Path, prefix: str, after: str | None) -> Iterator[StoredFile]:
    """Every file below `folder`, unordered. Folders without paths greater than `after` are not read.

    Links to folders are not followed: whoever may make a link there must not get files elsewhere listed and deleted.
    """
    with _translated(folder), suppress(*_NO_FILE), os.scandir(folder) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if not is_valid_path(entry.name):
                continue  # A temporary file, or a name that no storage accepts, so that nobody could ask for the file.
            if entry.is_dir():
                if entry.is_symlink():
                    continue
                # All paths below begin with `path/`. So all, or none, are greater than `after`, unless it lies below.
                if after is None or f"{path}/" > after or after.startswith(f"{path}/"):
                    yield from _collect(folder / entry.name, f"{path}/", after)
            elif after is None or path > after:
                with suppress(FileNotFoundError):  # The file was deleted after the folder was read.
                    stat = entry.stat()
                    yield StoredFile(path, stat.st_size, stat.st_mtime)


def _root(url: str) -> Path:
    if not url:
        raise ConfigError("the storage path is empty; give a folder or a URL")
    if url.lower().startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"the storage URL {url!r} names a host; write file:///absolute/path or a plain path")
        return Path(unquote(parts.path)).absolute()
    return Path(url).expanduser().absolute()


def _temporary(target: Path) -> Path:
    return target.parent / temporary_name(target.name)


def _write_bytes(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _copy(source: Path, target: Path, *, sync: bool) -> None:
    if not sync:
        shutil.copyfile(source, target)
        return
    with source.open("rb") as incoming, target.open("wb") as stream:
        # Sync in pieces, because small files of others wait while the disk writes a large piece.
        while piece := incoming.read(_SYNCED_BYTES):
            stream.write(piece)
            stream.flush()
            os.fdatasync(stream.fileno())
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(file: Path) -> NotFoundError:
    return NotFoundError(f"there is no file {file}; check the path, and that every host sees the same file system")


def _is_no_folder(path: Path) -> bool:
    """Whether something else than a folder is there. What was deleted meanwhile does not count."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return path.is_symlink()  # it leads nowhere


def _no_folder(folder: Path, reason: str) -> StorageRefusedError:
    return StorageRefusedError(
        f"cannot create the folder {folder}: {reason}; name another folder, or give the user that runs the job write "
        "access"
    )


def _opened(file: Path) -> IO[bytes]:
    """The file, open to read. A pipe or a device in its place would keep a reader waiting, or never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _missing(file)
    return os.fdopen(descriptor, "rb")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Like `_translated`, but a folder in place of the file counts as a missing file."""
    with _translated(file):
        try:
            yield
        except _NO_FILE:
            raise _missing(file) from None


@contextmanager
def _translated(file: Path) -> Iterator[None]:
    """Translate errors of the operating system about `file` into `StorageError`s."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if e.errno in _FULL:
            raise StorageFullError(
                f"no space left to write {file} ({reason}); free some space or raise the quota there, or point the "
                "option that names this folder at a larger disk"
            ) from e
        if isinstance(e, FileNotFoundError):
            raise _missing(file) from e
        if isinstance(e, PermissionError) or e.errno == errno.EROFS:
            raise StorageRefusedError(
                f"not allowed to use {file} ({reason}); give the user that runs the job read and write access"
            ) from e
        raise StorageError(f"the file system failed at {file}: {reason}") from e


@contextmanager
def _name_synced(file: Path) -> Iterator[None]:
    """Raise `UnknownOutcomeError` if the folder of a new name cannot be synced: the name may be lost in a crash."""
    try:
        yield
    except FileNotFoundError:
        return  # Another caller has removed the folder since, so there is no name to make durable.
    except OSError as e:
        raise UnknownOutcomeError(
            f"{file} was written, but its folder could not be synced ({e.strerror or e}); read it back to see whether "
            "it is there"
        ) from e
