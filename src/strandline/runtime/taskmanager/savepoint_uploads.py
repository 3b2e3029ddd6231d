"""Uploads all files of a savepoint into the savepoint's own folder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from strandline.checkpoint.metadata import FileHandle, StateFile
from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.taskmanager.snapshot_uploads import SubtaskSnapshot
from strandline.storage import Storage
from strandline.storage.checksums import checksum
from strandline.storage.external import external_path

UPLOADS = 4


def upload_savepoint(storage: Storage, snapshots: Sequence[SubtaskSnapshot]) -> list[SubtaskAck]:
    """Upload all files of some subtasks. Handles have full paths, so that every process can find and delete the files.

    Raises `StorageError`.
    """

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
            # A savepoint may hold a full snapshot even if checkpoints are incremental.
            owner = replace(snapshot.owner, incremental=any(file.shared for file in files))
            acks.append(
                owner.acknowledge(
                    files,
                    barrier_time=snapshot.barrier_time,
                    sync_ms=report.sync_ms,
                    async_ms=report.write_ms + (time.monotonic() - started) * 1000,
                    checkpointed_bytes=sum(file.size for file in files),
                    uploaded=(file.handle for file in files if file.handle is not None),
                )
            )
    return acks
