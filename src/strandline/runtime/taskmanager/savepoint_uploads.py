"""Uploads the files of a savepoint, all of them, into the savepoint's own folder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.taskmanager.snapshot_uploads import SubtaskSnapshot
from strandline.storage import Storage
from strandline.storage.checksums import checksum
from strandline.storage.external import external_path

UPLOADS = 4


def upload_savepoint(storage: Storage, snapshots: Sequence[SubtaskSnapshot]) -> list[SubtaskAck]:
    """Upload all files of some subtasks. Handles name them by their full path, so that anybody can delete them."""

    def put(one: tuple[SubtaskSnapshot, tuple[str, str, int, str, bool]]) -> StateFile:
        snapshot, (name, path, size, identity, shared) = one
        unique = f"{uuid.uuid4().hex}-{snapshot.subtask}-{name}"
        storage.upload(Path(path), unique)
        return StateFile(name, identity, shared, FileHandle(external_path(storage, unique), size, checksum(Path(path))))

    acks = []
    with ThreadPoolExecutor(UPLOADS) as pool:
        for snapshot in snapshots:
            started = time.monotonic()
            report = snapshot.report
            files = tuple(pool.map(put, [(snapshot, file) for file in report.files]))
            size = sum(file.size for file in files)
            acks.append(
                SubtaskAck(
                    state=SubtaskState(
                        operator=report.operator,
                        subtask=snapshot.subtask,
                        key_group_start=snapshot.key_groups.start,
                        key_group_end=snapshot.key_groups.stop,
                        backend=snapshot.backend,
                        incremental=any(file.shared for file in files),
                        files=files,
                        states=tuple(report.states),
                    ),
                    uploaded=tuple(file.handle for file in files if file.handle is not None),
                    barrier_time=snapshot.barrier_time,
                    ack_time=time.time(),
                    sync_ms=report.sync_ms,
                    async_ms=report.write_ms + (time.monotonic() - started) * 1000,
                    checkpointed_bytes=size,
                    full_bytes=size,
                )
            )
    return acks
