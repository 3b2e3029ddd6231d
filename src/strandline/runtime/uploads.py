"""Uploading a snapshot: new files go to durable storage, files of a confirmed checkpoint are only named again."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import StorageError
from strandline.runtime.messages import SnapshotReport
from strandline.runtime.rebuild import checksum
from strandline.storage import Storage
from strandline.storage.paths import JobPaths

log = logging.getLogger(__name__)

INLINE_BYTES = 20 * 1024
"""Files up to this size travel inside `_metadata`: a store full of tiny objects helps nobody."""

Subtask = tuple[str, int]


class SnapshotUploader:
    """Uploads the snapshots of one task manager's slots, and remembers what confirmed checkpoints hold."""

    def __init__(self, storage: Storage, job: str, threads: int = 4) -> None:
        self._storage = storage
        self._paths = JobPaths(job)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        self._confirmed: dict[Subtask, dict[str, FileHandle]] = {}
        self._pending: dict[int, dict[Subtask, dict[str, FileHandle]]] = {}

    def start_from(self, states: Iterable[SubtaskState], owned: bool) -> None:
        """What the job's newest completed checkpoint holds of these subtasks need not be uploaded again.

        A checkpoint that is not the job's own is nothing to build on: then all is uploaded once.
        """
        for state in states:
            self._confirmed[(state.operator, state.subtask)] = {
                file.identity: file.handle for file in state.files if owned and file.shared and file.handle is not None
            }

    def upload(
        self,
        checkpoint_id: int,
        subtask: int,
        key_groups: range,
        backend: str,
        incremental: bool,
        report: SnapshotReport,
        barrier_time: float,
    ) -> SubtaskAck:
        """Make one operator's snapshot durable; the acknowledgement says what the coordinator may refer to.

        If a file cannot be uploaded, that error is raised, and what was uploaded is deleted again.
        """
        started = time.perf_counter()
        base = self._confirmed.get((report.operator, subtask), {})
        files = self._store_all(checkpoint_id, base, report)
        held = {file.identity: file.handle for file, _new in files if file.shared and file.handle is not None}
        self._pending.setdefault(checkpoint_id, {})[(report.operator, subtask)] = held
        state = SubtaskState(
            operator=report.operator,
            subtask=subtask,
            key_group_start=key_groups.start,
            key_group_end=key_groups.stop,
            backend=backend,
            incremental=incremental,
            files=tuple(file for file, _new in files),
            states=tuple(report.states),
        )
        return SubtaskAck(
            state=state,
            uploaded=tuple(file.handle for file, new in files if new and file.handle is not None),
            barrier_time=barrier_time,
            ack_time=time.time(),
            sync_ms=report.sync_ms,
            async_ms=report.write_ms + (time.perf_counter() - started) * 1000,
            checkpointed_bytes=sum(new for _file, new in files),
            full_bytes=sum(file[2] for file in report.files),
        )

    def _store_all(
        self, checkpoint_id: int, base: dict[str, FileHandle], report: SnapshotReport
    ) -> list[tuple[StateFile, int]]:
        begun: list[str] = []
        work = [self._pool.submit(self._store, checkpoint_id, base, begun, *file) for file in report.files]
        try:
            return [one.result() for one in work]
        except BaseException:
            # Nobody will ever hear of these files, and an upload that goes on would read a snapshot that is released.
            wait([one for one in work if not one.cancel()])
            try:
                self._storage.delete(begun)
            except StorageError as error:
                log.warning("checkpoint %d: could not delete %d files: %s", checkpoint_id, len(begun), error)
            raise

    def _store(
        self,
        checkpoint_id: int,
        base: dict[str, FileHandle],
        begun: list[str],
        name: str,
        path: str,
        size: int,
        identity: str,
        shared: bool,
    ) -> tuple[StateFile, int]:
        known = base.get(identity) if shared else None
        if known is not None:
            return StateFile(name, identity, shared, known, None), 0
        local = Path(path)
        if size <= INLINE_BYTES and not shared:
            return StateFile(name, identity, False, None, local.read_bytes()), size
        unique = f"{uuid.uuid4().hex}-{name}"
        target = self._paths.shared(unique) if shared else self._paths.exclusive(checkpoint_id, unique)
        begun.append(target)
        self._storage.upload(local, target)
        return StateFile(name, identity, shared, FileHandle(target, size, checksum(local)), None), size

    def completed(self, checkpoint_id: int, replaced: dict[str, FileHandle]) -> None:
        """The checkpoint is confirmed: from now on its files serve as the base.

        `replaced` names, by identity, the copies that survive where two checkpoints had uploaded the same file.
        """
        for subtask, held in self._pending.pop(checkpoint_id, {}).items():
            self._confirmed[subtask] = {identity: replaced.get(identity, handle) for identity, handle in held.items()}
        for older in [pending for pending in list(self._pending) if pending < checkpoint_id]:
            self.aborted(older)  # given up with this completion, or before its last upload had ended

    def aborted(self, checkpoint_id: int) -> None:
        self._pending.pop(checkpoint_id, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
