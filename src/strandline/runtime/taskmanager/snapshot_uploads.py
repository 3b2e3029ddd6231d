"""Uploading snapshots: new files go to durable storage, files of a confirmed checkpoint are only named again.

A short checkpoint interval makes many small files. Very small ones that no later checkpoint can share travel inside
`_metadata`. Small ones of all slots of a task manager are put together into one uploaded file; a handle then names a
part of it. Such a file can only be deleted as a whole, so parts that a checkpoint still needs are uploaded again once
they make up too little of it: what storage holds of these files is at most `max_amplification` times what is needed.
"""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointError, StorageError
from strandline.runtime.protocol.messages import SnapshotReport, UploadSettings
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.state.chunks import grouped
from strandline.state.disk_full import disk_full_error
from strandline.storage import Storage
from strandline.storage.checksums import checksum, checksum_text
from strandline.storage.paths import JobPaths

log = logging.getLogger(__name__)

GROUP_BYTES = 32 << 20
"""Small files are put together up to about this size."""

Subtask = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """The snapshot of one operator's subtask, on local disk."""

    subtask: int
    key_groups: range
    backend: str
    incremental: bool
    report: SnapshotReport
    barrier_time: float


@dataclass(slots=True)
class _File:
    """A file of a snapshot, and where it went."""

    name: str
    local: Path
    size: int
    identity: str
    """As the slot knows it."""
    shared: bool
    stored_identity: str
    """As checkpoints know it: a file that is uploaded once more on purpose counts as another one."""
    stored: StateFile | None = None
    new: bool = False
    """Whether it went to storage for this checkpoint."""
    done: float = 0.0

    def settle(self, handle: FileHandle | None, inline: bytes | None = None, *, new: bool = True) -> None:
        self.stored = StateFile(self.name, self.stored_identity, self.shared, handle, inline)
        self.new = new
        self.done = time.perf_counter()


@dataclass(frozen=True, slots=True)
class _Held:
    """A file of a confirmed checkpoint."""

    identity: str
    handle: FileHandle


@dataclass(slots=True)
class _Upload:
    """One checkpoint's upload while it is under way."""

    checkpoint_id: int
    lasting: bool
    begun: list[str] = field(default_factory=list)
    """Paths that may hold something by now."""
    given_up: bool = False


