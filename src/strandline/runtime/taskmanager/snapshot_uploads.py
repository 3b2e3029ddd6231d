"""Uploads snapshots: new files go to durable storage, files of a confirmed checkpoint are only named again.

A short checkpoint interval makes many small files. Very small files that no later checkpoint can share travel inside
`_metadata`. Small files of all slots of a task manager are packed into one uploaded file; a handle then names a part of
it. A pack can only be deleted as a whole. When the parts that a checkpoint still needs make up too little of a pack,
they are uploaded again. So packs take up at most `max_amplification` times what is needed of them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import Subtask, SubtaskAck
from strandline.errors import CheckpointError
from strandline.runtime.protocol.messages import SnapshotReport, UploadSettings
from strandline.runtime.taskmanager.acknowledgement import StateOwner
from strandline.runtime.taskmanager.cleanup import delete_unneeded
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.packing import PACK_BYTES, Pack
from strandline.state.chunks import grouped
from strandline.storage import Storage
from strandline.storage.paths import JobPaths


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """The snapshot of one operator's subtask, on local disk."""

    subtask: int
    key_groups: range
    backend: str
    incremental: bool
    report: SnapshotReport
    barrier_time: float

    @property
    def owner(self) -> StateOwner:
        """The subtask, as its acknowledgement names it."""
        report = self.report
        return StateOwner(
            report.operator, self.subtask, self.key_groups, self.backend, self.incremental, tuple(report.states)
        )


@dataclass(slots=True)
class _File:
    """A file of a snapshot, and where it is stored."""

    name: str
    local: Path
    size: int
    identity: str
    """The identity that the slot knows."""
    shared: bool
    stored_identity: str
    """The identity that checkpoints know. A file that is uploaded again on purpose gets a new one."""
    stored: StateFile | None = None
    new: bool = False
    """Whether it was stored for this checkpoint."""
    done: float = 0.0

    def stored_as(self, handle: FileHandle | None, inline: bytes | None = None, *, new: bool = True) -> None:
        """Note where the file is: uploaded, or inside `_metadata`."""
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
    """The running upload of one checkpoint."""

    checkpoint_id: int
    lasting: bool
    full: bool
    begun: list[str] = field(default_factory=list)
    """Paths at which a file may be stored by now."""
    work: list[Future[None]] = field(default_factory=list)
    """The uploads of its files. Those that have not begun are cancelled when the checkpoint is given up."""
    given_up: bool = False


