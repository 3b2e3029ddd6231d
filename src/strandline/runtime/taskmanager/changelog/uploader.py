"""Uploading segments: those of all slots go into one file, and a slow or failed upload is tried again beside itself."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle
from strandline.errors import StorageError
from strandline.state.chunks import grouped
from strandline.storage import JobPaths, Storage
from strandline.storage.checksums import checksum, checksum_text
from strandline.storage.external import external_path, resolve

log = logging.getLogger(__name__)

GROUP_BYTES = 32 << 20
"""Segments are put together up to about this size; a larger one is uploaded alone."""
RETRY_DELAY = 0.2
"""Seconds between a failed try and the next one."""


@dataclass(slots=True)
class UploadFigures:
    """What was uploaded so far."""

    requests: int = 0
    attempts: int = 0
    failures: int = 0
    bytes: int = 0


class LogUploader:
    """Puts segments into durable storage. They count only once the storage says that they are durable."""

    def __init__(
        self, storage: Storage, paths: JobPaths, timeout: float, attempts: int, place: Storage | None = None
    ) -> None:
        """`place` is where the log goes, if not to the storage of the checkpoints."""
        self.figures = UploadFigures()
        self._storage = place or storage
        self._elsewhere = place is not None
        self._paths = paths
        self._timeout = timeout
        self._attempts = attempts
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="log-upload")
        self._lock = threading.Lock()

    def upload(self, segments: Sequence[Path]) -> list[FileHandle]:
        """The handles of local files, durable. Raises `StorageError` when every attempt failed or was too slow."""
        handles: list[FileHandle] = []
        try:
            for group in grouped(segments, lambda path: path.stat().st_size, GROUP_BYTES):
                handles += self._upload_group(group)
        except BaseException:
            for path in {handle.path for handle in handles}:
                self._delete(resolve(self._storage, path)[1])
            raise
        return handles

    def _seen(self, path: str) -> str:
        """The path as checkpoints name it."""
        return external_path(self._storage, path) if self._elsewhere else path

    def _upload_group(self, group: Sequence[Path]) -> list[FileHandle]:
        if len(group) == 1:
            size, found = group[0].stat().st_size, checksum(group[0])
            path = self._store(lambda path: self._storage.upload(group[0], path))
            self._count(bytes=size)
            return [FileHandle(self._seen(path), size, found)]
        parts = [path.read_bytes() for path in group]
        data = b"".join(parts)
        path = self._store(lambda path: self._storage.write(path, data))
        self._count(bytes=len(data))
        handles = []
        offset = 0
        for part in parts:
            handles.append(FileHandle(self._seen(path), len(part), checksum_text(zlib.crc32(part)), offset, len(data)))
            offset += len(part)
        return handles

    def _store(self, put: Callable[[str], None]) -> str:
        """Have `put` write under a unique name for every try; the first to succeed counts, the others are deleted."""
        running: dict[Future[None], str] = {}
        errors: list[str] = []
        self._count(requests=1)
        for _ in range(self._attempts):
            path = self._paths.shared(f"{uuid.uuid4().hex}-log")
            self._count(attempts=1)
            try:
                running[self._pool.submit(put, path)] = path
            except RuntimeError:  # closed meanwhile
                errors.append("the task manager ends")
                break
            winner = self._wait(running, errors)
            if winner is not None:
                self._abandon(running)
                return winner
        self._count(failures=1)
        slow = f"{len(running)} tries took longer than {self._timeout:g} s" if running else ""
        self._abandon(running)
        raise StorageError(
            f"the changelog could not be uploaded to {self._storage.url} in {self._attempts} tries: "
            f"{'; '.join([*errors, slow] if slow else errors)}"
        )

    def _wait(self, running: dict[Future[None], str], errors: list[str]) -> str | None:
        """The path of a try that succeeded, if one does within the timeout; those that failed are taken out."""
        deadline = time.monotonic() + self._timeout
        while running:
            done, _ = wait(running, deadline - time.monotonic(), FIRST_COMPLETED)
            if not done:
                return None
            for one in done:
                path = running.pop(one)
                error = one.exception()
                if error is None:
                    return path
                errors.append(str(error))
                self._delete(path)  # the outcome of a failed write may be unknown
            time.sleep(RETRY_DELAY)
        return None

    def _abandon(self, running: dict[Future[None], str]) -> None:
        for one, path in running.items():
            one.add_done_callback(partial(self._delete, path))

    def _delete(self, path: str, _done: Future[None] | None = None) -> None:
        try:
            self._storage.delete([path])
        except StorageError as error:
            log.warning("cannot delete %s, which nobody needs: %s", path, error)

    def _count(self, requests: int = 0, attempts: int = 0, failures: int = 0, bytes: int = 0) -> None:
        with self._lock:
            figures = self.figures
            figures.requests += requests
            figures.attempts += attempts
            figures.failures += failures
            figures.bytes += bytes

    def close(self) -> None:
        """No more tries; those under way end on their own."""
        self._pool.shutdown(wait=False)
