"""The queue of sealed segments on their way to durable storage.

A slot offers a segment as soon as it is sealed. The segments of all slots go into one file while Spark is still busy
with the rows. `wait_until_durable` waits for the rest before the batch is decided. So a lost host cannot take a decided
batch back, and uploads that fall behind slow processing down. If uploads fail or are slow, batches go on with local
segments alone up to a bound. A slow upload goes on beside them, and its segments are durable when it ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from strandline.checkpoint.metadata import FileHandle, StateFile, paths_of, segment_file
from strandline.checkpoint.pending import Subtask
from strandline.errors import StorageError
from strandline.runtime.protocol.messages import Sealed, SegmentUpload
from strandline.runtime.taskmanager.changelog.segment_uploader import SegmentUploader, Upload
from strandline.runtime.taskmanager.changelog.shared import Shared
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.state.chunks import grouped
from strandline.storage import Storage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class QueuedSegment:
    """A sealed segment, and how far its upload is."""

    sealed: Sealed
    durable: bool = False
    file: StateFile | None = None
    """The uploaded file; None if it is not uploaded, or the segment is empty."""
    error: StorageError | None = None
    """Why the last upload failed, or is not done."""
    upload: Upload | None = None
    """The upload that takes this segment along. Its tries may go on when `error` is set."""
    uploading: bool = False
    void: bool = False
    """Whether another attempt replaced it: it will never commit."""

    @property
    def subtask(self) -> Subtask:
        return self.sealed.operator, self.sealed.subtask

    @property
    def batch(self) -> int:
        return self.sealed.batch

    @property
    def waiting(self) -> bool:
        """Whether the next upload should take it."""
        return not (self.durable or self.uploading or self.void or self.error)

    @property
    def finished(self) -> bool:
        """Whether there is nothing to wait for: it is durable, its upload failed, or nobody needs it."""
        return self.durable or self.void or self.error is not None

    def link(self) -> None:
        """Give it a local file of its own: the slot deletes the first one once it has a local snapshot."""
        own = f"{self.sealed.path}.behind"
        os.link(self.sealed.path, own)
        self.sealed = msgspec.structs.replace(self.sealed, path=own)


class SegmentQueue:
    """Uploads the segments of a task manager's slots in the order of their batches."""

    def __init__(self, shared: Shared, storage: Storage, uploader: SegmentUploader, max_behind_bytes: int) -> None:
        """Batches commit without durable segments as long as those take up at most `max_behind_bytes`."""
        self.wait_ms = 0.0
        """How long batches have waited for their segments to become durable, in all."""
        self.behind: list[QueuedSegment] = []
        """Segments of committed batches that could not be uploaded so far."""
        self.waiters = 0
        """How many threads wait: while there are any, every segment is uploaded at once."""
        self._shared = shared
        self._lock = shared.lock
        self._storage = storage
        self._uploader = uploader
        self._max_behind_bytes = max_behind_bytes
        self._newest: dict[Subtask, QueuedSegment] = {}
        """The segment of each subtask whose batch is not decided yet."""
        self._decided = -1
        """The last decided batch."""

    @property
    def behind_bytes(self) -> int:
        return sum(segment.sealed.size for segment in self.behind)

    # --- from sealing to commit ----------------------------------------------------------------------

    def offer(self, sealed: Sealed) -> None:
        """Take a segment that a slot has sealed. Late, repeated and outdated offers are ignored.

        The upload begins when all slots have offered a segment of this operator, or when somebody waits.
        """
        with self._lock:
            subtask = (sealed.operator, sealed.subtask)
            known = self._newest.get(subtask)
            if sealed.batch <= self._decided:
                return
            if known is not None and (known.batch, known.sealed.round) >= (sealed.batch, sealed.round):
                return
            self.void(subtask)
            self._newest[subtask] = QueuedSegment(sealed, durable=sealed.entries == 0)
            self._lock.notify_all()

    def void(self, subtask: Subtask) -> None:
        """Give up the undecided segment of a subtask: it will never commit."""
        with self._lock:
            segment = self._newest.pop(subtask, None)
            if segment is not None:
                segment.void = True
                if segment.file is not None:
                    self._shared.files.void(segment.file)

    def wait_until_durable(self, sealed: Iterable[Sealed]) -> dict[Subtask, SegmentUpload]:
        """Wait until the segments of a batch are durable, or their upload has failed.

        Returns for each subtask whether its segment is durable, and its file (None for an empty segment). Goes on
        waiting while more than the permitted bytes are not durable.
        """
        wanted = list(sealed)
        for one in wanted:
            self.offer(one)
        started = time.monotonic()
        with self._lock:
            segments = [self._newest[one.operator, one.subtask] for one in wanted]
            while True:
                self.persist([*self.behind, *segments])
                failed = sum(one.sealed.size for one in (*self.behind, *segments) if one.error)
                if failed <= self._max_behind_bytes or self._shared.closed:
                    break
                log.warning("%d bytes of the changelog are not durable: processing waits for storage", failed)
            self.wait_ms += (time.monotonic() - started) * 1000
            return {segment.subtask: SegmentUpload(segment.durable, segment.file) for segment in segments}

    def persist(self, segments: Sequence[QueuedSegment]) -> None:
        """Try to upload `segments`; returns when every one is durable or has failed. The caller holds the lock."""
        for segment in segments:
            segment.error = None
        self.waiters += 1
        self._lock.notify_all()
        self._lock.wait_for(lambda: self._shared.closed or all(segment.finished for segment in segments))
        self.waiters -= 1

    def commit(self, batch: int) -> None:
        """Make the segments of a decided batch part of the changelog. May be said again."""
        with self._lock:
            for subtask, segment in list(self._newest.items()):
                if segment.batch != batch:
                    continue
                del self._newest[subtask]
                if not segment.durable:
                    self._fall_behind(segment)
                elif segment.file is not None:
                    self._shared.files.append(subtask, segment.file)
                    self._shared.local.keep(segment.file, Path(segment.sealed.path))
            self._decided = max(self._decided, batch)

    def _fall_behind(self, segment: QueuedSegment) -> None:
        try:
            segment.link()
            self.behind.append(segment)
        except OSError as error:
            # Without this segment the changelog has a gap: the state must be materialized again.
            segment.void = True
            self._shared.files.open(segment.subtask, None, ())
            log.warning("the segment of batch %d of %s is lost: %s", segment.batch, segment.subtask, error)

    def behind_at_barrier(self) -> tuple[QueuedSegment, ...]:
        """The segments that a checkpoint needs and that are not durable. The caller holds the lock."""
        files = self._shared.files
        return tuple(segment for segment in self.behind if segment.batch > files[segment.subtask].base_batch)

    def clear(self) -> None:
        """Forget everything: the generation ends. The caller holds the lock."""
        for subtask in list(self._newest):
            self.void(subtask)
        for segment in self.behind:
            segment.void = True
        self.behind.clear()
        self._decided = -1
        self._lock.notify_all()

    # --- uploading -----------------------------------------------------------------------------------

    def upload_loop(self) -> None:
        """Upload segments until the changelog is closed."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._shared.closed or self._ready())
                if self._shared.closed:
                    return
                taken = [segment for segment in (*self.behind, *self._newest.values()) if segment.waiting]
                for segment in taken:
                    segment.uploading = True
                uploads = self._uploads(taken)
            self._uploader.settle(uploads)
            with self._lock:
                for segment in taken:
                    self._settled(segment)
                self._lock.notify_all()

    def _uploads(self, segments: Sequence[QueuedSegment]) -> list[Upload]:
        """The uploads that go on, and new ones for segments whose upload has ended, or has not begun."""
        going_on = {segment.upload: None for segment in segments if segment.upload and segment.upload.running}
        fresh = [segment for segment in segments if segment.upload not in going_on]
        new = [
            self._new_upload(group)
            for group in grouped(fresh, lambda segment: segment.sealed.size, self._uploader.pack_bytes)
        ]
        return [*going_on, *new]

    def _new_upload(self, group: Sequence[QueuedSegment]) -> Upload:
        upload = Upload(
            sources=lambda: [Path(segment.sealed.path) for segment in group],
            size=sum(segment.sealed.size for segment in group),
            stored=lambda handles: self._uploaded(group, handles),
        )
        for segment in group:
            segment.upload = upload
        return upload

    def _settled(self, segment: QueuedSegment) -> None:
        """Note that nobody waits for an upload any more. An upload without a running try is forgotten."""
        segment.uploading = False
        if segment.durable or segment.upload is None:
            return
        try:
            self._uploader.result(segment.upload)
        except StorageError as error:
            segment.error = error
        if not segment.upload.running:
            segment.upload = None

    def _ready(self) -> bool:
        """Whether an upload should begin: somebody waits, or all slots have offered their segment of a step."""
        waiting = [segment for segment in self._newest.values() if segment.waiting]
        if self.waiters:
            return bool(waiting) or any(segment.waiting for segment in self.behind)
        offered = Counter(_step(segment) for segment in self._newest.values())
        return any(offered[_step(segment)] == len(self._shared.slots) for segment in waiting)

    def _uploaded(self, group: Sequence[QueuedSegment], handles: Sequence[FileHandle]) -> None:
        """Make segments durable whose upload has succeeded, however late. Called by the thread of the upload."""
        files = [segment_file(segment.batch, handle) for segment, handle in zip(group, handles, strict=True)]
        needed: set[str] = set()
        with self._lock:
            for segment, file in zip(group, files, strict=True):
                segment.upload = segment.error = None
                if segment.void:
                    continue
                needed.update(paths_of([file]))
                self._shared.files.hold(file)
                segment.file = file
                segment.durable = True
                if segment in self.behind:
                    self._catch_up(segment, file)
            self._lock.notify_all()
        delete_unneeded(self._storage, set(paths_of(files)) - needed)

    def _catch_up(self, segment: QueuedSegment, file: StateFile) -> None:
        """Make a segment part of the changelog whose batch was committed before it was durable."""
        path = Path(segment.sealed.path)
        self.behind.remove(segment)
        self._shared.files.append(segment.subtask, file)
        self._shared.local.keep(file, path, temporary=True)
        path.unlink(missing_ok=True)


def _step(segment: QueuedSegment) -> tuple[str, int, int]:
    """The step of a batch that all slots work on at the same time."""
    return segment.sealed.operator, segment.sealed.batch, segment.sealed.round
