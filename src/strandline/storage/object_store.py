"""Durable storage in an object store: S3, Google Cloud Storage, Azure."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions as reported
from obstore.store import from_url

from strandline.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StorageError,
    StorageRefusedError,
    UnknownOutcomeError,
)
from strandline.redaction import secret_values, without_values
from strandline.storage.base import Storage, StoredFile, checked_path, checked_prefix, is_valid_path
from strandline.storage.local import copy_out

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""URL schemes of object stores."""

_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url", "user_agent")
_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PART = 8 << 20
_MOST_PARTS = 9_000
_PARTS_AT_ONCE = 4
_COPY_LIMIT = 5 << 30
"""S3 copies no larger object in one request."""
_BULK_BYTES = 1 << 20
_BULK_TIMEOUT = "10min"
"""The time-out of a request that carries many bytes. The client's own, 30 s, means that a part of an upload over a slow
line is sent again and again, and never arrives."""
_CONFLICTS = 6
"""How often a write is sent that the store refuses because of another request."""
_BROKEN_READS = 3
"""How often an object is asked for if its answer breaks off."""
_BROKEN_OFF = "kind: Interrupted"
"""What obstore says of such an answer."""


class ObjectStorage(Storage):
    """Objects below one prefix of a bucket.

    Settings and credentials come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_REGION`, `AWS_ENDPOINT_URL`, ...).
    `options` override them. An endpoint with `http://` needs no other setting. `create` needs a store with conditional
    writes, which S3, GCS and Azure have.
    """

    copy_limit = _COPY_LIMIT
    """Larger objects are renamed by a copy through this process."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        given = dict(options or {})
        self._secrets = secret_values(given)
        self._store = _open(self.url, given, {})
        self._bulk_store = _open(self.url, {"timeout": _BULK_TIMEOUT, **given}, {})
        # A retry of a conditional write can find the object of its own first attempt and report a conflict. So a create
        # is sent only once. If its outcome is unknown, the caller reads the object back.
        self._create_store = _open(self.url, given, {"max_retries": 0})

    def read(self, path: str) -> bytes:
        with self._translated(path):
            for _ in range(_BROKEN_READS - 1):
                try:
                    return self._get(path)
                except reported.GenericError as e:
                    # The client goes on where an answer broke off, and gives up if the object was replaced meanwhile.
                    if _BROKEN_OFF not in str(e):
                        raise
            return self._get(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._translated(path):
            if length == 0:
                obstore.head(self._store, checked_path(path))
                return b""
            try:
                return bytes(obstore.get_range(self._store, checked_path(path), start=offset, length=length))
            except reported.BaseError:
                # Stores refuse a range that begins after the end, with different errors.
                if obstore.head(self._store, checked_path(path))["size"] <= offset:
                    return b""
                raise

    def write(self, path: str, data: bytes) -> None:
        store = self._store if len(data) <= _BULK_BYTES else self._bulk_store
        self._put(path, lambda: obstore.put(store, checked_path(path), data, use_multipart=False))

    def create(self, path: str, data: bytes) -> None:
        with self._translated(path, writes=True):
            obstore.put(self._create_store, checked_path(path), data, mode="create", use_multipart=False)

    def upload(self, source: Path, path: str) -> None:
        if not source.is_file():
            raise NotFoundError(f"cannot upload {source} to {self._at(path)}: there is no such local file")
        part = _part_bytes(source.stat().st_size)
        self._put(
            path,
            lambda: obstore.put(
                self._bulk_store, checked_path(path), source, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
            ),
        )

    def download(self, path: str, target: Path) -> None:
        copy_out(target, lambda temporary: self._fetch(path, temporary))

    def rename(self, source: str, target: str) -> None:
        with self._translated(source):  # The error of a copy would name the target.
            size = obstore.head(self._store, checked_path(source))["size"]
        if source == target:  # S3 refuses to copy an object to itself.
            return
        self._put(target, lambda: self._copy(source, target, size))
        self.delete([source])

    def delete(self, paths: Iterable[str]) -> None:
        doomed = [checked_path(path) for path in paths]
        if not doomed:
            return
        with self._translated(doomed[0]):
            try:
                obstore.delete(self._store, doomed)
            except FileNotFoundError:
                # Some stores report a missing object, and the error ends the whole call.
                for path in doomed:
                    self._delete_one(path)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        folder = checked_prefix(prefix)
        with self._translated(folder):
            found = [
                StoredFile(entry["path"], entry["size"], entry["last_modified"].timestamp())
                for chunk in obstore.list(self._store, folder or None, offset=after)
                for entry in chunk
            ]
        return iter(sorted(found, key=lambda file: file.path))

    def folders(self) -> tuple[str, ...]:
        with self._translated(""):
            below = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return tuple(sorted(name for path in below if is_valid_path(name := path.strip("/"))))

    def exists(self, path: str) -> bool:
        with self._translated(path):
            try:
                obstore.head(self._store, checked_path(path))
            except FileNotFoundError:
                return False
            return True

    # --- how ---------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _put(self, path: str, act: Callable[[], object]) -> None:
        """Write an object. A conflict with another request is no answer, so the write is repeated."""
        for attempt in range(_CONFLICTS):
            with self._translated(path, writes=True):
                try:
                    act()
                    return
                except (reported.AlreadyExistsError, reported.PreconditionError):
                    if attempt == _CONFLICTS - 1:
                        raise
            time.sleep(0.05 * 2**attempt)

    def _copy(self, source: str, target: str, size: int) -> None:
        if size <= self.copy_limit:
            obstore.copy(self._bulk_store, checked_path(source), checked_path(target))
            return
        # The store copies large objects only part by part, for which the client has no call. So the bytes come here.
        part = _part_bytes(size)
        writer = obstore.open_writer(
            self._bulk_store, checked_path(target), buffer_size=part, max_concurrency=_PARTS_AT_ONCE
        )
        copied = 0
        for chunk in obstore.get(self._bulk_store, checked_path(source)).stream(min_chunk_size=part):
            copied += writer.write(chunk)
        if copied != size:
            raise OSError(f"{self._at(source)} has {size} bytes, but only {copied} came")
        writer.close()  # The object appears now. Without this call it never does.

    def _fetch(self, path: str, file: Path) -> None:
        with self._translated(path):
            chunks = iter(obstore.get(self._store, checked_path(path)).stream(min_chunk_size=_PART))
        with file.open("wb") as stream:
            while True:
                # Translate only errors of the store. The caller names a full local disk.
                with self._translated(path):
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                stream.write(chunk)

    def _get(self, path: str) -> bytes:
        return bytes(obstore.get(self._store, checked_path(path)).bytes())

    def _delete_one(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return

    def _missing(self, path: str) -> NotFoundError:
        return NotFoundError(f"there is no object {self._at(path)}; check the path and the bucket's name")

    @contextmanager
    def _translated(self, path: str, *, writes: bool = False) -> Iterator[None]:
        """Translate errors of obstore into `StorageError`s. With `writes`, a failure may have an unknown outcome."""
        where = self._at(path)
        try:
            with _hiding(self._secrets):
                yield
        except FileNotFoundError as e:
            raise self._missing(path) from e
        except (reported.AlreadyExistsError, reported.PreconditionError) as e:
            if _status(e) == 409 and "BlobAlreadyExists" not in str(e):
                # The store saw another request and decided neither. Only Azure says with 409 that the object exists.
                raise UnknownOutcomeError(f"{where}: another request was in progress; read the object back") from e
            raise AlreadyExistsError(f"{where} cannot be created: it exists already") from e
        except (reported.PermissionDeniedError, reported.UnauthenticatedError) as e:
            raise StorageRefusedError(
                f"the object store refused access to {where}: {_summary(e)}; check the credentials and their rights"
            ) from e
        except reported.BaseError as e:
            status = _status(e)
            if status == 404:  # A listing reports a missing bucket this way.
                raise self._missing(path) from e
            refused = status is not None and 400 <= status < 500 and status != 408
            if writes and isinstance(e, reported.GenericError) and not refused:
                raise UnknownOutcomeError(
                    f"writing {where} failed: {_summary(e)}; the object may have been written, so read it back first"
                ) from e
            raise StorageError(f"the object store failed at {where}: {_summary(e)}") from e
        except (OSError, ValueError) as e:
            raise StorageError(f"the object store failed at {where}: {e}") from e


def _open(url: str, options: Mapping[str, str], retry: dict[str, int]) -> ObjectStore:
    client: dict[str, Any] = {name: options[name] for name in _CLIENT_OPTIONS if name in options}
    config: dict[str, Any] = {name: value for name, value in options.items() if name not in client}
    endpoints = [value for name, value in options.items() if name.lower() in _ENDPOINT_OPTIONS]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ]
    if endpoints and endpoints[0].lower().startswith("http://"):
        client.setdefault("allow_http", "true")
    # obstore's types require literal keys. These keys come from the user, and obstore checks them at run time.
    settings: dict[str, Any] = {"config": config, "client_options": client, "retry_config": retry or None}
    try:
        with _hiding(secret_values(options)):
            return from_url(url, **settings)
    except (reported.BaseError, ValueError, TypeError) as e:
        raise ConfigError(
            f"cannot open the storage {url!r}: {_summary(e)}; check the URL and the storage options"
        ) from e


@contextmanager
def _hiding(secrets: Sequence[str]) -> Iterator[None]:
    """Replaces an error of obstore that shows a secret: a traceback prints the cause of an error, too."""
    try:
        yield
    except Exception as e:
        text = str(e)
        hidden = without_values(text, secrets)
        if hidden == text:
            raise
        raise type(e)(hidden) from None


def _part_bytes(size: int) -> int:
    return max(_PART, -(-size // _MOST_PARTS))


def _summary(error: Exception) -> str:
    """The first line of obstore's message. The rest describes its internals."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _status(error: Exception) -> int | None:
    """The HTTP status of the store's answer, or None if it did not answer."""
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match.group(1)) if match else None
