"""Savepoints: self-contained folders that hold a whole job's state, and may be moved.

`<directory>/savepoint-<job>-<id>/` has a `_metadata` file, which names all other files by their names in that folder.
A canonical one consists of full snapshots that any backend can restore; a native one of the backend's own files.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    StateFile,
    SubtaskState,
    all_files,
    decode,
    encode,
)
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointNotFoundError, NotFoundError
from strandline.runtime.messages import StorageSettings
from strandline.runtime.uploads import SubtaskSnapshot
from strandline.storage import Storage, open_storage
from strandline.storage.checksums import checksum
from strandline.storage.elsewhere import inner_path, outside

METADATA = "_metadata"
UPLOADS = 4

SavepointFormat = Literal["canonical", "native"]


@dataclass(frozen=True, slots=True)
class SavepointTarget:
    """Where a savepoint is written to, and how."""

    settings: StorageSettings
    """The savepoint's own folder."""
    format: SavepointFormat

    @classmethod
    def within(cls, directory: str, job: str, format_: SavepointFormat, options: dict[str, str]) -> SavepointTarget:
        """A new folder in `directory`."""
        name = f"savepoint-{job}-{uuid.uuid4().hex[:12]}"
        return cls(StorageSettings(f"{directory.rstrip('/')}/{name}", options), format_)

    @property
    def storage(self) -> Storage:
        return open_storage(self.settings.url, self.settings.options)

    def complete(self, metadata: CheckpointMetadata) -> str:
        """Write the metadata, which makes the folder a savepoint; returns its path."""
        states = tuple(
            msgspec.structs.replace(state, files=tuple(map(_named_inside, state.files))) for state in metadata.subtasks
        )
        storage = self.storage
        storage.create(METADATA, encode(msgspec.structs.replace(metadata, subtasks=states)))
        return storage.url


def upload_savepoint(storage: Storage, snapshots: Sequence[SubtaskSnapshot]) -> list[SubtaskAck]:
    """Upload all files of some subtasks. Handles name them by their full path, so that anybody can delete them."""

    def put(one: tuple[SubtaskSnapshot, tuple[str, str, int, str, bool]]) -> StateFile:
        snapshot, (name, path, size, identity, shared) = one
        unique = f"{uuid.uuid4().hex}-{snapshot.subtask}-{name}"
        storage.upload(Path(path), unique)
        return StateFile(name, identity, shared, FileHandle(outside(storage, unique), size, checksum(Path(path))))

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


def open_savepoint(location: str, options: dict[str, str]) -> tuple[Storage, CheckpointMetadata]:
    """The savepoint at a folder, or at the `_metadata` in it.

    Raises `CheckpointNotFoundError` if there is none, `MetadataError` if it is damaged.
    """
    place = location.rstrip("/").removesuffix(f"/{METADATA}")
    if "://" not in place:
        place = os.path.abspath(os.path.expanduser(place))
        if not os.path.isdir(place):  # opening it would make it
            raise _no_savepoint(place)
    storage = open_storage(place, options)
    try:
        metadata = decode(storage.read(METADATA), f"{storage.url}/{METADATA}")
    except NotFoundError as error:
        raise _no_savepoint(storage.url) from error
    if metadata.kind != "savepoint":
        raise CheckpointNotFoundError(f"{storage.url} is the folder of a checkpoint, not of a savepoint")
    return storage, metadata


def dispose_savepoint(storage: Storage, metadata: CheckpointMetadata) -> int:
    """Delete a savepoint; returns how many files went. The metadata goes last, so that it may be tried again."""
    paths = sorted({file.handle.path for _state, file in all_files(metadata) if file.handle is not None})
    storage.delete(paths)
    storage.delete([METADATA])
    if "://" not in storage.url and not any(storage.list()):
        Path(storage.url).rmdir()
    return len(paths) + 1


def _named_inside(file: StateFile) -> StateFile:
    if file.handle is None:
        return file
    return msgspec.structs.replace(file, handle=msgspec.structs.replace(file.handle, path=inner_path(file.handle.path)))


def _no_savepoint(place: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no savepoint at {place}: a savepoint's folder (savepoint-<job>-<id>) has a {METADATA} file"
    )