class SnapshotUploader:
    """Uploads the snapshots of one task manager's slots, and remembers what confirmed checkpoints hold."""

    def __init__(
        self,
        storage: Storage,
        job: str,
        settings: UploadSettings | None = None,
        threads: int = 4,
        copies: LocalCopies | None = None,
    ) -> None:
        """`copies` keeps every uploaded file on local disk, too."""
        self._storage = storage
        self._copies = copies
        self._paths = JobPaths(job)
        self._settings = settings or UploadSettings()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        # What the newest confirmed checkpoint, and each pending one, holds of a subtask's shared files, by the identity
        # that the slot knows them by.
        self._confirmed: dict[Subtask, dict[str, _Held]] = {}
        self._pending: dict[int, dict[Subtask, dict[str, _Held]]] = {}
        self._running: dict[int, _Upload] = {}
        self._named: dict[int, set[str]] = {}
        """The identities of all files of each checkpoint that may still complete, and of the newest that did."""

    def start_from(self, subtask: Subtask, states: Iterable[SubtaskState], owned: bool) -> None:
        """What the job's newest completed checkpoint holds of a subtask's state need not be uploaded again.

        A checkpoint that is not the job's own is nothing to build on: then all is uploaded once.
        """
        self._confirmed[subtask] = {
            file.identity: _Held(file.identity, file.handle)
            for state in states
            for file in state.files
            if owned and file.shared and not file.is_segment and file.handle is not None
        }

    def forget(self, subtasks: Iterable[Subtask]) -> None:
        """Nothing that was uploaded of these subtasks can be relied on."""
        for subtask in subtasks:
            self._confirmed.pop(subtask, None)

    def upload(
        self, checkpoint_id: int, snapshots: Sequence[SubtaskSnapshot], lasting: bool = False
    ) -> list[SubtaskAck]:
        """Make snapshots durable, those of all slots together; the acknowledgements say what may be referred to.

        `lasting`: they are not for one checkpoint, so none of their files may go with one.

        If a file cannot be uploaded, or the checkpoint is given up meanwhile, that error is raised, and what was
        uploaded is deleted again.
        """
        started = time.perf_counter()
        files = [[_File(n, Path(p), size, i, shared, i) for n, p, size, i, shared in s.report.files] for s in snapshots]
        upload = self._running[checkpoint_id] = _Upload(checkpoint_id, lasting)
        try:
            self._store_all(upload, snapshots, files)
        finally:
            del self._running[checkpoint_id]
        return [
            self._acknowledged(checkpoint_id, snapshot, own, started)
            for snapshot, own in zip(snapshots, files, strict=True)
        ]

    def _acknowledged(
        self, checkpoint_id: int, snapshot: SubtaskSnapshot, files: list[_File], started: float
    ) -> SubtaskAck:
        report = snapshot.report
        stored = tuple(file.stored for file in files if file.stored is not None)
        self._named.setdefault(checkpoint_id, set()).update(file.identity for file in stored)
        if self._copies is not None:
            for file in files:
                if file.stored is not None and file.stored.handle is not None:
                    self._copies.keep(file.stored.identity, file.local)
        self._pending.setdefault(checkpoint_id, {})[(report.operator, snapshot.subtask)] = {
            file.identity: _Held(file.stored_identity, file.stored.handle)
            for file in files
            if file.shared and file.stored is not None and file.stored.handle is not None
        }
        state = SubtaskState(
            operator=report.operator,
            subtask=snapshot.subtask,
            key_group_start=snapshot.key_groups.start,
            key_group_end=snapshot.key_groups.stop,
            backend=snapshot.backend,
            incremental=snapshot.incremental,
            files=stored,
            states=tuple(report.states),
        )
        return SubtaskAck(
            state=state,
            uploaded=tuple(f.stored.handle for f in files if f.new and f.stored and f.stored.handle is not None),
            barrier_time=snapshot.barrier_time,
            ack_time=time.time(),
            sync_ms=report.sync_ms,
            async_ms=report.write_ms + (max((file.done for file in files), default=started) - started) * 1000,
            checkpointed_bytes=sum(file.size for file in files if file.new),
            full_bytes=sum(file.size for file in files),
        )

    # --- one checkpoint ------------------------------------------------------------------------------

    def _store_all(
        self, upload: _Upload, snapshots: Sequence[SubtaskSnapshot], files: Sequence[Sequence[_File]]
    ) -> None:
        missing = self._name_known(snapshots, files)
        large: list[_File] = []
        small: list[_File] = []
        for file in missing:
            if not file.shared and file.size <= self._settings.inline_bytes:
                file.settle(None, file.local.read_bytes())
            else:
                (small if file.size < self._settings.small_bytes else large).append(file)
        groups = list(grouped(small, attrgetter("size"), GROUP_BYTES))
        large += [group[0] for group in groups if len(group) == 1]
        work: list[Future[None]] = []
        try:
            for file in large:
                work.append(self._pool.submit(self._store_one, upload, file))
            for group in groups:
                if len(group) > 1:
                    work.append(self._pool.submit(self._store_group, upload, group))
            for one in work:
                one.result()
        except BaseException:
            # Nobody will ever hear of these files, and an upload that goes on would read a snapshot that is released.
            wait([one for one in work if not one.cancel()])
            try:
                self._storage.delete(upload.begun)
            except StorageError as error:
                log.warning("checkpoint %d: cannot delete %d files: %s", upload.checkpoint_id, len(upload.begun), error)
            raise

    def _name_known(self, snapshots: Sequence[SubtaskSnapshot], files: Sequence[Sequence[_File]]) -> list[_File]:
        """Name what the last confirmed checkpoint holds; returns what has to be uploaded.

        That includes small files in an upload of which too little is needed by now.
        """
        known: list[tuple[_File, _Held]] = []
        missing: list[_File] = []
        for snapshot, own in zip(snapshots, files, strict=True):
            base = self._confirmed.get((snapshot.report.operator, snapshot.subtask), {})
            for file in own:
                held = base.get(file.identity) if file.shared else None
                if held is None:
                    missing.append(file)
                else:
                    known.append((file, held))
        needed: Counter[str] = Counter()
        for _file, held in known:
            needed[held.handle.path] += held.handle.size
        for file, held in known:
            file.stored_identity = held.identity
            if held.handle.whole > needed[held.handle.path] * self._settings.max_amplification:
                # Under its old identity the registry would keep the first copy.
                file.stored_identity = f"{held.identity.partition('+')[0]}+{uuid.uuid4().hex[:8]}"
                missing.append(file)
            else:
                file.settle(held.handle, new=False)
        return missing

    def _store_one(self, upload: _Upload, file: _File) -> None:
        unique = f"{uuid.uuid4().hex}-{file.name}"
        lasting = file.shared or upload.lasting
        path = self._paths.shared(unique) if lasting else self._paths.exclusive(upload.checkpoint_id, unique)
        self._put(upload, path, lambda: self._storage.upload(file.local, path))
        file.settle(FileHandle(path, file.size, checksum(file.local)))

    def _store_group(self, upload: _Upload, group: list[_File]) -> None:
        path = self._paths.shared(f"{uuid.uuid4().hex}-group")
        parts: list[tuple[int, str]] = []
        with tempfile.NamedTemporaryFile(prefix="strandline-group-", dir=group[0].local.parent.parent) as target:
            with disk_full_error(Path(target.name)):
                whole = 0
                for file in group:
                    content = file.local.read_bytes()
                    parts.append((whole, checksum_text(zlib.crc32(content))))
                    target.write(content)
                    whole += len(content)
                target.flush()
            self._put(upload, path, lambda: self._storage.upload(Path(target.name), path))
        for file, (offset, found) in zip(group, parts, strict=True):
            file.settle(FileHandle(path, file.size, found, offset, whole))

    def _put(self, upload: _Upload, path: str, put: Callable[[], None]) -> None:
        if upload.given_up:
            raise CheckpointError(f"checkpoint {upload.checkpoint_id} was given up while it was uploaded")
        upload.begun.append(path)
        put()

    # --- what becomes of it --------------------------------------------------------------------------

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        """The checkpoint is confirmed: from now on its files serve as the base.

        `replaced` names, by identity, the copies that survive where two checkpoints had uploaded the same file.
        """
        for subtask, held in self._pending.pop(checkpoint_id, {}).items():
            self._confirmed[subtask] = {
                identity: _Held(one.identity, replaced.get(one.identity, one.handle)) for identity, one in held.items()
            }
        for older in {*self._pending, *self._running, *self._named}:
            if older < checkpoint_id:
                self.aborted(older)  # given up with this completion, or before its last upload had ended

    def identities(self) -> set[str]:
        """The files of the newest completed checkpoint, and of those that may still complete."""
        return set().union(*list(self._named.values()))

    def aborted(self, checkpoint_id: int) -> None:
        """The checkpoint is given up: what is not uploaded yet need not be."""
        running = self._running.get(checkpoint_id)
        if running is not None:
            running.given_up = True
        self._pending.pop(checkpoint_id, None)
        self._named.pop(checkpoint_id, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
