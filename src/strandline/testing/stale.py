"""A storage that shows the past: every change of a file is seen only some seconds later."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from strandline.decoding import msgpack_decoder
from strandline.errors import NotFoundError
from strandline.storage import Storage, StoredFile


class _Before(msgspec.Struct, frozen=True):
    """A file before its last change."""

    path: str
    until: float
    """Until when (seconds since the epoch) readers see this state."""
    data: bytes | None
    """None: there was no file."""
    modified: float = 0.0


class StaleStorage(Storage):
    """Another storage whose reads are late. `create` looks at the truth, as a store with conditional writes does."""

    def __init__(
        self, inner: Storage, folder: Path, seconds: float, pattern: str, switched_on: Callable[[], bool]
    ) -> None:
        """Note in `folder` what each file was before its last change. All processes of a run share the folder.

        Calls whose text `operation path` does not match `pattern` see the truth, and so do all while `switched_on` is
        false.
        """
        self.url = inner.url
        self._inner = inner
        self._folder = folder
        self._seconds = seconds
        self._pattern = re.compile(pattern)
        self._switched_on = switched_on
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def private(self) -> bool:
        """See `Storage.private`."""
        return self._inner.private

    @private.setter
    def private(self, value: bool) -> None:
        self._inner.private = value

    def read(self, path: str) -> bytes:
        before = self._before("read", path)
        return self._inner.read(path) if before is None else self._data(before)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        before = self._before("read", path)
        if before is None:
            return self._inner.read_range(path, offset, length)
        return self._data(before)[offset : offset + length]

    def write(self, path: str, data: bytes) -> None:
        self._remember(path)
        self._inner.write(path, data)

    def create(self, path: str, data: bytes) -> None:
        if not self._inner.exists(path):
            self._remember(path)
        self._inner.create(path, data)

    def upload(self, source: Path, path: str) -> None:
        self._remember(path)
        self._inner.upload(source, path)

    def download(self, path: str, target: Path) -> None:
        before = self._before("download", path)
        if before is None:
            self._inner.download(path, target)
        else:
            target.write_bytes(self._data(before))

    def rename(self, source: str, target: str) -> None:
        if source != target:
            self._remember(source)
            self._remember(target)
        self._inner.rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        doomed = list(paths)
        for path in doomed:
            self._remember(path)
        self._inner.delete(doomed)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        files = {file.path: file for file in self._inner.list(prefix, after)}
        if self._lies("list", prefix):
            below = f"{prefix.rstrip('/')}/" if prefix else ""
            for note in self._folder.glob("*.before"):
                before = self._noted(note)
                if before is None or not before.path.startswith(below) or (after and before.path <= after):
                    continue
                files.pop(before.path, None)
                if before.data is not None:
                    files[before.path] = StoredFile(before.path, len(before.data), before.modified)
        return iter(sorted(files.values(), key=lambda file: file.path))

    def exists(self, path: str) -> bool:
        before = self._before("exists", path)
        return self._inner.exists(path) if before is None else before.data is not None

    def unfinished(self, prefix: str = "") -> Iterator[StoredFile]:
        return self._inner.unfinished(prefix)

    def delete_unfinished(self, paths: Iterable[str]) -> None:
        self._inner.delete_unfinished(paths)

    # --- the past ------------------------------------------------------------------------------

    def _lies(self, operation: str, path: str) -> bool:
        return self._switched_on() and self._pattern.search(f"{operation} {path}") is not None

    def _note_of(self, path: str) -> Path:
        return self._folder / f"{hashlib.sha256(f'{self.url}/{path}'.encode()).hexdigest()}.before"

    def _before(self, operation: str, path: str) -> _Before | None:
        """The state of `path` that the caller gets to see; None for the present one."""
        return self._noted(self._note_of(path)) if self._lies(operation, path) else None

    def _noted(self, note: Path) -> _Before | None:
        try:
            before = msgpack_decoder(_Before).decode(note.read_bytes())
        except FileNotFoundError:
            return None
        return before if time.time() < before.until else None

    def _remember(self, path: str) -> None:
        """Note the state of `path` before it changes."""
        if not self._switched_on():
            return
        try:
            data: bytes | None = self._inner.read(path)
        except NotFoundError:
            data = None
        before = _Before(path, time.time() + self._seconds, data, time.time())
        temporary = self._folder / uuid.uuid4().hex
        temporary.write_bytes(msgspec.msgpack.encode(before))
        os.replace(temporary, self._note_of(path))

    def _data(self, before: _Before) -> bytes:
        if before.data is None:
            raise NotFoundError(f"there is no file {self.url}/{before.path} yet (stale_folder)")
        return before.data