class SnapshotUploader:
    """Uploads the snapshots of one task manager's slots, and remembers what confirmed checkpoints hold."""

    def __init__(
        self,
        storage: Storage,
        job: str,
        settings: UploadSettings,
        *,
        threads: int = 4,
        copies: LocalCopies | None = None,
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        """`copies` keeps every uploaded file on local disk, too. Packs are at most about `pack_bytes` large."""
        self._storage = storage
        self._copies = copies
        self._paths = JobPaths(job)
        self._settings = settings
        self._pack_bytes = pack_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        self._lock = threading.RLock()
        """Protects the records below. Nobody waits for storage while holding it."""
        self._confirmed: dict[Subtask, dict[str, _Held]] = {}
        """The shared files of the newest confirmed checkpoint, by the identity that the slot knows."""
        self._bases: dict[Subtask, int] = {}
        """The checkpoint that the files of each subtask in `_confirmed` belong to."""
        self._pending: dict[int, dict[Subtask, dict[str, _Held]]] = {}
        """The same of each pending checkpoint."""
        self._running: dict[int, _Upload] = {}
        self._named: dict[int, set[str]] = {}
        """The identities of all files of each checkpoint that may still complete, and of the newest that did."""

    def start_from(self, subtask: Subtask, states: Iterable[SubtaskState], owned: bool, checkpoint_id: int = 0) -> None:
        """Build on the job's newest completed checkpoint: files that it holds of a subtask are not uploaded again.

        If the job does not own that checkpoint, everything is uploaded once.
        """
        held = {
            file.identity: _Held(file.identity, file.handle)
            for state in states
            for file in state.files
            if owned and file.shared and not file.is_segment and file.handle is not None
        }
        with self._lock:
            self._confirmed[subtask] = held
            self._bases[subtask] = checkpoint_id

    def forget(self, subtasks: Iterable[Subtask]) -> None:
        """Forget what was uploaded of these subtasks: everything is uploaded again."""
        with self._lock:
            for subtask in subtasks:
                self._confirmed.pop(subtask, None)

    def forget_older(self, checkpoint_id: int) -> None:
        """Forget subtasks that build on a checkpoint before the one that has completed.

        Another task manager had the subtask at the barrier, and this one got it from the checkpoint before. The files
        of that one may be deleted by now, so everything is uploaded again.
        """
        with self._lock:
            self.forget([subtask for subtask, base in self._bases.items() if base < checkpoint_id])

    def upload(
        self, checkpoint_id: int, snapshots: Sequence[SubtaskSnapshot], lasting: bool = False, full: bool = False
    ) -> list[SubtaskAck]:
        """Make the snapshots of all slots durable; returns their acknowledgements.

        `lasting`: the snapshots are not for one checkpoint, so none of their files may go with one. `full`: all files
        are uploaded, also those that the last confirmed checkpoint holds.

        Raises `StorageError` if a file cannot be uploaded, and `CheckpointError` if the checkpoint is given up
        meanwhile. What was uploaded until then is deleted.
        """
        started = time.perf_counter()
        files = [[_File(n, Path(p), size, i, shared, i) for n, p, size, i, shared in s.report.files] for s in snapshots]
        upload = _Upload(checkpoint_id, lasting, full)
        with self._lock:
            self._running[checkpoint_id] = upload
        try:
            self._store_all(upload, snapshots, files)
            with self._lock:
                if not upload.given_up:
                    self._record(checkpoint_id, snapshots, files)
            if upload.given_up:
                delete_unneeded(self._storage, upload.begun)
                raise _given_up(checkpoint_id)
        finally:
            with self._lock:
                if self._running.get(checkpoint_id) is upload:
                    del self._running[checkpoint_id]
        return [self._acknowledged(snapshot, own, started) for snapshot, own in zip(snapshots, files, strict=True)]

    def _record(
        self, checkpoint_id: int, snapshots: Sequence[SubtaskSnapshot], files: Sequence[Sequence[_File]]
    ) -> None:
        """Remember what the checkpoint holds, in case it completes. The caller holds the lock."""
        named = self._named.setdefault(checkpoint_id, set())
        pending = self._pending.setdefault(checkpoint_id, {})
        for snapshot, own in zip(snapshots, files, strict=True):
            named.update(file.stored.identity for file in own if file.stored is not None)
            pending[(snapshot.report.operator, snapshot.subtask)] = {
                file.identity: _Held(file.stored_identity, file.stored.handle)
                for file in own
                if file.shared and file.stored is not None and file.stored.handle is not None
            }

    def _acknowledged(self, snapshot: SubtaskSnapshot, files: list[_File], started: float) -> SubtaskAck:
        report = snapshot.report
        stored = tuple(file.stored for file in files if file.stored is not None)
        if self._copies is not None:
            for file in files:
                if file.stored is not None and file.stored.handle is not None:
                    self._copies.keep(file.stored.identity, file.local)
        return snapshot.owner.acknowledge(
            stored,
            barrier_time=snapshot.barrier_time,
            sync_ms=report.sync_ms,
            async_ms=report.write_ms + (max((file.done for file in files), default=started) - started) * 1000,
            checkpointed_bytes=sum(file.size for file in files if file.new),
            uploaded=(f.stored.handle for f in files if f.new and f.stored and f.stored.handle is not None),
        )

    # --- one checkpoint ------------------------------------------------------------------------------

    def _store_all(
        self, upload: _Upload, snapshots: Sequence[SubtaskSnapshot], files: Sequence[Sequence[_File]]
    ) -> None:
        missing = self._name_known(snapshots, files, upload.full)
        large: list[_File] = []
        small: list[_File] = []
        for file in missing:
            if not file.shared and file.size <= self._settings.inline_bytes:
                file.stored_as(None, file.local.read_bytes())
            else:
                (small if file.size < self._settings.small_bytes else large).append(file)
        try:
            for pack in (*([file] for file in large), *grouped(small, attrgetter("size"), self._pack_bytes)):
                with self._lock:
                    if upload.given_up:
                        raise _given_up(upload.checkpoint_id)
                    upload.work.append(self._pool.submit(self._store, upload, pack))
            for one in upload.work:
                one.result()
        except BaseException as error:
            # Nobody will ever refer to these files, and the slots may release the snapshot that uploads still read.
            wait([one for one in upload.work if not one.cancel()])
            delete_unneeded(self._storage, upload.begun)
            if isinstance(error, CancelledError) and upload.given_up:
                raise _given_up(upload.checkpoint_id) from None
            raise

    def _name_known(
        self, snapshots: Sequence[SubtaskSnapshot], files: Sequence[Sequence[_File]], full: bool
    ) -> list[_File]:
        """Name the files that the last confirmed checkpoint holds; returns the files that must be uploaded.

        Small files in a pack that is mostly unneeded must be uploaded again, too, and all files if `full`.
        """
        known: list[tuple[_File, _Held]] = []
        missing: list[_File] = []
        for snapshot, own in zip(snapshots, files, strict=True):
            confirmed = self._confirmed.get((snapshot.report.operator, snapshot.subtask), {})
            for file in own:
                held = confirmed.get(file.identity) if file.shared else None
                if held is None:
                    missing.append(file)
                else:
                    known.append((file, held))
        needed: Counter[str] = Counter()
        for _file, held in known:
            needed[held.handle.path] += held.handle.size
        for file, held in known:
            file.stored_identity = held.identity
            if full or held.handle.whole > needed[held.handle.path] * self._settings.max_amplification:
                # Under its old identity the registry would keep the first copy.
                file.stored_identity = f"{held.identity.partition('+')[0]}+{uuid.uuid4().hex[:8]}"
                missing.append(file)
            else:
                file.stored_as(held.handle, new=False)
        return missing

    def _store(self, upload: _Upload, files: list[_File]) -> None:
        """Upload one file as it is, or several files as a pack."""
        if upload.given_up:
            raise _given_up(upload.checkpoint_id)
        unique = f"{uuid.uuid4().hex}-{files[0].name if len(files) == 1 else 'group'}"
        lasting = upload.lasting or len(files) > 1 or files[0].shared
        path = self._paths.shared(unique) if lasting else self._paths.exclusive(upload.checkpoint_id, unique)
        pack = Pack([file.local for file in files])
        upload.begun.append(path)
        pack.store(self._storage, path)
        for file, handle in zip(files, pack.handles(path), strict=True):
            file.stored_as(handle)

    # --- the outcome of a checkpoint -----------------------------------------------------------------

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        """Note that the checkpoint is confirmed: the next snapshots build on its files.

        `replaced` has, by identity, the copy that stays of a file that two checkpoints uploaded.
        """
        with self._lock:
            for subtask, held in self._pending.pop(checkpoint_id, {}).items():
                self._bases[subtask] = checkpoint_id
                self._confirmed[subtask] = {
                    identity: _Held(one.identity, replaced.get(one.identity, one.handle))
                    for identity, one in held.items()
                }
            for older in {*self._pending, *self._running, *self._named}:
                if older < checkpoint_id:
                    self.aborted(older)  # the completion of a checkpoint gives up all older ones

    def identities(self) -> set[str]:
        """The identities of all files of the newest completed checkpoint, and of those that may still complete."""
        with self._lock:
            return set().union(*self._named.values())

    def aborted(self, checkpoint_id: int) -> None:
        """Note that the checkpoint is given up: files that are not uploaded yet will not be."""
        with self._lock:
            running = self._running.get(checkpoint_id)
            if running is not None:
                running.given_up = True
                for one in running.work:
                    one.cancel()
            self._pending.pop(checkpoint_id, None)
            self._named.pop(checkpoint_id, None)

    def begin_generation(self) -> None:
        """Give up every checkpoint that is under way: the next generation may use their ids again."""
        with self._lock:
            for checkpoint_id in {*self._pending, *self._running}:
                self.aborted(checkpoint_id)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _given_up(checkpoint_id: int) -> CheckpointError:
    return CheckpointError(f"checkpoint {checkpoint_id} was given up while it was uploaded")
