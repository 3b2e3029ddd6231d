"""Durable storage in HDFS, through a client that needs no JVM (`pip install strandline[hdfs]`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from hdfs_native import Client, FileWriter, WriteOptions

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
from strandline.storage.local import copy_out

_CLIENT_OPTIONS = ("config_dir", "kerberos_principal", "kerberos_keytab", "kerberos_cache")
# The client's own default is 15 attempts, which takes minutes if no NameNode answers.
_DEFAULTS = {"dfs.client.failover.max.attempts": "6"}
_PIECE = 4 << 20


class HdfsStorage(Storage):
    """Files below one folder of an HDFS. The first write creates the folder.

    A file is written under a temporary name. Then it gets its final name by a rename, which the NameNode does in one
    step: with or without leave to replace another file. Settings come from the Hadoop configuration (`HADOOP_CONF_DIR`,
    `HADOOP_HOME`). `options` override them: Hadoop's own keys (`dfs.client.socket-timeout`), `config_dir`, and
    `kerberos_principal`, `kerberos_keytab`, `kerberos_cache`.
    """

    must_be_probed = False

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._root = urlsplit(self.url).path
        given = dict(options or {})
        client = {name: given.pop(name) for name in _CLIENT_OPTIONS if name in given}
        unknown = [name for name in given if "." not in name]
        if unknown:
            raise ConfigError(
                f"the storage {url!r}: unknown storage option {unknown[0]!r}; allowed: keys of Hadoop's configuration, "
                f"{', '.join(_CLIENT_OPTIONS)}"
            )
        try:
            self._client = Client(self.url, {**_DEFAULTS, **given}, **client)
        except (RuntimeError, ValueError, OSError) as e:
            raise ConfigError(
                f"cannot open the storage {url!r}: {_summary(e)}; name the NameNode with its port "
                "(hdfs://host:8020/folder), or a name service of the Hadoop configuration in HADOOP_CONF_DIR"
            ) from e

    def read(self, path: str) -> bytes:
        with self._translated(path):
            return self._client.read(self._at(path)).read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._translated(path):
            reader = self._client.read(self._at(path))
            # The client breaks down when it is asked for bytes after the end.
            length = min(length, len(reader) - offset)
            return reader.read_range(offset, length) if length > 0 else b""

    def write(self, path: str, data: bytes) -> None:
        self._put(path, lambda writer: writer.write(data), overwrite=True)

    def create(self, path: str, data: bytes) -> None:
        self._put(path, lambda writer: writer.write(data), overwrite=False)

    def upload(self, source: Path, path: str) -> None:
        if not source.is_file():
            raise NotFoundError(f"cannot upload {source} to {self._named(path)}: there is no such local file")
        self._put(path, lambda writer: _copy_in(source, writer), overwrite=True)

    def download(self, path: str, target: Path) -> None:
        copy_out(target, lambda temporary: self._fetch(path, temporary))

    def rename(self, source: str, target: str) -> None:
        old, new = self._at(source), self._at(target)
        if not self.exists(source):
            raise self._missing(source)
        if source == target:
            return
        for _ in range(20):
            with self._translated(target, writes=True):
                self._client.mkdirs(_parent(new), create_parent=True)
                try:
                    self._client.rename(old, new, overwrite=True)
                    self._prune(_parent(old))
                    return
                except FileNotFoundError:
                    pass  # The file is gone, or a concurrent delete has removed the new folder again.
            if not self.exists(source):
                raise self._missing(source)
        raise StorageError(f"cannot rename {self._named(source)} to {self._named(target)}: the folder vanishes")

    def delete(self, paths: Iterable[str]) -> None:
        folders: set[str] = set()
        for path in paths:
            file = self._at(path)
            if self.exists(path):
                with self._translated(path):
                    self._client.delete(file)
                folders.add(_parent(file))
        for folder in folders:
            self._prune(folder)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        folder = checked_prefix(prefix)
        with self._translated(folder):
            found = list(self._collect(folder, after))
        return iter(sorted(found, key=lambda file: file.path))

    def folders(self) -> tuple[str, ...]:
        above = self._root or "/"
        with self._translated(""), suppress(FileNotFoundError):
            names = [_decoded(status.path) for status in self._client.list_status(above) if status.isdir]
            return tuple(sorted(name for name in names if is_valid_path(name)))
        return ()

    def exists(self, path: str) -> bool:
        with self._translated(path):
            try:
                return not self._client.get_file_info(self._at(path)).isdir
            except FileNotFoundError:
                return False

    def unfinished(self, prefix: str = "") -> Iterator[StoredFile]:
        folder = checked_prefix(prefix)
        with self._translated(folder):
            return iter(list(self._collect(folder, None, temporary=True)))

    def delete_unfinished(self, paths: Iterable[str]) -> None:
        for path in paths:
            folder, _, name = path.rpartition("/")
            above = self._at(folder) if folder else self._root
            with self._translated(path):
                self._client.delete(f"{above}/{name}")
            self._prune(above)

    # --- how ---------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        """The absolute path in HDFS. HDFS allows no colon in a name."""
        return f"{self._root}/{checked_path(path).replace('%', '%25').replace(':', '%3A')}"

    def _named(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _put(self, path: str, fill: Callable[[FileWriter], object], *, overwrite: bool) -> None:
        """Write a file under a temporary name with `fill`, then give it its final name."""
        target = self._at(path)
        temporary = f"{_parent(target)}/{temporary_name(target.rpartition('/')[2])}"
        try:
            with self._translated(path):
                options = WriteOptions(permission=0o600 if self.private else 0o644, overwrite=False, create_parent=True)
                writer = self._client.create(temporary, options)
                fill(writer)
                _sync(writer)
                writer.close()
        except BaseException:
            with suppress(RuntimeError, OSError):
                self._client.delete(temporary)
            raise
        self._name(temporary, path, overwrite=overwrite)

    def _name(self, temporary: str, path: str, *, overwrite: bool) -> None:
        """Give a temporary file its final name.

        If the answer of the NameNode is lost, the deletion of the temporary file decides: if there is something to
        delete, the file has not been renamed, and never will be. Otherwise it was renamed, or somebody else has deleted
        it, as `gc` does if this process stood still for long: then the outcome is unknown.
        """
        try:
            self._client.rename(temporary, self._at(path), overwrite=overwrite)
        except BaseException as problem:
            if not _is_of_client(problem):
                raise
            if not self._was_there(temporary):
                raise UnknownOutcomeError(
                    f"writing {self._named(path)} failed: {_summary(problem)}; the file may have been written, so read "
                    "it back first"
                ) from problem
            if isinstance(problem, FileExistsError):
                raise AlreadyExistsError(f"{self._named(path)} cannot be created: it exists already") from None
            with self._translated(path):
                raise

    def _was_there(self, temporary: str) -> bool:
        """Delete a temporary file; False if it was not there, or if nobody knows."""
        try:
            return bool(self._client.delete(temporary))
        except BaseException as error:
            if not _is_of_client(error):
                raise
            return False

    def _fetch(self, path: str, file: Path) -> None:
        with self._translated(path):
            reader = self._client.read(self._at(path))
            pieces = iter(reader.read_range_stream(0, len(reader)) if len(reader) else ())
        with file.open("wb") as stream:
            while True:
                # Translate only errors of HDFS. The caller names a full local disk.
                with self._translated(path):
                    piece = next(pieces, None)
                if piece is None:
                    break
                stream.write(piece)
            if stream.tell() != len(reader):
                raise StorageError(f"{self._named(path)} has {len(reader)} bytes, but {stream.tell()} came")

    def _collect(self, folder: str, after: str | None, *, temporary: bool = False) -> Iterator[StoredFile]:
        """Every file below `folder`, unordered: all `temporary` ones, or all others.

        Folders without paths greater than `after` are not read.
        """
        above = self._at(folder) if folder else self._root or "/"
        with suppress(FileNotFoundError):  # The folder is not there, or was removed meanwhile.
            for status in self._client.list_status(above):
                name = _decoded(status.path)
                path = f"{folder}/{name}" if folder else name
                if status.path == above:  # A file lists itself.
                    continue
                if status.isdir:
                    if after is None or f"{path}/" > after or after.startswith(f"{path}/"):
                        yield from self._collect(path, after, temporary=temporary)
                elif name.startswith(TEMPORARY) == temporary and (after is None or path > after):
                    yield StoredFile(path, status.length, status.modification_time / 1000)

    def _prune(self, folder: str) -> None:
        """Remove `folder` and the folders above it while they are empty, but never the root."""
        while folder != self._root and folder.startswith(f"{self._root}/"):
            try:
                self._client.delete(folder, recursive=False)
            except (RuntimeError, OSError):
                return  # Not empty, or no permission. A folder that stays does no harm.
            folder = _parent(folder)

    def _missing(self, path: str) -> NotFoundError:
        return NotFoundError(f"there is no file {self._named(path)}; check the path")

    @contextmanager
    def _translated(self, path: str, *, writes: bool = False) -> Iterator[None]:
        """Translate errors of the client into `StorageError`s. With `writes`, a failure may have an unknown outcome."""
        where = self._named(path)
        try:
            yield
        except FileNotFoundError as e:
            raise self._missing(path) from e
        except (RuntimeError, OSError) as e:
            reason = _summary(e)
            if "(is not a directory)" in reason:
                raise self._missing(path) from e
            if "QuotaExceeded" in reason:
                raise StorageFullError(f"the quota leaves no space to write {where}: {reason}; raise the quota") from e
            if isinstance(e, PermissionError) or "AccessControlException" in reason:
                raise StorageRefusedError(
                    f"not allowed to use {where}: {reason}; give the user that runs the job read and write access"
                ) from e
            if writes and "RPCError" not in reason:  # An answer of the NameNode is an answer.
                raise UnknownOutcomeError(f"changing {where} failed: {reason}; read it back first") from e
            raise StorageError(f"HDFS failed at {where}: {reason}") from e
        except BaseException as e:
            if not _is_of_client(e):
                raise
            raise StorageError(f"the HDFS client broke down at {where}: {_summary(e)}") from e


def _is_of_client(error: BaseException) -> bool:
    """Whether the client raised it. For a bug of its own it raises what no handler of an `Exception` catches."""
    return isinstance(error, RuntimeError | OSError) or type(error).__name__ == "PanicException"


def _decoded(path: str) -> str:
    """The name of the file or folder at a path of HDFS."""
    return path.rpartition("/")[2].replace("%3A", ":").replace("%25", "%")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _copy_in(source: Path, writer: FileWriter) -> None:
    with source.open("rb") as stream:
        while piece := stream.read(_PIECE):
            writer.write(piece)


def _sync(writer: FileWriter) -> None:
    """Have the DataNodes write the file to disk. Where blocks are erasure-coded, the client cannot ask for it."""
    try:
        writer.hsync()
    except RuntimeError as e:
        if "rasure" not in str(e):
            raise


def _summary(error: BaseException) -> str:
    """The client's message without the NameNode's stack trace."""
    text = re.split(r"\\n\\tat |\n", str(error).strip())[0]
    return text or type(error).__name__
