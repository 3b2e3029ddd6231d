"""Uploads segments: one file for the segments of all slots, and another attempt where an upload is slow or fails."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle
from strandline.errors import StorageError
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.runtime.taskmanager.packing import PACK_BYTES, Pack
from strandline.state.chunks import grouped
from strandline.storage import JobPaths, Storage
from strandline.storage.external import external_path


@dataclass(slots=True)
class UploadFigures:
    """What was uploaded so far."""

    requests: int = 0
    attempts: int = 0
    failures: int = 0
    bytes: int = 0


class SegmentUploader:
    """Puts segments into durable storage. A segment counts only once the storage says that it is durable."""

    def __init__(
        self,
        storage: Storage,
        paths: JobPaths,
        timeout: float,
        attempts: int,
        *,
        external: bool = False,
        retry_delay: float = 0.2,
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        """Upload to `storage`; an attempt that takes longer than `timeout` seconds gets another one beside it.

        `external`: `storage` is not the storage of the checkpoints, so handles name files by their full path.
        `retry_delay` is the number of seconds between a failed attempt and the next one.
        """
        self.figures = UploadFigures()
        self._storage = storage
        self._external = external
        self._paths = paths
        self._timeout = timeout
        self._attempts = attempts
        self._retry_delay = retry_delay
        self._pack_bytes = pack_bytes
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="segment-upload")
        self._lock = threading.Lock()
        """Protects `figures`."""

    def upload(self, segments: Sequence[Path]) -> list[FileHandle]:
        """Make local files durable; returns their handles, in their order.

        Raises `StorageError` when every attempt failed or was too slow, and `OSError` when a local file is gone. What
        was uploaded until then is deleted.
        """
        handles: list[FileHandle] = []
        stored: list[str] = []
        try:
            for group in grouped(segments, lambda path: path.stat().st_size, self._pack_bytes):
                pack = Pack(group)
                path = self._store(pack)
                stored.append(path)
                handles += pack.handles(external_path(self._storage, path) if self._external else path)
        except BaseException:
            delete_unneeded(self._storage, stored)
            raise
        return handles

    def _store(self, pack: Pack) -> str:
        """Store a pack under a new name for every attempt. The first that succeeds counts, the others are deleted."""
        running: dict[Future[None], str] = {}
        errors: list[str] = []
        self._count(requests=1)
        for _ in range(self._attempts):
            path = self._paths.shared(f"{uuid.uuid4().hex}-log")
            self._count(attempts=1)
            try:
                running[self._pool.submit(pack.store, self._storage, path)] = path
            except RuntimeError:  # the pool was closed meanwhile
                errors.append("the task manager ends")
                break
            winner = self._wait(running, errors)
            if winner is not None:
                self._abandon(running)
                self._count(bytes=pack.size)
                return winner
        self._count(failures=1)
        slow = f"{len(running)} tries took longer than {self._timeout:g} s" if running else ""
        self._abandon(running)
        raise StorageError(
            f"the changelog could not be uploaded to {self._storage.url} in {self._attempts} tries: "
            f"{'; '.join([*errors, slow] if slow else errors)}"
        )

    def _wait(self, running: dict[Future[None], str], errors: list[str]) -> str | None:
        """Wait until an attempt succeeds; returns its path, or None at the timeout. Failed attempts are taken out."""
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
                # A write that failed may have stored the file all the same.
                delete_unneeded(self._storage, [path])
            time.sleep(self._retry_delay)
        return None

    def _abandon(self, running: dict[Future[None], str]) -> None:
        """Delete what these attempts store, as soon as they end."""
        for one, path in running.items():
            one.add_done_callback(partial(self._delete_when_done, path))

    def _delete_when_done(self, path: str, _done: Future[None]) -> None:
        delete_unneeded(self._storage, [path])

    def _count(self, requests: int = 0, attempts: int = 0, failures: int = 0, bytes: int = 0) -> None:
        with self._lock:
            figures = self.figures
            figures.requests += requests
            figures.attempts += attempts
            figures.failures += failures
            figures.bytes += bytes

    def close(self) -> None:
        """Start no more attempts. Attempts that run end on their own."""
        self._pool.shutdown(wait=False)
