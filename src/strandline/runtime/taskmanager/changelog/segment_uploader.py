"""Uploads segments: one file for the segments of all slots, and another try where an upload is slow or fails.

Nothing that was begun is thrown away: a try that was too slow for its batch goes on, and counts when it succeeds. So an
upload that takes minutes becomes durable like any other. There is no queue of tries: a try begins only if one of the
threads is free, and reads its segments from disk when it begins. Tries that hang therefore take up a bounded number of
threads, and a bounded memory.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle
from strandline.errors import StorageError
from strandline.runtime.taskmanager.changelog.upload_pace import UploadPace
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.runtime.taskmanager.packing import PACK_BYTES, Pack
from strandline.state.chunks import grouped
from strandline.storage import JobPaths, Storage
from strandline.storage.external import external_path

log = logging.getLogger(__name__)

THREADS = 8
"""So many tries can run at the same time."""


@dataclass(slots=True)
class UploadFigures:
    """What was uploaded so far."""

    requests: int = 0
    attempts: int = 0
    failures: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class Upload:
    """One file on its way to durable storage. Every try has a name of its own; the first that succeeds counts.

    The lock of the `SegmentUploader` protects it.
    """

    sources: Callable[[], Sequence[Path]]
    """Where the segments lie now. It is asked when a try begins, because segments may move."""
    size: int
    stored: Callable[[list[FileHandle]], None] = lambda handles: None
    """Told once, by the thread of the try that counts: the handles of the segments, in their order."""
    handles: list[FileHandle] | None = None
    """The handles, once the file is durable."""
    tries: int = 0
    running: int = 0
    decided: bool = False
    """Whether a try counts already: other tries delete what they store."""
    given_up: bool = False
    """Whether nobody needs the file any more."""
    last_begin: float = 0.0
    last_failure: float = 0.0
    failures: int = 0
    """How many tries failed since somebody last asked for this upload."""
    errors: list[str] = field(default_factory=list)

    def next_try(self, attempts: int, patience: float, retry_delay: float) -> float:
        """When another try should begin. Up to `attempts` tries run beside each other; further ones come rarely."""
        if not self.running:
            return self.last_failure + retry_delay
        return self.last_begin + patience * 2.0 ** max(0, self.running - attempts + 1)

    def settled(self, attempts: int) -> bool:
        """Whether there is nothing to wait for."""
        return self.handles is not None or (not self.running and self.failures >= attempts)


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
        """Upload to `storage`; a try that takes too long gets another one beside it.

        `timeout` is how long a small upload may take, in seconds; see `UploadPace`. `external`: `storage` is not the
        storage of the checkpoints, so handles name files by their full path. `retry_delay` is the number of seconds
        between a failed try and the next one.
        """
        self.figures = UploadFigures()
        self.pack_bytes = pack_bytes
        """Small segments go together into files up to about this size."""
        self._storage = storage
        self._external = external
        self._paths = paths
        self._attempts = attempts
        self._retry_delay = retry_delay
        self._pace = UploadPace(timeout)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="segment-upload")
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        """Protects everything here, and all uploads. Threads that wait for an upload wait on it."""

    def upload(self, segments: Sequence[Path]) -> list[FileHandle]:
        """Make local files durable; returns their handles, in their order.

        Raises `StorageError` when every try failed or was too slow, and `OSError` when a local file is gone. What was
        uploaded until then is deleted.
        """
        uploads = [
            Upload(lambda group=tuple(group): group, sum(path.stat().st_size for path in group))  # type: ignore[misc]
            for group in grouped(segments, lambda path: path.stat().st_size, self.pack_bytes)
        ]
        self.settle(uploads)
        try:
            return [handle for upload in uploads for handle in self.result(upload)]
        except StorageError:
            self.give_up(uploads)
            raise

    def settle(self, uploads: Sequence[Upload]) -> None:
        """Wait until each upload is durable or has failed, but no longer than its tries may take.

        What still runs then goes on, and calls `Upload.stored` if it succeeds. Calling `settle` again waits again.
        """
        with self._changed:
            for upload in uploads:
                self.figures.requests += not upload.tries
                upload.failures = 0
                upload.errors.clear()
            patience = {upload: self._pace.patience(upload.size) for upload in uploads}
            together = self._pace.patience(sum(upload.size for upload in uploads))
            deadline = time.monotonic() + self._attempts * together
            while not self._closed:
                now = time.monotonic()
                unsettled = [upload for upload in uploads if not upload.settled(self._attempts)]
                wake = deadline
                for upload in unsettled:
                    due = upload.next_try(self._attempts, patience[upload], self._retry_delay)
                    if due > now:
                        wake = min(wake, due)
                    elif self._busy < THREADS:
                        self._begin(upload, now)
                        # This thread may have slept for long. A try gets its time all the same.
                        deadline = max(deadline, now + patience[upload])
                        wake = now
                if not unsettled or now >= deadline:
                    break
                self._changed.wait(wake - now)
            self.figures.failures += sum(upload.handles is None for upload in uploads)

    def result(self, upload: Upload) -> list[FileHandle]:
        """The handles of a durable upload. Raises `StorageError` if it is not durable yet."""
        with self._changed:
            if upload.handles is not None:
                return upload.handles
            reasons = [*upload.errors]
            if self._closed:
                reasons.append("the task manager ends")
            elif upload.running:
                patience = self._pace.patience(upload.size)
                reasons.append(f"{upload.running} tries took longer than {patience:.3g} s, and go on")
            elif not upload.errors:
                reasons.append(f"{THREADS} tries of other uploads hang")
        raise StorageError(
            f"the changelog could not be uploaded to {self._storage.url} in {upload.tries} tries: {'; '.join(reasons)}"
        )

    def give_up(self, uploads: Sequence[Upload]) -> None:
        """Delete what was stored, and what the running tries of these uploads still store."""
        with self._changed:
            stored = {handle.path for upload in uploads for handle in upload.handles or ()}
            for upload in uploads:
                upload.given_up = True
        delete_unneeded(self._storage, stored)

    def close(self) -> None:
        """Start no more tries, and let nobody wait for those that run: they end on their own."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False)

    # --- a try -----------------------------------------------------------------------------------

    def _begin(self, upload: Upload, now: float) -> None:
        self._pool.submit(self._try, upload)
        upload.tries += 1
        upload.running += 1
        upload.last_begin = now
        self._busy += 1
        self.figures.attempts += 1

    def _try(self, upload: Upload) -> None:
        """Store the segments under a new name. Deletes the file if it failed, or if it does not count."""
        path = self._paths.shared(f"{uuid.uuid4().hex}-log")
        counts, error = False, ""
        try:
            counts = self._stored(upload, path)
        except Exception as problem:  # noqa: BLE001  # whatever it is: `settle` waits for this thread
            error = str(problem) or repr(problem)
        with self._changed:
            upload.running -= 1
            if error:
                upload.failures += 1
                upload.last_failure = time.monotonic()
                upload.errors = [*upload.errors, error][-self._attempts :]
            self._changed.notify_all()
        if not counts:
            # A write that failed may have stored the file all the same.
            delete_unneeded(self._storage, [path])
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def _stored(self, upload: Upload, path: str) -> bool:
        """Store the segments at `path`. Returns whether this try counts."""
        begun = time.monotonic()
        pack = Pack(upload.sources())
        pack.store(self._storage, path)
        with self._changed:
            self._pace.stored(pack.size, time.monotonic() - begun)
            if upload.decided or upload.given_up:
                return False
            upload.decided = True
        handles = pack.handles(external_path(self._storage, path) if self._external else path)
        upload.stored(handles)
        with self._changed:
            upload.handles = handles
            self.figures.bytes += pack.size
            return not upload.given_up
